package fetch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/prompt"
	"github.com/tokenrefill/refiller/lua"
)

// Client takes tokens from buckets. Its methods are safe for concurrent use.
//
// A call needs one script call. A bucket's first take, and then one in ten seconds,
// also asks for its policy, which costs one more command on the server; what is
// learned is remembered for a bounded number of buckets.
type Client struct {
	rdb       redis.UniversalClient
	store     lua.Client
	prompt    bool // the sockets keep a context's deadline
	config    config
	workers   *workers
	coalescer *coalescer
	terms     *terms
	templates *templates
	apart     bool // the active sets of templates are on other servers than their buckets
	lines     lines
	breakers  breakers
	stands    *stands
	rescues   rescues
	leases    *leases        // nil: there are none
	jitter    func() float64 // uniform in [0, 1)
	timers    sync.Pool      // of *time.Timer
	alarms    sync.Pool      // of *alarm
	stats     struct {
		abandoned, returned, clamped, lost, rescues, opened, shadowed atomic.Int64
		degraded                                                      [reasons]atomic.Int64
	}
}

// New makes a Client of a go-redis client, which stays the caller's to close. It
// sends nothing: a server that is away shows in the first call. The errors are
// ErrInvalidOption.
func New(rdb redis.UniversalClient, opts ...Option) (*Client, error) {
	if rdb == nil {
		return nil, fmt.Errorf("%w: the redis client is nil", ErrInvalidOption)
	}
	cfg := config{takeConfig: takeConfig{deadline: DefaultDeadline, memory: DefaultRequestMemory}, concurrency: DefaultConcurrency, coalesce: true, denyCache: true, rescue: true, breaker: true, published: true}
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		if err := o.applyClient(&cfg); err != nil {
			return nil, err
		}
	}
	c := &Client{
		rdb: rdb, store: newLanes(rdb, cfg), apart: isApart(rdb), prompt: prompt.HonoursDeadlines(rdb), config: cfg,
		workers: newWorkers(cfg.concurrency), terms: newTerms(), jitter: rand.Float64,
		breakers: newBreakers(rdb), stands: newStands(),
		rescues: rescues{spread: rescueSpread * rand.Float64(), next: make(map[string]time.Time)},
	}
	c.templates = newTemplates(c)
	c.lines.keys = make(map[string]*line)
	if cfg.coalesce {
		c.coalescer = newCoalescer(c)
	}
	c.leases = newLeases(c)
	return c, nil
}

// Peek tells what a bucket holds. It takes nothing and writes nothing. It has no
// degraded mode: while the bucket's server is away, whatever its takes are answered,
// Peek is ErrUnavailable, at once if the breaker is open.
func (c *Client) Peek(ctx context.Context, key string) (Result, error) {
	return c.observed(ctx, Call{Op: OpPeek, Key: key}, func(ctx context.Context) (Result, error) { return c.look(ctx, key) })
}

func (c *Client) look(ctx context.Context, key string) (Result, error) {
	if err := lua.CheckKey(key); err != nil {
		return Result{}, err
	}
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return Result{}, shut(why)
	}
	reply, err := c.peek(ctx, key)
	if err != nil {
		return Result{}, err
	}
	r := Result{OK: reply.Tokens > 0, Remaining: reply.Tokens, Outstanding: reply.Outstanding, RetryAfter: wait(reply.Wait), ResetAfter: Never}
	if reply.Terms != nil {
		r.Limit, r.ResetAfter = reply.Terms.Capacity, untilFull(reply)
		r.OnFloor = reply.Terms.Pool && !reply.Terms.Granted(reply.Version.Era, reply.Now)
	}
	return r, nil
}

// Return gives n tokens back, up to the bucket's capacity: what it can't hold is
// dropped. n is 1 to policy.MaxTokens. Return only what was taken: it is not
// checked.
//
// A bucket without a policy can't be returned to and is ErrUnknownBucket. After
// ErrUnavailable the tokens may have been returned; don't return them again, unless
// the breaker was open, when nothing is sent (ReasonOf tells why). What came from a
// degraded mode (SourceFallback) can't be returned: let it go. There is no degraded
// mode of Return.
func (c *Client) Return(ctx context.Context, key string, n int64) error {
	_, err := c.observed(ctx, Call{OpReturn, key, n}, func(ctx context.Context) (Result, error) {
		err := c.putBack(ctx, key, n)
		return Result{OK: err == nil}, err
	})
	return err
}

func (c *Client) putBack(ctx context.Context, key string, n int64) error {
	if err := check(key, n); err != nil {
		return err
	}
	if why := c.breakers.of(key).open(); why != ReasonNone {
		return shut(why)
	}
	reply, err := do(ctx, c, c.config.deadline, func(ctx context.Context) (lua.ReturnReply, error) {
		return c.sendReturn(ctx, key, n, 0)
	}, nil)
	c.terms.forgive(key)
	c.stats.clamped.Add(reply.Clamped)
	return err
}

// Stats counts what happened since the Client was made.
type Stats struct {
	// Abandoned is the number of calls that were under way when their callers
	// stopped waiting.
	Abandoned int64
	// Returned is the number of tokens that such calls turned out to have taken
	// and that were given back, and of those that a TakeAll gave back because
	// another bucket said no.
	Returned int64
	// Clamped is the number of tokens that came back, by Return, Settle and Cancel, of
	// blocks and as Returned tells, and that were dropped since their bucket was full.
	Clamped int64
	// Lost is the number of tokens that calls may have taken without telling
	// anybody: their replies were lost, or came when nobody could give the tokens
	// back any more. Some of these calls may never have run. It also counts what was
	// left in blocks (WithLease) that could not be given back: the bucket was away for
	// too long, or had begun another era.
	Lost int64
	// Leased is the number of tokens that the Client's blocks hold at present.
	Leased int64
	// Rescues is the number of refills that this Client made because they were
	// overdue.
	Rescues int64
	// Degraded is the number of takes that their bucket's server did not answer, by
	// the reason, however they were answered then; nil if there were none.
	Degraded map[Reason]int64
	// Shut is how often so many calls in a row failed that none was sent any more
	// until the server answered again.
	Shut int64
	// Shadowed is the number of calls that were admitted although a bucket in
	// shadow mode had too few tokens.
	Shadowed int64
}

// Stats returns the counts.
func (c *Client) Stats() Stats {
	s := Stats{
		Abandoned: c.stats.abandoned.Load(), Returned: c.stats.returned.Load(), Clamped: c.stats.clamped.Load(), Lost: c.stats.lost.Load(),
		Rescues: c.stats.rescues.Load(), Shut: c.stats.opened.Load(), Shadowed: c.stats.shadowed.Load(), Leased: c.leases.held(),
	}
	for why := range c.stats.degraded {
		if n := c.stats.degraded[why].Load(); n > 0 {
			if s.Degraded == nil {
				s.Degraded = make(map[Reason]int64)
			}
			s.Degraded[Reason(why)] = n
		}
	}
	return s
}

// Close refuses new calls with ErrClosed, wakes what sleeps in Wait, gives blocks of
// tokens (WithLease) back, and waits for the calls under way and for the Client's
// goroutines. When ctx ends first
// its error is returned; the goroutines then end as soon as go-redis gives up
// on their sockets. Closing again waits again. The go-redis client stays open.
func (c *Client) Close(ctx context.Context) error {
	if err := c.workers.close(ctx); err != nil {
		return err
	}
	if c.coalescer != nil {
		c.coalescer.vigil.end()
	}
	if l, ok := c.store.(*lanes); ok {
		l.vigil.end()
	}
	return nil
}
