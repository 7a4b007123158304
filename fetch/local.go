package fetch

import (
	"context"
	"crypto/rand"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// beatEvery is how often a bucket with degraded mode local hears of this Client,
	// and beatsPerSecond the most heartbeats, which with many buckets makes it less
	// often. A consumer counts for beatTimes heartbeats.
	beatEvery      = time.Second
	beatsPerSecond = 500
	beatTimes      = 3
	// standKeep is after how long without takes a bucket hears no more of this
	// Client, unless three heartbeats take longer.
	standKeep = 10 * time.Second
	// maxStands bounds the buckets with degraded mode local that a Client stands by
	// for.
	maxStands = termsHalf
)

// stand is what is kept ready for the time that a bucket of degraded mode local
// can't be reached: this consumer's share of it.
type stand struct {
	key string

	mu    sync.Mutex
	terms policy.Terms // of the bucket
	used  time.Duration
	// Consumers of the bucket, this one included: the most that the last heartbeats
	// counted, since after an outage they come back one by one. 0: not known.
	live   int64
	counts [beatTimes]int64

	// What the bucket held at its last answer, and when.
	left int64
	at   time.Duration
	news bool // it has answered since the share was last taken from

	share policy.Bucket
}

// saw notes a bucket's answer, if there is a share to keep ready.
func (c *Client) saw(a answer) {
	if a.err == nil && a.known.stand != nil {
		a.known.stand.saw(a.reply.Remaining, c.stands.now())
	}
}

// saw notes what the bucket held at an answer.
func (s *stand) saw(left int64, now time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.left, s.at, s.used, s.news = left, now, now, true
}

// count notes what a heartbeat counted.
func (s *stand) count(live int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.counts[1:], s.counts[:])
	s.counts[0] = live
	s.live = slices.Max(s.counts[:])
}

// take takes n tokens of the share. It is not known before the first heartbeat was
// answered.
//
// The share has the bucket's rate and capacity, divided by the live consumers. At
// the first take of an outage it holds no more than an equal part of what the bucket
// was last seen to hold, so that the shares of all consumers together begin with
// what was there: a drained bucket leaves nothing for a burst.
func (s *stand) take(n int64, now time.Duration) policy.Taking {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready(now) {
		return policy.Taking{}
	}
	return s.share.Take(n, now.Microseconds())
}

// giveBack returns n tokens to the share.
func (s *stand) giveBack(n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.share.Return(n)
}

// holds is the number of tokens in the share.
func (s *stand) holds(now time.Duration) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ready(now) {
		return 0
	}
	return *s.share.Tokens
}

// ready brings the share up to an instant and reports whether there is one. The lock
// is held.
func (s *stand) ready(now time.Duration) bool {
	s.used = now
	if s.live == 0 {
		return false
	}
	part := s.left / s.live
	terms := shareOf(s.terms, s.live)
	switch control := s.share.Control; {
	case control == nil:
		s.share = policy.Bucket{Tokens: new(int64), Index: new(int64), Control: &policy.Control{Terms: terms, Last: s.at.Microseconds()}}
		*s.share.Tokens = part
	case control.Terms != terms:
		control.Terms, control.Carry = terms, 0
		*s.share.Tokens = min(*s.share.Tokens, terms.Capacity)
	}
	if s.news {
		s.settle(s.at)
		*s.share.Tokens = min(*s.share.Tokens, part)
		s.news = false
	}
	s.settle(now)
	return true
}

// settle credits the share up to an instant.
func (s *stand) settle(now time.Duration) {
	version := policy.Version{Era: s.share.Control.Era, Index: *s.share.Index}
	s.share.Refill(policy.Call{Version: version}, max(now.Microseconds(), s.share.Control.Last))
}

// shareOf are the terms of one of live consumers' share. What a schedule brings is
// not known while the bucket is away, and a grant may have ended: neither counts.
func shareOf(t policy.Terms, live int64) policy.Terms {
	share := policy.Terms{
		Kind: policy.Smooth, Capacity: max(1, t.Capacity/live), Per: 1, Interval: 1, MaxElapsed: t.MaxElapsed,
	}
	if t.Kind == policy.Smooth {
		share.Tokens, share.Per = t.Tokens, t.Per*live
	}
	return share
}

// stands are the buckets with degraded mode local that takes came for. Their
// heartbeats have one goroutine, which begins with the first of them.
type stands struct {
	consumer string        // this Client's name
	began    time.Time     // instants are counted from here, on the monotonic clock
	wake     chan struct{} // there is a new one

	mu      sync.Mutex
	keys    map[string]*stand
	beating bool
}

func newStands() *stands {
	return &stands{consumer: rand.Text(), began: time.Now(), wake: make(chan struct{}, 1), keys: make(map[string]*stand)}
}

func (ss *stands) now() time.Duration { return time.Since(ss.began) }

// standBy keeps a share of a bucket of degraded mode local ready; nil if there are
// too many such buckets. The caller is inside.
func (c *Client) standBy(key string, t policy.Terms) *stand {
	ss := c.stands
	ss.mu.Lock()
	defer ss.mu.Unlock()
	s := ss.keys[key]
	if s == nil {
		if len(ss.keys) >= maxStands {
			return nil
		}
		s = &stand{key: key, used: ss.now()}
		ss.keys[key] = s
		nudge(ss.wake)
		if !ss.beating {
			ss.beating = true
			c.workers.spawn(c.beatAll)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.terms = t
	return s
}

// beatAll sends heartbeats until the Client is closed: at once for a new bucket,
// then for all of them in turn.
func (c *Client) beatAll() {
	timer := time.NewTimer(beatEvery)
	defer timer.Stop()
	for round := time.Duration(0); ; {
		onlyNew := true
		select {
		case <-c.workers.quit:
			return
		case <-c.stands.wake:
		case <-timer.C:
			onlyNew = false
		}
		due, period := c.stands.due(round, onlyNew, c.breakers)
		for i, s := range due {
			if err := c.beat(s.key, s); ReasonOf(err) != ReasonNone {
				break // the next round comes
			}
			if i%beatsPerRest == beatsPerRest-1 && c.nap(beatsPerRest*time.Second/beatsPerSecond) {
				return
			}
		}
		if !onlyNew {
			round = period
			timer.Reset(max(beatEvery/2, time.Duration((0.9+0.2*c.jitter())*float64(beatEvery))))
		}
	}
}

// beatsPerRest is how many heartbeats go without a pause.
const beatsPerRest = 25

// due are the buckets whose heartbeats are due, and how long a round of all takes.
// Those that no take came for are forgotten, except while their server is away: then
// their share is still theirs.
func (ss *stands) due(round time.Duration, onlyNew bool, servers breakers) (due []*stand, period time.Duration) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	period = max(beatEvery, time.Duration(len(ss.keys))*time.Second/beatsPerSecond)
	keep := max(standKeep, beatTimes*max(round, period))
	for key, s := range ss.keys {
		away := servers.of(key).open() != ReasonNone
		s.mu.Lock()
		idle, known := ss.now()-s.used > keep, s.live > 0
		if idle && !away {
			s.live, s.counts = 0, [beatTimes]int64{}
			delete(ss.keys, key)
		}
		s.mu.Unlock()
		if !idle && !away && (!onlyNew || !known) {
			due = append(due, s)
		}
	}
	return due, period
}

// beat sends a heartbeat for a bucket and notes the answer with its stand, nil for
// none.
func (c *Client) beat(key string, s *stand) error {
	limit := c.config.deadline
	if limit == 0 {
		limit = DefaultDeadline
	}
	c.stands.mu.Lock()
	ttl := beatTimes * max(beatEvery, time.Duration(len(c.stands.keys))*time.Second/beatsPerSecond)
	c.stands.mu.Unlock()
	live, err := do(context.Background(), c, limit, func(ctx context.Context) (int64, error) {
		return lua.Live(ctx, c.store, key, c.stands.consumer, ttl)
	}, nil)
	if err == nil && s != nil {
		s.count(live)
	}
	return err
}
