package refill

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// beatState is what a standby makes of a pulse.
type beatState int

const (
	beating beatState = iota // the leader refills
	late                     // the beat is overdue: time to learn the indexes
	silent                   // nobody refills: race
)

// Multiples of the pulse's interval since its last beat. Learning an index
// takes half an interval by the waiting rule, so a standby that learns at
// lateAfter refills two intervals after the last beat.
const (
	lateAfter   = 3 / 2.0
	silentAfter = 2.0
)

// pulse is one master's sign of life of the leader: a bucket that the leader
// alone refills, every interval, and that the standbys read.
type pulse struct {
	beat    *bucket // the pulse as the leader's bucket
	rng     *rand.Rand
	peekDue time.Time // a standby's next look; zero for the leader

	version policy.Version // as of the last look
	changed time.Time      // our time of the last beat; while none was heard, of the first look
	peeked  time.Time      // the last look
	jitter  time.Duration  // keeps the standbys apart, drawn anew for each silence
	state   beatState

	asked      bool // a call about it is under way
	older      bool // the leader's configuration is older than this replica's
	withheld   bool // this leader's configuration is outdated, so it gives no sign of life
	unreadable bool // the key holds something else, or is forbidden to us
}

func newPulse(key string, interval time.Duration, version int64, rng *rand.Rand) *pulse {
	return &pulse{beat: newSignal(key, interval, version), rng: rng}
}

// due is when the pulse is to be refilled by the leader, or read by a standby; zero if it isn't, or that is under way.
func (p *pulse) due() time.Time {
	switch {
	case p.asked || p.withheld:
		return time.Time{}
	case p.looks():
		return p.peekDue
	}
	return p.beat.due
}

// looks reports whether this replica reads the pulse.
func (p *pulse) looks() bool { return !p.peekDue.IsZero() }

// assume changes the role. A new leader beats at once; a new standby listens
// afresh, which gives a successor two intervals.
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

// absent takes in a look that found no pulse.
func (p *pulse) absent(replied time.Time) {
	if p.changed.IsZero() {
		p.changed = replied
	}
	p.older = false
	p.judge(replied)
}

// heard takes in a look at the pulse, sent and replied at our times.
func (p *pulse) heard(reply lua.PeekReply, sent, replied time.Time) {
	first := p.changed.IsZero()
	if first || reply.Version != p.version {
		// The server's clock tells how long ago the beat was. It is trusted only
		// within what our own clock knows: a beat that is new came after the
		// look before.
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

// judge decides on the state and on the next look.
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
		// The first look after a beat comes when the next one should be there.
		if look := p.changed.Add(t + t/10); look.After(now) {
			p.peekDue = look
		}
	}
}
