package fetch

import (
	"context"
	"crypto/rand"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// liveFor is how long a consumer counts as one of a bucket's consumers after it registered. It registers with takes
	// that ask for the bucket's policy, unless registerEvery has not passed. If a consumer makes a call for the bucket at
	// least once each policyMaxAge, the next such take comes at most registerEvery + 2*policyMaxAge after a registration.
	liveFor = 30 * time.Second
	// registerEvery is the least time between two registrations of a consumer with a bucket. Each registration also counts
	// the consumers. Without this bound, each denial would cause a registration, since denials also bring the policy.
	registerEvery = policyMaxAge / 2
	// recountAfter is the least time between two registrations until one after the first finds the consumer still
	// registered. A count before that is too low: consumers that start at the same moment are missing from each other's
	// first count, and after Redis lost the list of the consumers, they come back one by one.
	recountAfter = time.Second
	// countsKept is how long a count applies at least, unless a later one is higher. It lets the other consumers register
	// again after Redis lost the list of them.
	countsKept = liveFor
)

// highest is the highest of the last counts. A count is dropped with the first new one that comes countsKept to twice
// that time after it.
type highest struct {
	before, recent int64         // the highest count before the instant since, and since then
	since          time.Duration // when recent began
	last           time.Duration // when the last count was added
}

// add adds a count.
func (h *highest) add(count int64, now time.Duration) {
	if now-h.since >= countsKept {
		h.before, h.recent = h.recent, 0
		h.since = now
	}
	h.recent = max(h.recent, count)
	h.last = now
}

// value returns the highest count, 0 if there is none.
func (h *highest) value() int64 { return max(h.before, h.recent) }

// share is this consumer's part of a bucket with degraded mode local. Takes use it while the bucket can't be reached.
type share struct {
	registered mark        // this consumer does not register with the bucket again
	found      atomic.Bool // the last registration, which was not the first, found this consumer still registered

	mu    sync.Mutex
	terms policy.Terms // of the bucket
	// live is the number of the bucket's consumers, this one included. It is the highest of the counts, or an assumption
	// (see suppose); 0: not known.
	live   int64
	counts highest

	// left is how many tokens the bucket held at its last reply, and at is the time of that reply. Each take of the bucket
	// writes both, without the lock. If two takes write at once, left and at may be from different replies. This does no
	// harm, because the times of the replies are about equal.
	left    atomic.Int64
	at      atomic.Int64
	replies atomic.Uint64
	applied uint64 // the value of replies when the share was last used

	bucket  policy.Bucket
	largest int64 // the largest take of this outage, with the tokens that it leaves, that the bucket could hold
}

// record records the tokens that the bucket held at a reply.
func (s *share) record(left int64, now time.Duration) {
	s.left.Store(left)
	s.at.Store(int64(now))
	s.replies.Add(1)
}

// of sets the terms of a share, and returns the share. If s is nil, it returns a new share.
func (s *share) of(terms *policy.Terms) *share {
	if s == nil {
		return &share{terms: *terms}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms = *terms
	return s
}

// count remembers how many consumers the bucket has. It reports whether there was a count before.
func (s *share) count(live int64, now time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	counted := s.counts.value() > 0
	s.counts.add(live, now)
	s.live = s.counts.value()
	return counted
}

// suppose raises the number of consumers to live if the number isn't known. It also does so if an outage begins and the
// last count is too old, since newer consumers are missing from that count.
func (s *share) suppose(live int64, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.live == 0 || s.replies.Load() != s.applied && now-s.counts.last > liveFor {
		s.live = max(s.live, live)
	}
}

// take takes up to most tokens from the share, and none if that would be fewer than least. The share's part of leave
// stays in it. If the number of consumers is unknown there is no share, and take returns the zero Taking.
//
// The share has the bucket's rate and capacity, divided by the live consumers. At the first take of an outage it holds
// at most an equal part of the tokens that the bucket held at the last reply to this consumer. So the shares of all
// consumers together begin with no more tokens than the bucket's capacity, and if it was empty at all of these replies
// they allow no burst. A bucket that has never answered belongs to a template, so it begins full.
//
// A take that is larger than the share raises what the share can hold. Otherwise the take would be denied for ever.
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

// loan has the tokens that a share gave to one call.
type loan struct {
	share *share
	asOf  uint64 // the share's value of applied when it gave the tokens
	left  int64  // the tokens that have not gone back; the share's lock guards it
}

// part returns a loan of n of the tokens, for one of the requests of the call.
func (l *loan) part(n int64) *loan {
	if l == nil {
		return nil
	}
	return &loan{l.share, l.asOf, n}
}

// giveBack returns n tokens to the share, but never more than the share gave. It returns none if the share has used a
// later reply of the bucket. The share then began anew with its part of the bucket, and the tokens would be added to
// that part. giveBack reports how many tokens it returned. If l is nil no share gave tokens, and it returns none.
func (l *loan) giveBack(n int64) (returned int64) {
	if l == nil {
		return 0
	}
	s := l.share
	s.mu.Lock()
	defer s.mu.Unlock()
	n = min(n, l.left)
	l.left -= n
	if s.applied != l.asOf {
		return 0
	}
	clamped, _ := s.bucket.Return(n)
	return n - clamped
}

// ready credits the share with the tokens that were earned until now. It reports false if there is no share, because
// the number of consumers is unknown. The lock is held.
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

// settle credits the share with the tokens earned until an instant.
func (s *share) settle(now time.Duration) {
	version := policy.Version{Era: s.bucket.Control.Era, Index: *s.bucket.Index}
	s.bucket.Refill(policy.Call{Version: version}, max(now.Microseconds(), s.bucket.Control.Last))
}

// partOf returns the terms of the share of one of live consumers. While the bucket is unavailable, the tokens of a
// schedule are unknown and a grant may have ended, so neither is credited. The whole time between two takes is
// credited, since nothing else refills a share. MaxElapsed bounds that time only to avoid an overflow.
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

// consumers has the number of Clients, this one included, that share its buckets.
type consumers struct {
	own   string    // this Client's name
	began time.Time // instants are counted from here, on the monotonic clock

	mu      sync.Mutex
	most    int64 // the highest recent count of any bucket's consumers; 0: not known
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

// ofAny returns the largest number of consumers that any bucket has, 0 if it is unknown.
func (cs *consumers) ofAny() int64 {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.most
}

// updateShare records in the share s that its bucket holds left tokens. It does nothing if s is nil. Takes that bring
// the policy (allKeys) also register this Client. So do all takes until a registration finds this Client registered.
func (c *Client) updateShare(key string, s *share, left int64, allKeys bool) {
	if s == nil {
		return
	}
	s.record(left, c.consumers.now())
	if allKeys || !s.found.Load() {
		c.register(key, s)
	}
}

// register adds this Client to the consumers of a bucket and counts them. It does so in a goroutine, with a round trip
// of its own. The script of a take can't do it. While the bucket's slot moves in a Cluster, a server refuses a script
// if one of its keys is missing. The key of the consumers may be missing.
//
// Probes enter this Client, too. So the first registration of a share may find it although the share never registered.
func (c *Client) register(key string, s *share) {
	if !s.registered.claim(recountAfter, time.Now()) {
		return
	}
	c.life.spawn(func() {
		reply, err := c.enter(context.Background(), key)
		if err != nil {
			return
		}
		again := s.count(reply.Count, c.consumers.now())
		c.consumers.count(reply.Count)
		found := reply.Known && again
		if found {
			s.registered.set(registerEvery, time.Now())
		}
		s.found.Store(found)
	})
}

// enter adds this Client to the consumers of a bucket for liveFor, and counts them.
func (c *Client) enter(ctx context.Context, key string) (lua.HeartbeatReply, error) {
	t := c.plain(c.internalBudget(ctx), key)
	return lua.Heartbeat(t.ctx, t, key, c.consumers.own, liveFor)
}

// probe checks that a server lets a consumer write. A server that refuses only this call counts as alive, since the key
// may be on another server by now. If the server doesn't answer in time, its connections are closed, since the network
// may have dropped them without an error.
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
