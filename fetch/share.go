package fetch

import (
	"context"
	"crypto/rand"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// liveFor is how long a consumer counts among those of a bucket with degraded mode local after a take of it that was
	// asked whole. A bucket in use is asked whole each policyMaxAge, so that a consumer may miss two of these.
	liveFor = 30 * time.Second
	// registerEvery is the least time between two counts of a bucket's consumers: denials are asked whole, too.
	registerEvery = policyMaxAge / 2
	// recountAfter is when the first take after a bucket's first count has its consumers counted again: those that start
	// at the same moment are not in the first counts of one another.
	recountAfter = time.Second
	// countsKept is how many counts are remembered. The highest is believed: after an outage consumers come back one by
	// one.
	countsKept = 3
)

// share is this consumer's part of a bucket of degraded mode local, kept ready for the time that the bucket can't be
// reached.
type share struct {
	registered mark        // this consumer counts among those of the bucket
	recounted  atomic.Bool // the consumers were counted more than once

	mu    sync.Mutex
	terms policy.Terms // of the bucket
	// Consumers of the bucket, this one included: the most of the last counts, or supposed; 0: not known.
	live    int64
	counts  [countsKept]int64
	counted time.Duration // last

	// What the bucket held at its last reply, and when. Each take of the bucket writes them, without the lock. If two do
	// at once the pair may be of both, which are as late.
	left    atomic.Int64
	at      atomic.Int64
	replies atomic.Uint64
	applied uint64 // replies when the share was last taken from

	bucket  policy.Bucket
	largest int64 // the largest take of this outage that the bucket could hold, with what it leaves
}

// record records the tokens that the bucket held at a reply.
func (s *share) record(left int64, now time.Duration) {
	s.left.Store(left)
	s.at.Store(int64(now))
	s.replies.Add(1)
}

// of returns the share for a bucket that has the terms, a new one for a nil share.
func (s *share) of(terms *policy.Terms) *share {
	if s == nil {
		return &share{terms: *terms}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms = *terms
	return s
}

// count remembers how many consumers the bucket has.
func (s *share) count(live int64, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.counts[1:], s.counts[:])
	s.counts[0] = live
	s.counted = now
	s.live = slices.Max(s.counts[:])
	s.recounted.Store(s.counts[1] > 0)
}

// suppose raises the number of consumers to live if it isn't known, or if an outage begins and it was counted too long
// ago: consumers that came since then are not in it.
func (s *share) suppose(live int64, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live == 0 || s.replies.Load() != s.applied && now-s.counted > liveFor {
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
	if s.live == 0 {
		return false
	}
	replies := s.replies.Load()
	news := replies != s.applied
	s.applied = replies
	if news {
		s.largest = 0
	}
	control := s.bucket.Control
	left, at := s.left.Load(), time.Duration(s.at.Load())
	if control == nil && !news {
		left = s.terms.Capacity
		at = now
	}
	part, terms := left/s.live, partOf(s.terms, s.live)
	terms.Capacity = max(terms.Capacity, s.largest)
	switch {
	case control == nil:
		s.bucket = policy.Bucket{Tokens: new(int64), Index: new(int64),
			Control: &policy.Control{Terms: terms, Last: at.Microseconds()}}
		*s.bucket.Tokens = part
	case control.Terms != terms:
		control.Terms, control.Carry = terms, 0
		*s.bucket.Tokens = min(*s.bucket.Tokens, terms.Capacity)
	}
	if news {
		s.settle(at)
		*s.bucket.Tokens = min(*s.bucket.Tokens, part)
	}
	s.settle(now)
	return true
}

// settle credits the share up to an instant.
func (s *share) settle(now time.Duration) {
	version := policy.Version{Era: s.bucket.Control.Era, Index: *s.bucket.Index}
	s.bucket.Refill(policy.Call{Version: version}, max(now.Microseconds(), s.bucket.Control.Last))
}

// partOf returns the terms of one of live consumers' share. While the bucket is unavailable, the tokens of a schedule
// are unknown, and a grant may have ended: neither is credited. All the time between two takes is credited, since
// nothing else refills a share; it is bounded so that its credit is a number.
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

// consumers is what a Client knows of those that share its buckets.
type consumers struct {
	own   string    // this Client's name
	began time.Time // instants are counted from here, on the monotonic clock

	mu      sync.Mutex
	most    int64 // the most of any bucket, as counted within liveFor before the last count; 0: not known
	counted time.Duration
}

func newConsumers() *consumers { return &consumers{own: rand.Text(), began: time.Now()} }

func (cs *consumers) now() time.Duration { return time.Since(cs.began) }

// count remembers how many consumers a bucket has.
func (cs *consumers) count(live int64) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if now := cs.now(); live >= cs.most || now-cs.counted > liveFor {
		cs.most = live
		cs.counted = now
	}
}

// ofAny returns the most consumers of any bucket; 0 if that is not known.
func (cs *consumers) ofAny() int64 {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.most
}

// updateShare records the tokens that a bucket holds in its share, unless that is nil.
func (c *Client) updateShare(key string, s *share, left int64) {
	if s != nil {
		s.record(left, c.consumers.now())
		c.register(key, s)
	}
}

// register has this Client count among the consumers of a bucket, and counts them, in a round trip of its own that it
// doesn't wait for. The script of a take can't do it: while the bucket's slot of a Cluster moves, a server refuses a
// script of which a key is missing, as that of the consumers may be.
func (c *Client) register(key string, s *share) {
	every := registerEvery
	if !s.recounted.Load() {
		every = recountAfter
	}
	if !s.registered.claim(every, time.Now()) {
		return
	}
	c.life.spawn(func() {
		live, err := c.enter(context.Background(), key)
		if err != nil {
			s.registered.until.Store(nil)
			return
		}
		s.count(live, c.consumers.now())
		c.consumers.count(live)
	})
}

// enter has this Client count among the consumers of a bucket for liveFor, and returns how many there are.
func (c *Client) enter(ctx context.Context, key string) (int64, error) {
	t := c.plain(c.internalBudget(ctx), key)
	return lua.Heartbeat(t.ctx, t, key, c.consumers.own, liveFor)
}

// probe shows whether a server lets a consumer write. One that refuses just this call is alive. Its key may turn out to
// be another server's by now. After a silence connections are made anew, since the network may have forgotten those
// that exist.
func (c *Client) probe(ctx context.Context, s *node) error {
	if c.nodes.cluster != nil {
		c.nodes.cluster.ReloadState(ctx)
	}
	key := s.probe.Load()
	if key == nil {
		return nil
	}
	_, err := c.enter(ctx, *key)
	err = evidence(err)
	if timedOut(err) {
		s.eachSocket((*engine.Sockets).Drop)
	}
	return err
}
