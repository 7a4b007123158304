package fetch

import (
	"context"
	"crypto/rand"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// beatEvery is how often a bucket with degraded mode local hears of this Client, and beatsPerSecond the most
	// heartbeats, which with many buckets makes it less often. A consumer counts for beatTimes heartbeats.
	beatEvery      = time.Second
	beatsPerSecond = 500
	beatTimes      = 3
	// beatsPerRest is how many heartbeats go without a pause.
	beatsPerRest = 25
	// shareKeep is after how long without takes a bucket hears no more of this Client, unless three heartbeats take
	// longer.
	shareKeep = 10 * time.Second
	// maxShares bounds the buckets with degraded mode local of which a Client keeps a share ready.
	maxShares = 1 << 14
)

// share is this consumer's part of a bucket of degraded mode local, kept ready for the time that the bucket can't be
// reached.
type share struct {
	key string

	mu    sync.Mutex
	terms policy.Terms // of the bucket
	used  time.Duration
	// Consumers of the bucket, this one included: the most that the last heartbeats counted, since after an outage they
	// come back one by one. 0: not known.
	live   int64
	counts [beatTimes]int64
	idle   bool // no take came for shareKeep: heartbeats have ended, and live may be out of date

	// What the bucket held at its last answer, and when.
	left int64
	at   time.Duration
	news bool // it has answered since the share was last taken from

	bucket  policy.Bucket
	largest int64 // the largest take of this outage that the bucket could hold, with what it leaves
}

// saw notes what the bucket held at an answer.
func (s *share) saw(left int64, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left = left
	s.at = now
	s.used = now
	s.news = true
}

// count notes what a heartbeat counted.
func (s *share) count(live int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.counts[1:], s.counts[:])
	s.counts[0] = live
	s.live = slices.Max(s.counts[:])
}

// suppose raises the number of the bucket's consumers to live, unless heartbeats count them.
func (s *share) suppose(live int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle || s.live == 0 {
		s.live = max(s.live, live)
	}
}

// take takes as many tokens of the share as there are, from least to most, of which its part of leave stays. It is not
// known while the number of consumers isn't.
//
// The share has the bucket's rate and capacity, divided by the live consumers. At the first take of an outage it holds
// no more than an equal part of what the bucket was last seen to hold, so that the shares of all consumers together
// begin with what was there: a drained bucket leaves nothing for a burst. A bucket that has never answered is a
// template's, which begins full.
//
// A take that is larger than the share raises what the share can hold. Otherwise it would be denied for ever.
func (s *share) take(least, most, leave int64, now time.Duration) policy.Taking {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready(now) {
		return policy.Taking{}
	}
	part := policy.Leave{Tokens: (leave + s.live - 1) / s.live}
	if needed := least + part.Tokens; needed <= s.terms.Capacity {
		s.largest = max(s.largest, needed)
		s.bucket.Control.Terms.Capacity = max(s.bucket.Control.Terms.Capacity, needed)
	}
	n := max(least, min(most, *s.bucket.Tokens-part.Tokens))
	return s.bucket.TakeLeaving(n, part, now.Microseconds())
}

// giveBack returns n tokens to the share.
func (s *share) giveBack(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bucket.Return(n)
}

// ready brings the share up to an instant and reports whether there is one. The lock is held.
func (s *share) ready(now time.Duration) bool {
	s.used = now
	if s.live == 0 {
		return false
	}
	if s.news {
		s.largest = 0
	}
	control := s.bucket.Control
	if control == nil && !s.news {
		s.left = s.terms.Capacity
		s.at = now
	}
	part, terms := s.left/s.live, partOf(s.terms, s.live)
	terms.Capacity = max(terms.Capacity, s.largest)
	switch {
	case control == nil:
		s.bucket = policy.Bucket{Tokens: new(int64), Index: new(int64),
			Control: &policy.Control{Terms: terms, Last: s.at.Microseconds()}}
		*s.bucket.Tokens = part
	case control.Terms != terms:
		control.Terms, control.Carry = terms, 0
		*s.bucket.Tokens = min(*s.bucket.Tokens, terms.Capacity)
	}
	if s.news {
		s.settle(s.at)
		*s.bucket.Tokens = min(*s.bucket.Tokens, part)
		s.news = false
	}
	s.settle(now)
	return true
}

// settle credits the share up to an instant.
func (s *share) settle(now time.Duration) {
	version := policy.Version{Era: s.bucket.Control.Era, Index: *s.bucket.Index}
	s.bucket.Refill(policy.Call{Version: version}, max(now.Microseconds(), s.bucket.Control.Last))
}

// partOf are the terms of one of live consumers' share. What a schedule brings is not known while the bucket is away,
// and a grant may have ended: neither counts. All the time between two takes is credited, since nothing else refills a
// share; it is bounded so that its credit is a number.
func partOf(t policy.Terms, live int64) policy.Terms {
	part := policy.Terms{
		Kind: policy.Smooth, Capacity: max(1, t.Capacity/live), Per: 1, Interval: 1,
	}
	if t.Kind == policy.Smooth {
		part.Tokens, part.Per = t.Tokens, t.Per*live
		part.MaxElapsed = math.MaxInt64 / 2 / max(1, t.Tokens)
	}
	return part
}

// shares are those of the buckets with degraded mode local that takes came for. Their heartbeats have one goroutine,
// which begins with the first of them.
type shares struct {
	consumer string        // this Client's name
	began    time.Time     // instants are counted from here, on the monotonic clock
	wake     chan struct{} // there is a new one

	mu      sync.Mutex
	keys    map[string]*share
	beating bool
	most    int64 // the most consumers of any bucket, as heartbeats last counted; 0: not known
}

func newShares() *shares {
	return &shares{consumer: rand.Text(), began: time.Now(), wake: make(chan struct{}, 1), keys: make(map[string]*share)}
}

func (ss *shares) now() time.Duration { return time.Since(ss.began) }

// consumers returns the most consumers of any bucket, as heartbeats last counted; 0 if that is not known.
func (ss *shares) consumers() int64 {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return ss.most
}

// shareOf keeps a share of a bucket of degraded mode local ready; nil if there are too many such buckets.
func (c *Client) shareOf(key string, t policy.Terms) *share {
	ss := c.shares
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s := ss.keys[key]
	if s == nil {
		if len(ss.keys) >= maxShares {
			return nil
		}
		s = &share{key: key, used: ss.now()}
		ss.keys[key] = s
		timing.Signal(ss.wake)
		ss.beating = ss.beating || c.life.spawn(c.beatAll)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms = t
	return s
}

// beatAll sends heartbeats until the Client is closed: at once for a new bucket, then for all of them in turn.
func (c *Client) beatAll() {
	timer := time.NewTimer(beatEvery)
	defer timer.Stop()
	for round := time.Duration(0); ; {
		onlyNew := true
		select {
		case <-c.life.quit:
			return
		case <-c.shares.wake:
		case <-timer.C:
			onlyNew = false
		}
		due, period := c.dueShares(round, onlyNew)
		for i, s := range due {
			if c.beat(context.Background(), s.key, s) != nil {
				break // the next round comes
			}
			if i%beatsPerRest == beatsPerRest-1 && !timing.Sleep(c.life.quit, beatsPerRest*time.Second/beatsPerSecond) {
				return
			}
		}
		if !onlyNew {
			round = period
			timer.Reset(max(beatEvery/2, timing.Between(c.jitter, beatEvery*9/10, beatEvery*11/10)))
		}
	}
}

// dueShares are the buckets whose heartbeats are due, and how long a round of all takes. Those that no take came for
// are forgotten, except while their server is away: then their share is still theirs. What is cached of a forgotten
// bucket keeps its share with the last number of consumers.
func (c *Client) dueShares(round time.Duration, onlyNew bool) (due []*share, period time.Duration) {
	ss := c.shares
	ss.mu.Lock()
	defer ss.mu.Unlock()
	period = max(beatEvery, time.Duration(len(ss.keys))*time.Second/beatsPerSecond)
	keep := max(shareKeep, beatTimes*max(round, period))
	most := int64(0)
	for key, s := range ss.keys {
		away := c.servers.of(key).open(key) != nil
		s.mu.Lock()
		idle, known := ss.now()-s.used > keep, s.live > 0
		if idle && !away {
			s.idle = true
			delete(ss.keys, key)
		} else {
			most = max(most, s.live)
		}
		s.mu.Unlock()
		if !idle && !away && (!onlyNew || !known) {
			due = append(due, s)
		}
	}
	if most > 0 { // otherwise the last ones count
		ss.most = most
	}
	return due, period
}

// beat sends a heartbeat for a bucket and notes the answer with its share, nil for none. The error is that of a server
// that did not answer.
func (c *Client) beat(ctx context.Context, key string, s *share) error {
	t := c.plain(c.own(ctx), key)
	c.shares.mu.Lock()
	ttl := beatTimes * max(beatEvery, time.Duration(len(c.shares.keys))*time.Second/beatsPerSecond)
	c.shares.mu.Unlock()
	live, err := lua.Live(ctx, t, key, c.shares.consumer, ttl)
	if err == nil && s != nil {
		s.count(live)
		c.shares.mu.Lock()
		defer c.shares.mu.Unlock()
		c.shares.most = max(c.shares.most, live)
	}
	return evidence(err)
}

// probe shows whether a server lets a consumer write. One that refuses just this call is alive. Its key may turn out to
// be another server's by now. After a silence connections are made anew, since the network may have forgotten those
// that exist.
func (c *Client) probe(ctx context.Context, s *server) error {
	if c.servers.cluster != nil {
		c.servers.cluster.ReloadState(ctx)
	}
	key := s.probe.Load()
	if key == nil {
		return nil
	}
	err := c.beat(ctx, *key, nil)
	if timedOut(err) {
		s.eachSocket((*engine.Sockets).Drop)
	}
	return err
}
