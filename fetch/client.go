package fetch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/lua"
)

// Client takes tokens from buckets. Its methods are safe for concurrent use.
//
// A call needs one script call, which it shares with other calls that are made at the same time. The first take from a
// bucket, and then one take every ten seconds, also asks for its policy. The Client remembers the policies of a bounded
// number of buckets.
//
// # When Redis is unavailable
//
// A call ends at its context's deadline or when its timeout has passed. Before it ends, it checks once more for replies
// that have arrived. Without [WithTimeout] the timeout is 50 ms or four round trips, whichever is longer. The time for
// opening connections does not count. Before the server's first answer, the timeout is a second. [Client.Ready] waits
// for that answer.
//
// The degraded mode of the bucket's policy then decides the result of a take, which has [SourceFallback] and the
// [Reason]:
//
//   - closed: [ErrUnavailable].
//   - open: the tokens count as taken.
//   - local: this process takes from its share of the rate, in memory.
//
// These cases differ:
//
//   - If a deadline is too short for the distance to the server, the error is [ErrUnavailable] with [ReasonDistance] in
//     every mode, since the server may be healthy.
//   - A context that is cancelled ends its call at once.
//   - When half of the recent calls failed, the server's breaker opens: no call is sent until the server answers probes
//     again.
//   - If this process itself was stopped or got no processor time, the timeout is extended by that time. The process
//     then still reads the replies that have arrived.
//
// A take without a request id is sent once. If its reply is lost, it is unknown whether the tokens were taken: count
// them as spent. With a request id ([WithRequestID]) a take can be repeated, and is charged once. If a caller stops
// waiting, the tokens that were taken for it are returned to their bucket. [Stats] counts tokens that can't be
// returned.
type Client struct {
	config    config
	nodes     *nodes
	buckets   *buckets
	templates *templates
	consumers *consumers
	leases    *leases        // nil: there are none
	jitter    func() float64 // uniform in [0, 1)
	spread    float64        // the first value of jitter
	life      life
	stats     struct {
		abandoned, returned, clamped, lost, rescues, opened, shadowed atomic.Int64
		degraded                                                      [reasons]atomic.Int64
	}
}

// New makes a Client that uses a go-redis client. The caller closes the go-redis client. New sends nothing: if a server
// is unavailable, the first call fails. All errors of New match ErrInvalidOption.
func New(rdb redis.UniversalClient, opts ...Option) (*Client, error) {
	if redisclient.IsNil(rdb) {
		return nil, fmt.Errorf("%w: the redis client is nil", ErrInvalidOption)
	}
	cfg := config{
		callConfig:  callConfig{memory: defaultRequestMemory},
		concurrency: defaultConcurrency, cacheSize: defaultCacheSize, denyCache: true, rescue: true, published: true,
	}
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		if err := o.applyClient(&cfg); err != nil {
			return nil, err
		}
	}
	if err := cfg.versioned(); err != nil {
		return nil, err
	}
	cfg.given = 0 // otherwise calls without a request id would refuse a WithRequestMemory of New
	c := &Client{config: cfg, buckets: newBuckets(cfg.cacheSize), jitter: rand.Float64, consumers: newConsumers()}
	c.life.quit = make(chan struct{})
	c.nodes = newNodes(c, rdb)
	c.templates = newTemplates(c)
	c.spread = c.jitter()
	c.leases = newLeases(c)
	return c, nil
}

// Peek returns what a bucket holds. It takes nothing and writes nothing. It has no degraded mode: while the bucket's
// server is unavailable, Peek returns ErrUnavailable. If the breaker is open it returns at once.
func (c *Client) Peek(ctx context.Context, key string, opts ...CallOption) (Result, error) {
	return c.call(ctx, Call{Op: OpPeek, Key: key}, 1, opts, func(ctx context.Context, cfg *callConfig) (Result, error) {
		t := c.begin(budgetOf(ctx, cfg), key)
		reply, err := t.peek()
		if err != nil {
			return Result{}, err
		}
		r := Result{OK: reply.Tokens > 0, Remaining: max(0, reply.Tokens), Outstanding: reply.Outstanding,
			RetryAfter: wait(reply.Wait), ResetAfter: Never}
		if r.OK {
			r.MoreAfter = Never
		}
		if reply.Terms != nil {
			r.Limit = reply.Terms.Capacity
			r.ResetAfter = peekedTimeUntil(r.Limit, &reply)
			if r.OK {
				r.MoreAfter = peekedTimeUntil(reply.Tokens+1, &reply)
			}
			r.OnFloor = reply.Terms.Pool && !reply.Terms.Granted(reply.Version.Era, reply.Now)
		}
		return r, nil
	})
}

// peek reads what the bucket of a task holds.
func (t *task) peek() (reply lua.PeekReply, err error) {
	err = t.attempt(true, func() (err error) {
		reply, err = t.kind.peek(t.ctx, t, t.key)
		return err
	})
	return reply, err
}

// Stats counts what happened since the Client was made.
type Stats struct {
	// Abandoned is the number of calls for which the caller stopped waiting before the reply came.
	Abandoned int64
	// Returned is the number of tokens that the Client gave back. They were taken by abandoned calls, or by calls of
	// TakeAll that another bucket denied.
	Returned int64
	// Clamped is the number of tokens that were given back but dropped, because their bucket was full. It counts tokens of
	// Undo, Return, Settle and Cancel, tokens of blocks (WithLease), and tokens that Returned counts. It also counts
	// tokens of an Undo whose bucket had begun another era.
	Clamped int64
	// Lost is the number of tokens that calls may have taken although no caller got them: their replies were lost, or
	// came too late to give the tokens back. Some of these calls may never have run. It also counts the tokens of blocks
	// (WithLease) that could not be given back: the bucket was unavailable for too long, or had begun another era.
	Lost int64
	// Leased is the number of tokens that the Client's blocks hold at present.
	Leased int64
	// Rescues is the number of refills that this Client made because they were overdue.
	Rescues int64
	// Degraded is the number of takes that the bucket's server did not answer, by reason. It counts them whatever the
	// degraded mode decided. It is nil if there were none.
	Degraded map[Reason]int64
	// BreakerOpened is how often a breaker opened: so many calls failed that no more were sent until the server answered
	// again.
	BreakerOpened int64
	// BreakersOpen has the servers to which no call is sent at present. It maps their addresses to the reasons. It is nil
	// if there are none.
	BreakersOpen map[string]Reason
	// Shadowed is the number of calls that were admitted although a bucket in shadow mode had too few tokens.
	Shadowed int64
}

// Stats returns the counts.
func (c *Client) Stats() Stats {
	s := Stats{
		Abandoned: c.stats.abandoned.Load(), Returned: c.stats.returned.Load(), Clamped: c.stats.clamped.Load(),
		Lost: c.stats.lost.Load(), Rescues: c.stats.rescues.Load(), BreakerOpened: c.stats.opened.Load(),
		Shadowed: c.stats.shadowed.Load(), Leased: c.leases.held(),
	}
	for why := range c.stats.degraded {
		if n := c.stats.degraded[why].Load(); n > 0 {
			if s.Degraded == nil {
				s.Degraded = make(map[Reason]int64)
			}
			s.Degraded[Reason(why)] = n
		}
	}
	c.nodes.all(func(of *node) {
		if why := of.why(); why != ReasonNone {
			if s.BreakersOpen == nil {
				s.BreakersOpen = make(map[string]Reason)
			}
			s.BreakersOpen[of.addr] = why
		}
	})
	return s
}

// Close closes the Client. From then on every call returns ErrClosed, and calls that sleep in Wait end. Close gives
// blocks of tokens (WithLease) back, and waits for the calls under way and for the Client's goroutines. If ctx ends
// first, Close returns its error. The calls and goroutines then end when the server answers or their time is over, and
// the Client's connections are closed after them. If Close is called again, it waits again. The go-redis client stays
// open.
func (c *Client) Close(ctx context.Context) error { return c.life.end(ctx, c.nodes.close) }

// life counts the goroutines and calls for which Close waits.
type life struct {
	closed  atomic.Bool
	quit    chan struct{} // closed when the Client is
	mu      sync.Mutex
	running sync.WaitGroup // goroutines, and calls of several steps
	after   sync.WaitGroup // leftovers, which may begin when running has ended
	ended   chan struct{}  // closed when all of them have ended and the last step is done; nil before end is called
	err     error          // of the last step
}

// spawn runs job in a goroutine, unless the Client is closed.
func (l *life) spawn(job func()) bool {
	if !l.enter() {
		return false
	}
	go func() {
		defer l.leave()
		job()
	}()
	return true
}

// enter makes Close wait for a call of several steps, until leave is called. It returns false if the Client is closed.
// The last step may return tokens that an earlier step took, so the connections must stay open until then.
func (l *life) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return false
	}
	l.running.Add(1)
	return true
}

func (l *life) leave() { l.running.Done() }

// end waits until the goroutines and the calls have ended, and then calls last. It stops waiting when ctx ends.
func (l *life) end(ctx context.Context, last func() error) error {
	l.mu.Lock()
	if !l.closed.Swap(true) {
		close(l.quit)
		l.ended = make(chan struct{})
		go func() {
			l.running.Wait()
			if err := last(); err != nil {
				l.err = fmt.Errorf("fetch: close: %w", err)
			}
			close(l.ended)
		}()
	}
	l.mu.Unlock()
	select {
	case <-l.ended:
		return l.err
	default:
	}
	select {
	case <-l.ended:
		return l.err
	case <-ctx.Done():
		return fmt.Errorf("fetch: close: calls are still under way: %w", ctx.Err())
	}
}
