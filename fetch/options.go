package fetch

import (
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Defaults of the options.
const (
	// DefaultTimeout is the timeout of a call where WithTimeout gives none and four round trips to the server take less.
	DefaultTimeout = 50 * time.Millisecond
	// maxDefaultTimeout bounds such a call, the time for opening connections included. It is the timeout before the
	// server's first answer.
	maxDefaultTimeout = engine.FirstTime
	// defaultConcurrency bounds the round trips under way to a server where WithConcurrency doesn't.
	defaultConcurrency = 256
	// maxConcurrency is the highest number that WithConcurrency accepts.
	maxConcurrency = 1 << 16
	// defaultCacheSize is the number of buckets that a Client remembers where WithCacheSize doesn't say.
	defaultCacheSize = 200_000
	// maxCacheSize is the highest number that WithCacheSize accepts.
	maxCacheSize = 1 << 24
	// defaultRequestMemory is how long a request id is remembered where WithRequestMemory doesn't say.
	defaultRequestMemory = time.Minute
)

// Option changes a Client.
type Option interface{ applyClient(*config) error }

// CallOption changes one call. An option that does nothing for the method is ErrInvalidOption.
type CallOption interface{ applyCall(*callConfig) error }

// SharedOption is an Option and a CallOption: for all calls of a Client, or for one.
type SharedOption interface {
	Option
	CallOption
}

// clientOption is an Option.
type clientOption func(*config) error

func (o clientOption) applyClient(c *config) error { return o(c) }

// callOption is a CallOption.
type callOption func(*callConfig) error

func (o callOption) applyCall(c *callConfig) error { return o(c) }

// sharedOption is a SharedOption.
type sharedOption struct{ callOption }

func (o sharedOption) applyClient(c *config) error { return o.callOption(&c.callConfig) }

// Timeout returns the timeout, 0 for none, to limiters, which have no other option.
func (o callOption) Timeout() (time.Duration, error) {
	var c callConfig
	if err := o(&c); err != nil {
		return 0, err
	}
	if c.given != 0 {
		return 0, fmt.Errorf("%w: %s is not for this limiter", ErrInvalidOption, c.given)
	}
	return c.timeout, nil
}

// config is what the options of a Client say.
type config struct {
	callConfig
	concurrency int
	cacheSize   int
	denyCache   bool
	rescue      bool
	hooks       []Hook
	unknown     policy.Degraded   // of buckets that were never seen
	templates   *policy.Templates // those given; nil: none
	// templatesVersion is that of the templates.
	templatesVersion int64
	published        bool // those that refillers publish count
	leases           leaseRules
}

// callConfig is what the options of a call say.
type callConfig struct {
	timeout     time.Duration // if timed; 0: none
	timed       bool          // the timeout was given; otherwise it is the default of the server's distance
	leave       policy.Leave
	request     string // id; empty: none
	memory      time.Duration
	reservation string // id; empty: a random one
	overrun     policy.Overrun
	flow        string
	given       uses // options that not every method has
}

// uses records that a method's option was given, unless its value is invalid.
func (c *callConfig) uses(option uses, invalid error) error {
	if invalid != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, invalid)
	}
	c.given |= option
	return nil
}

// uses is a set of methods' options.
type uses uint8

const (
	usesLeave uses = 1 << iota
	usesRequest
	usesMemory
	usesReservation
	usesOverrun
	usesFlow
)

// String names one option.
func (u uses) String() string {
	return map[uses]string{
		usesLeave: "WithLeave", usesRequest: "WithRequestID", usesMemory: "WithRequestMemory",
		usesReservation: "WithReservationID", usesOverrun: "WithOverrun", usesFlow: "WithFlow",
	}[u]
}

const (
	usesOfTake    = usesLeave | usesRequest | usesMemory | usesFlow
	usesOfTakeAll = usesOfTake
	usesOfReserve = usesLeave | usesReservation | usesOverrun | usesFlow
)

// usesOf are the options of each method beside WithTimeout.
var usesOf = [...]uses{
	OpTake: usesOfTake, OpTakeUpTo: usesOfTake, OpTakeAll: usesOfTakeAll, OpWait: usesLeave | usesFlow,
	OpReserve: usesOfReserve, OpPeek: 0, OpReturn: 0, OpSettle: 0,
}

// with returns the configuration of a call with the options.
func (c *Client) with(op Op, opts []CallOption) (*callConfig, error) {
	if len(opts) == 0 {
		return &c.config.callConfig, nil
	}
	changed := c.config.callConfig
	for _, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("%w: an option is nil", ErrInvalidOption)
		}
		if err := o.applyCall(&changed); err != nil {
			return nil, err
		}
		if extra := changed.given &^ usesOf[op]; extra != 0 {
			return nil, fmt.Errorf("%w: %s is not for %s", ErrInvalidOption, extra, op)
		}
	}
	if changed.given&usesMemory != 0 && changed.request == "" {
		return nil, fmt.Errorf("%w: %s without %s does nothing for %s", ErrInvalidOption, usesMemory, usesRequest, op)
	}
	return &changed, nil
}

// WithTimeout bounds the time of a call, everything included, also the time for opening connections. After d, and a
// last check of 5 ms, the call gets the answer of its degraded mode, by default ErrUnavailable. If this process itself
// was stopped meanwhile, the bound moves by that time, by at most d. A context's earlier deadline holds as well. Given
// to New, the option is for every call that has none of its own; Wait, which waits for tokens, has it for each question
// to the server. 0 means no bound but a minute for each reply; a negative d is refused.
//
// Without the option the timeout is DefaultTimeout or four round trips to the bucket's server, as recently measured,
// whichever is longer. The time for opening connections does not count. Altogether a call takes at most a second, which
// is also the timeout before the server's first answer (Ready waits for that).
//
// With a lower timeout, a slow moment of Redis fails calls that may have had their effect. With a higher one, callers
// wait longer while Redis is unavailable. A call that ends after fewer than four round trips shows nothing of the
// server: it is ErrUnavailable with ReasonDistance, whatever the degraded mode.
func WithTimeout(d time.Duration) SharedOption {
	return sharedOption{func(c *callConfig) error {
		if d < 0 {
			return fmt.Errorf("%w: timeout %s; want 0 (none) or more", ErrInvalidOption, d)
		}
		c.timeout = d
		c.timed = true
		return nil
	}}
}

// WithLeave has a call denied that would leave fewer than n tokens in the bucket, 0 to policy.MaxTokens: so urgent work
// finds some that other work has left. RetryAfter is the time until that many more are there.
func WithLeave(n int64) CallOption { return leaveOption(policy.Leave{Tokens: n}) }

// WithLeavePercent is WithLeave of a part of the bucket's capacity, 0 to 100 percent, rounded up.
func WithLeavePercent(percent int64) CallOption { return leaveOption(policy.Leave{Percent: percent}) }

func leaveOption(l policy.Leave) CallOption {
	return callOption(func(c *callConfig) error {
		c.leave = l
		return c.uses(usesLeave, l.Validate())
	})
}

// WithFlow names the flow for which a call takes tokens, such as a user, a tenant or a job: 1 to policy.MaxFlowLen
// bytes, in up to three levels, as in team-a/user-7. A bucket that has flows is divided fairly among them: each is
// served up to its part, whatever the others ask for, and what they leave is free to all. A take without a name belongs
// to a flow of its own, with all others without one. A bucket without flows ignores the name.
//
// The division is fair among names. A caller that chooses its own can get the parts of many, so take the name from what
// was authenticated, and put strangers into one flow. Denials, lines of Wait and blocks (WithLease) are those of the
// flow.
func WithFlow(name string) CallOption {
	return callOption(func(c *callConfig) error {
		c.flow = name
		invalid := policy.CheckFlow(name)
		if name == "" {
			invalid = fmt.Errorf("%w: it is empty; want 1 to %d bytes", policy.ErrInvalidFlow, policy.MaxFlowLen)
		}
		return c.uses(usesFlow, invalid)
	})
}

// WithRequestID names the request that a take is for: 1 to lua.MaxRequestIDLen printable ASCII characters without
// spaces, unique among the takes of a bucket. However often a take with the id is made, by whichever consumer, the
// tokens are taken once while the bucket remembers the id (WithRequestMemory), and each take gets the answer of the
// first that took them. So a take that ended with ErrUnavailable can be made again, and the Client does so itself,
// once, if its connection fails and the timeout leaves time. A denial takes nothing and is not remembered: the request
// may be made again.
//
// The same id with another number of tokens, or of those to be left, is ErrRequestReused.
//
// Such a take is a call of its own, which doesn't queue behind those who Wait, and the bucket keeps a key of some
// hundred bytes for as long as it remembers it. Tokens that it took for a caller who stopped waiting are not given
// back: they are the request's when it is made again. A bucket that Redis has lost has lost its requests, too. On a
// Cluster or Ring a TakeAll with a request id is of buckets in one slot.
func WithRequestID(id string) CallOption {
	return callOption(func(c *callConfig) error {
		c.request = id
		return c.uses(usesRequest, lua.CheckRequestID(id))
	})
}

// WithRequestMemory is how long request ids are remembered, from the take that was charged on: whole milliseconds up to
// lua.MaxRequestMemory. Given to New it is for every take that has none of its own; given to a call it goes with
// WithRequestID. Make it longer than callers go on retrying.
func WithRequestMemory(d time.Duration) SharedOption {
	return sharedOption{func(c *callConfig) error {
		if d < lua.MinRequestMemory || d > lua.MaxRequestMemory || d%time.Millisecond != 0 {
			return fmt.Errorf("%w: request memory %s; want whole milliseconds up to %s", ErrInvalidOption, d,
				lua.MaxRequestMemory)
		}
		c.memory = d
		return c.uses(usesMemory, nil)
	}}
}

// WithReservationID names a reservation: 1 to lua.MaxIDLen bytes, unlike any other of the bucket. However often a
// Reserve with the id and the same n is made, the tokens are taken once while the reservation lasts. Without it the id
// is random.
func WithReservationID(id string) CallOption {
	return callOption(func(c *callConfig) error {
		c.reservation = id
		return c.uses(usesReservation, lua.CheckID(id))
	})
}

// WithOverrun says what happens if more is used than was reserved and than the bucket then holds: policy.OverrunClamp,
// the default, forgives it, policy.OverrunDebt has later refills pay it before they add tokens, up to the bucket's
// capacity.
func WithOverrun(o policy.Overrun) CallOption {
	return callOption(func(c *callConfig) error {
		if o != policy.OverrunClamp && o != policy.OverrunDebt {
			return fmt.Errorf("%w: overrun %d; want policy.OverrunClamp or policy.OverrunDebt", ErrInvalidOption, o)
		}
		c.overrun = o
		return c.uses(usesOverrun, nil)
	})
}

// WithConcurrency bounds the round trips that are under way to a server at once, 1 to 65,536, and with them the
// Client's goroutines and connections. The PoolSize and the MaxActiveConns of the Redis client bound them, too. A round
// trip takes along all calls that wait, up to some 65,000: further ones are ErrUnavailable.
func WithConcurrency(n int) Option {
	return clientOption(func(c *config) error {
		c.concurrency = n
		return inRange("concurrency", n, maxConcurrency)
	})
}

// inRange returns an error unless n is from 1 to most.
func inRange(what string, n, most int) error {
	if n < 1 || n > most {
		return fmt.Errorf("%w: %s %d; want 1 to %d", ErrInvalidOption, what, n, most)
	}
	return nil
}

// WithCacheSize has the Client remember what it knows of at least the n buckets that it used last, 1 to 16,777,216. A
// take of a bucket that it has forgotten also asks for the policy, which costs Redis several times as much. While Redis
// is unavailable, the degraded mode of such a bucket is unknown.
//
// The Client remembers up to 2n buckets, each in about 220 bytes and its key: 90 MB with the default. A bucket needs no
// memory before it is used.
func WithCacheSize(n int) Option {
	return clientOption(func(c *config) error {
		c.cacheSize = n
		return inRange("cache size", n, maxCacheSize)
	})
}

// WithDenyCache turns the memory of denials on, which is the default, or off.
//
// On, a denied take is remembered until its tokens are due, a second at most, and takes of as many tokens or more,
// which leave as many or more, are denied meanwhile without a call, with SourceCached. A return through the same Client
// ends it. What others return, or an operator grants, is noticed when it ends. Denials of a pool's bucket are not
// remembered: from their number the pool computes what its region needs.
//
// Off, every take is put to the bucket.
func WithDenyCache(on bool) Option {
	return clientOption(func(c *config) error {
		c.denyCache = on
		return nil
	})
}

// WithRescue turns rescues on, which is the default, or off.
//
// On, a take that is denied while the bucket's last refill is more than two refill intervals ago (up to a quarter of
// one more, which differs from Client to Client), or lies ahead because the server's clock went back, makes that refill
// and asks again; its answer has SourceRescued. The refill is the refillers' own script with the version in the denial:
// it credits what is due for the elapsed time, no matter which program makes it, changes no policy and creates no
// bucket. A Client makes at most one per bucket and interval. Buckets with a schedule are not rescued: only refillers
// have the schedule.
//
// Off, takes are denied while no refiller lives.
func WithRescue(on bool) Option {
	return clientOption(func(c *config) error {
		c.rescue = on
		return nil
	})
}

// WithPublishedTemplates turns the templates that refillers publish on, which is the default, or off.
//
// On, the Client reads them from Redis when it is first used, and checks about twice a second while it is used whether
// they have changed. Every key that one of them matches has a bucket. Keys that none matches cost no more than one read
// in a tenth of a second, whatever their number, and leave nothing in Redis.
//
// Off, nothing is read, and the keys of templates are unknown.
func WithPublishedTemplates(on bool) Option {
	return clientOption(func(c *config) error {
		c.published = on
		return nil
	})
}

// WithUnknownDegraded is how takes of buckets are answered whose policy this Client doesn't know when their server
// can't be reached, and whose key no template matches: DegradedClosed, the default, or DegradedOpen. A bucket's own
// policy decides once a take of it has been answered, as long as the Client remembers the bucket. DegradedLocal is
// refused: the share of a bucket of unknown rate is unknown.
func WithUnknownDegraded(mode policy.Degraded) Option {
	return clientOption(func(c *config) error {
		if mode != policy.DegradedClosed && mode != policy.DegradedOpen {
			return fmt.Errorf("%w: degraded mode %d of unknown buckets; want closed or open", ErrInvalidOption, mode)
		}
		c.unknown = mode
		return nil
	})
}

// WithTemplates makes every key that a template matches a bucket of the template's policy: for programs that need no
// refiller. A template's Enforce is policy.EnforceLazy, or it has a schedule, so that its buckets are budgets: takes
// credit them, exactly. A full lazy bucket is no key in Redis. Of two templates that match a key the more specific one
// counts; templates between which that would be a guess are refused.
//
// The Client then reads no templates that refillers publish. All programs that share the keys should have the same
// templates. Reserve, and takes with a request id, of lazy buckets are ErrLazyBucket. When you change the policy of
// budgets, use WithTemplatesVersion.
func WithTemplates(list ...policy.Template) Option {
	return clientOption(func(c *config) error {
		set, err := policy.NewTemplates(0, list, nil)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrInvalidOption, err)
		}
		for _, t := range set.All() {
			if t.Refilled() {
				return fmt.Errorf("%w: template %q: enforce is %s; without a refiller it must be %s, or have a schedule",
					ErrInvalidOption, t.Prefix, t.Enforce, policy.EnforceLazy)
			}
		}
		c.templates = set
		return nil
	})
}

// WithTemplatesVersion is the version of the templates that WithTemplates gives, 0 by default. Raise it with every
// change of them: a higher version replaces the policy of a budget, never the reverse. It is from 0 to 2^52-1.
func WithTemplatesVersion(version int64) Option {
	return clientOption(func(c *config) error {
		if version < 0 || version >= policy.OwnEpoch {
			return fmt.Errorf("%w: version %d of templates; want 0 to %d", ErrInvalidOption, version,
				int64(policy.OwnEpoch-1))
		}
		c.templatesVersion = version
		return nil
	})
}

// versioned gives the templates their version.
func (c *config) versioned() error {
	if c.templates == nil || c.templatesVersion == 0 {
		return nil
	}
	var list []policy.Template
	for _, t := range c.templates.All() {
		list = append(list, t.Template)
	}
	set, err := policy.NewTemplates(c.templatesVersion, list, nil)
	c.templates = set
	return err
}
