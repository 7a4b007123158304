package fetch

import (
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Defaults of the options.
const (
	// DefaultDeadline bounds a call where WithDeadline doesn't.
	DefaultDeadline = 50 * time.Millisecond
	// DefaultConcurrency bounds the calls under way where WithConcurrency
	// doesn't.
	DefaultConcurrency = 256
	// DefaultRequestMemory is how long a request id is remembered where
	// WithRequestMemory doesn't say.
	DefaultRequestMemory = time.Minute
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
	rescue      bool
	breaker     bool
	hooks       []Hook
	degraded    policy.Degraded   // of buckets that were never seen
	templates   *policy.Templates // those given; nil: none
	published   bool              // those that refillers publish count
	leases      leaseRules
}

// takeConfig is what the options of a take say.
type takeConfig struct {
	deadline time.Duration // 0: none
	request  string        // id; empty: none
	memory   time.Duration // of the request
}

// with is the configuration with the options of a take.
func (t takeConfig) with(opts []TakeOption) (takeConfig, error) {
	if len(opts) == 0 {
		return t, nil
	}
	changed := t
	for _, o := range opts {
		if o == nil {
			return t, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		if err := o.applyTake(&changed); err != nil {
			return t, err
		}
	}
	return changed, nil
}

// WithDeadline bounds the time that a call takes: after d it ends with
// ErrUnavailable, whatever the server does. A context's earlier deadline holds
// as well. Given to New it is the bound of every call, and of each attempt of a
// Wait; given to Take or Reserve, of this one. 0 means no bound, less than 0 is refused.
//
// Lower, and a slow moment of Redis or of this process fails calls that may have
// had their effect; higher, and callers stand still longer while Redis is away.
func WithDeadline(d time.Duration) DeadlineOption { return DeadlineOption(d) }

// DeadlineOption is an Option, a TakeOption and a ReserveOption; WithDeadline makes
// one.
type DeadlineOption time.Duration

func (d DeadlineOption) applyClient(c *config) error { return d.applyTake(&c.takeConfig) }

func (d DeadlineOption) applyTake(t *takeConfig) error {
	if d < 0 {
		return fmt.Errorf("%w: deadline %s; want 0 (none) or more", ErrInvalidOption, time.Duration(d))
	}
	t.deadline = time.Duration(d)
	return nil
}

// WithRequestID names the request that a take is for: 1 to
// lua.MaxRequestIDLen printable ASCII characters without spaces, unique among the
// takes of a bucket. However often a take with the id is made, by whichever
// consumer, the tokens are taken once while the bucket remembers the id
// (WithRequestMemory), and each take gets the answer of the first that took them.
// So a take that ended with ErrUnavailable can be made again, and the Client does
// so itself, once, if its connection fails and the deadline leaves time. A denial
// takes nothing and is not remembered: the request may be made again.
//
// The same id with another number of tokens is ErrRequestReused.
//
// Such a take is a call of its own, and the bucket keeps a key of some hundred
// bytes for as long as it remembers it. Tokens that it took for a caller who
// stopped waiting are not given back: they are the request's when it is made
// again. A bucket that Redis has lost has lost its requests, too.
func WithRequestID(id string) TakeOption { return requestIDOption(id) }

type requestIDOption string

func (id requestIDOption) applyTake(t *takeConfig) error {
	if err := lua.CheckRequestID(string(id)); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	t.request = string(id)
	return nil
}

// WithRequestMemory is how long request ids are remembered, from the take that
// was charged on: whole milliseconds up to lua.MaxRequestMemory. Given to New it
// is for every take that has none of its own. Make it longer than callers go on
// retrying.
func WithRequestMemory(d time.Duration) RequestMemoryOption { return RequestMemoryOption(d) }

// RequestMemoryOption is an Option and a TakeOption; WithRequestMemory makes one.
type RequestMemoryOption time.Duration

func (d RequestMemoryOption) applyClient(c *config) error { return d.applyTake(&c.takeConfig) }

func (d RequestMemoryOption) applyTake(t *takeConfig) error {
	m := time.Duration(d)
	if m < lua.MinRequestMemory || m > lua.MaxRequestMemory || m%time.Millisecond != 0 {
		return fmt.Errorf("%w: request memory %s; want %s to %s in whole milliseconds", ErrInvalidOption, m, lua.MinRequestMemory, lua.MaxRequestMemory)
	}
	t.memory = m
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
// operator grants, is noticed when it ends. Denials of a pool's bucket are not
// remembered: by them the pool learns what its region needs.
//
// Off, every take is put to the bucket.
func WithDenyCache(on bool) Option { return denyCacheOption(on) }

type denyCacheOption bool

func (on denyCacheOption) applyClient(c *config) error {
	c.denyCache = bool(on)
	return nil
}

// WithRescue turns rescues on, which is the default, or off.
//
// On, a take that is denied while the bucket's last refill is more than two refill
// intervals ago (up to a quarter of one more, which differs from Client to Client)
// makes that refill and asks again; its answer has SourceRescued. The refill is the
// refillers' own script with what the denial told: it credits what is due for the
// elapsed time, whoever makes it, changes no policy and creates no bucket. A Client
// makes at most one per bucket and interval. Buckets with a schedule are not
// rescued: its instants are the refillers' to know.
//
// Off, takes are denied while no refiller lives.
func WithRescue(on bool) Option { return rescueOption(on) }

type rescueOption bool

func (on rescueOption) applyClient(c *config) error {
	c.rescue = bool(on)
	return nil
}

// WithBreaker turns the breaker on, which is the default, or off.
//
// On, after some calls in a row that a server did not answer no further ones are
// sent: takes are answered at once by the policy's degraded mode, and the Client
// probes the server a few times a second until it answers again and again. On a
// Cluster or Ring there is a breaker for each 64th of the slots.
//
// Off, every take is sent, and costs its deadline while the server is silent.
func WithBreaker(on bool) Option { return breakerOption(on) }

type breakerOption bool

func (on breakerOption) applyClient(c *config) error {
	c.breaker = bool(on)
	return nil
}

// WithDegraded is how takes of buckets are answered whose policy this Client doesn't
// know when their server can't be reached: DegradedClosed, the default, or
// DegradedOpen. A bucket's own policy decides once a take of it has been answered,
// as long as it is among the last some ten thousand. DegradedLocal is refused: the
// share of a bucket of unknown rate is unknown.
func WithDegraded(mode policy.Degraded) Option { return degradedOption(mode) }

type degradedOption policy.Degraded

func (m degradedOption) applyClient(c *config) error {
	if mode := policy.Degraded(m); mode != policy.DegradedClosed && mode != policy.DegradedOpen {
		return fmt.Errorf("%w: degraded mode %d of unknown buckets; want closed or open", ErrInvalidOption, m)
	}
	c.degraded = policy.Degraded(m)
	return nil
}

var (
	_ Option        = DeadlineOption(0)
	_ TakeOption    = DeadlineOption(0)
	_ ReserveOption = DeadlineOption(0)
	_ Option        = RequestMemoryOption(0)
	_ TakeOption    = RequestMemoryOption(0)
)
