package fetch

import (
	"fmt"
	"time"
)

// Defaults of the options.
const (
	// DefaultDeadline bounds a call where WithDeadline doesn't.
	DefaultDeadline = 50 * time.Millisecond
	// DefaultConcurrency bounds the calls under way where WithConcurrency
	// doesn't.
	DefaultConcurrency = 256
	// MaxConcurrency is the highest number that WithConcurrency accepts.
	MaxConcurrency = 1 << 16
)

// Option changes a Client.
type Option interface{ applyClient(*config) error }

// TakeOption changes one take.
type TakeOption interface{ applyTake(*takeConfig) error }

// config is what the options of a Client say.
type config struct {
	takeConfig
	concurrency int
	coalesce    bool
	denyCache   bool
}

// takeConfig is what the options of a take say.
type takeConfig struct {
	deadline time.Duration // 0: none
}

// WithDeadline bounds the time that a call takes: after d it ends with
// ErrUnavailable, whatever the server does. A context's earlier deadline holds
// as well. Given to New it is the bound of every call, and of each attempt of a
// Wait; given to Take, of this take. 0 means no bound, less than 0 is refused.
//
// Lower, and a slow moment of Redis or of this process fails calls that may have
// had their effect; higher, and callers stand still longer while Redis is away.
func WithDeadline(d time.Duration) DeadlineOption { return DeadlineOption(d) }

// DeadlineOption is an Option and a TakeOption; WithDeadline makes one.
type DeadlineOption time.Duration

func (d DeadlineOption) applyClient(c *config) error { return d.applyTake(&c.takeConfig) }

func (d DeadlineOption) applyTake(t *takeConfig) error {
	if d < 0 {
		return fmt.Errorf("%w: deadline %s; want 0 (none) or more", ErrInvalidOption, time.Duration(d))
	}
	t.deadline = time.Duration(d)
	return nil
}

// WithConcurrency bounds the calls that are under way at once, 1 to
// MaxConcurrency. Further calls wait for their turn, as long as their context
// and deadline allow. It also bounds the Client's goroutines.
//
// More calls than the go-redis client has connections (PoolSize, for a Cluster
// on each node) only wait there instead of here; lower it to spare the server.
func WithConcurrency(n int) Option { return concurrencyOption(n) }

type concurrencyOption int

func (n concurrencyOption) applyClient(c *config) error {
	if n < 1 || n > MaxConcurrency {
		return fmt.Errorf("%w: concurrency %d; want 1 to %d", ErrInvalidOption, n, MaxConcurrency)
	}
	c.concurrency = int(n)
	return nil
}

// WithCoalescing turns the merging of takes on, which is the default, or off.
//
// On, the takes of a bucket that come while a call for it is under way wait for
// its reply and then go together, as one call, and calls for different buckets
// share round trips when there are many. The answers are those of the same takes
// made one by one in the order of their arrival: all or nothing each, none put
// behind a later one. A take that nobody waits for any more is dropped. No take
// waits while the bucket and the connection are free.
//
// Off, every take is a call of its own. A call that fails or hangs then affects
// one take.
func WithCoalescing(on bool) Option { return coalescingOption(on) }

type coalescingOption bool

func (on coalescingOption) applyClient(c *config) error {
	c.coalesce = bool(on)
	return nil
}

// WithDenyCache turns the memory of denials on, which is the default, or off.
//
// On, a denied take is remembered until its tokens are due, a second at most, and
// takes of as many tokens or more are denied meanwhile without a call, with
// SourceCached. A Return through the same Client ends it. What others return, or an
// operator grants, is noticed when it ends.
//
// Off, every take is put to the bucket.
func WithDenyCache(on bool) Option { return denyCacheOption(on) }

type denyCacheOption bool

func (on denyCacheOption) applyClient(c *config) error {
	c.denyCache = bool(on)
	return nil
}

var (
	_ Option     = DeadlineOption(0)
	_ TakeOption = DeadlineOption(0)
)
