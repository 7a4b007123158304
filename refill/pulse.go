package refill

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// beatState is a standby's judgement of the pulse.
type beatState int

const (
	beating beatState = iota // the leader refills
	late                     // the beat is overdue: read the indexes
	silent                   // the leader has stopped: race
)

// Times since the last beat of the pulse, in intervals. By the waiting rule (nextCall), a replica's first refill comes
// half an interval after the call that reads the index. So a standby that reads the indexes at lateAfter refills two
// intervals after the last beat.
const (
	lateAfter   = 3 / 2.0
	silentAfter = 2.0
)

// pulse is the leader's sign of life on one master. It is a bucket that only the leader refills, once in each interval.
// The standbys read it.
type pulse struct {
	beat    *bucket // the pulse as the leader's bucket
	rng     *rand.Rand
	peekDue time.Time // when a standby reads it next; zero for the leader

	version policy.Version // of the last reading
	changed time.Time      // when the last beat was, by our clock; before the first beat, when the first reading was
	peeked  time.Time      // when the request of the last reading was sent
	jitter  time.Duration  // spreads the standbys over time, drawn anew for each silence
	state   beatState

	asked      bool // a call about it is under way
	older      bool // the leader's configuration is older than this replica's
	withheld   bool // this leader's configuration is outdated, so it doesn't refill the pulse
	unreadable bool // the key holds something else, or the server denies us access
}

// pulseName returns the name of the pulse of all replicas that refill the same buckets. A pulse says nothing about
// buckets that its leader doesn't know. So a standby with other buckets than the leader, such as one of another
// deployment with the same election prefix, finds its own pulse silent, and races.
func pulseName(name string, buckets []Bucket, templates *policy.Templates) string {
	var names []string
	for _, b := range buckets {
		names = append(names, "bucket "+b.Key)
	}
	for _, t := range refilled(templates) {
		names = append(names, "template "+t.Prefix)
	}
	slices.Sort(names)
	digest := sha256.Sum256([]byte(strings.Join(names, "\n")))
	return fmt.Sprintf("%s:%x", name, digest[:6])
}

func newPulse(key string, interval time.Duration, version int64, rng *rand.Rand) *pulse {
	return &pulse{beat: newSignal(key, interval, version), rng: rng}
}

// due returns when the leader has to refill the pulse, or a standby has to read it. It returns the zero time for never,
// and while a call for the pulse is under way.
func (p *pulse) due() time.Time {
	switch {
	case p.asked || p.withheld:
		return time.Time{}
	case p.isRead():
		return p.peekDue
	}
	return p.beat.due
}

// isRead reports whether this replica reads the pulse, as a standby does.
func (p *pulse) isRead() bool { return !p.peekDue.IsZero() }

// assume changes the role. A new leader refills the pulse at once. A new standby reads the pulse at once, as if for the
// first time.
func (p *pulse) assume(leading bool, now time.Time) {
	p.state = beating
	p.older = false
	p.withheld = false
	if leading {
		p.peekDue, p.beat.due = time.Time{}, now
		return
	}
	p.peekDue, p.changed = now, time.Time{}
}

// applyMissing applies a reading that found no pulse.
func (p *pulse) applyMissing(replied time.Time) {
	if p.changed.IsZero() {
		p.changed = replied
	}
	p.older = false
	p.judge(replied)
}

// apply applies a reading of the pulse. sent and replied are the times of the call by our clock.
func (p *pulse) apply(reply lua.PeekReply, sent, replied time.Time) {
	first := p.changed.IsZero()
	if first || reply.Version != p.version {
		// The age of the beat is computed by the server's clock. It is at most the time since the previous reading was sent,
		// by our clock, because that reading did not find this beat yet.
		most := time.Duration(silentAfter * float64(p.beat.interval))
		if !first {
			most = replied.Sub(p.peeked)
		}
		ago := time.Duration(reply.Now-reply.Last) * time.Microsecond
		p.version, p.changed = reply.Version, replied.Add(-min(max(ago, 0), most))
	}
	p.peeked = sent
	p.older = reply.Terms != nil && reply.Terms.FileVersion() < p.beat.terms.Fence.Epoch
	p.judge(replied)
}

// judge sets the state and the time of the next reading.
func (p *pulse) judge(now time.Time) {
	t := p.beat.interval
	times := func(f float64) time.Duration { return time.Duration(f*float64(t)) + p.jitter }
	switch silence := now.Sub(p.changed); {
	case p.older || silence >= times(silentAfter):
		p.state, p.peekDue = silent, now.Add(t)
	case silence >= times(lateAfter):
		p.state, p.peekDue = late, p.changed.Add(times(silentAfter))
	default:
		if p.state != beating || p.jitter == 0 {
			p.jitter = jitter(t, p.rng)
		}
		p.state, p.peekDue = beating, p.changed.Add(times(lateAfter))
		// The first reading after a beat comes when the next beat should be there.
		if expected := p.changed.Add(t + t/10); expected.After(now) {
			p.peekDue = expected
		}
	}
}
