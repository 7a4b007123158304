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
	// DefaultTimeout is the timeout of a call without WithTimeout, if four round trips to the server take less time.
	DefaultTimeout = 50 * time.Millisecond
	// maxDefaultTimeout bounds a call without WithTimeout, including the time for opening connections. It is also the
	// timeout before the server's first answer.
	maxDefaultTimeout = engine.FirstTime
	// defaultConcurrency bounds the round trips that are under way to a server, if WithConcurrency is not given.
	defaultConcurrency = 256
	// maxConcurrency is the highest number that WithConcurrency accepts.
	maxConcurrency = 1 << 16
	// defaultCacheSize is the number of buckets that a Client remembers without WithCacheSize.
	defaultCacheSize = 200_000
	// maxCacheSize is the highest number that WithCacheSize accepts.
	maxCacheSize = 1 << 24
	// defaultRequestMemory is how long a request id is remembered without WithRequestMemory.
	defaultRequestMemory = time.Minute
)

// Option changes a Client.
type Option interface{ applyClient(*config) error }

// CallOption changes one call. If an option has no effect on the method, the call returns ErrInvalidOption.
type CallOption interface{ applyCall(*callConfig) error }

// SharedOption is an Option and a CallOption. It applies to all calls of a Client, or to one call.
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

// Timeout returns the timeout that the option sets; 0 is none. Limiters call it, because they accept no other option.
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

// config has the values of a Client's options.
type config struct {
	callConfig
	concurrency int
	cacheSize   int
	denyCache   bool
	rescue      bool
	hooks       []Hook
	unknown     policy.Degraded   // of buckets whose policy is unknown
	templates   *policy.Templates // those of WithTemplates; nil: none
	// templatesVersion is the version of templates.
	templatesVersion int64
	published        bool // the templates that refillers publish are read
	leases           leaseRules
}

// callConfig has the values of a call's options.
type callConfig struct {
	timeout     time.Duration // if timed; 0: none
	timed       bool          // the timeout was given; otherwise it is the default of the server's distance
	leave       policy.Leave
	request     string // id; empty: none
	memory      time.Duration
	reservation string // id; empty: a random one
	overrun     policy.Overrun
	flow        string
	given       uses // options that were given and that not every method accepts
}

// uses records that an option was given. If its value is invalid, uses returns an error instead.
func (c *callConfig) uses(option uses, invalid error) error {
	if invalid != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, invalid)
	}
	c.given |= option
	return nil
}

// uses is a set of options that not every method accepts.
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

// usesOf has the options that each method accepts beside WithTimeout.
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

// WithTimeout bounds the whole time of a call, including the time for opening connections. When d has passed, the call
// waits for its reply for another 5 ms. Then the degraded mode decides its result, by default ErrUnavailable. If this
// process itself was stopped meanwhile, the timeout is extended by that time, but at most by d. An earlier deadline of
// the context still applies. As an option of New, WithTimeout applies to every call that doesn't have it as its own
// option. In Wait it bounds each request to the server, and not the whole wait. If d is 0 there is no timeout, but the
// Client waits at most a minute for each reply. A negative d is refused.
//
// Without the option the timeout is DefaultTimeout or four round trips to the bucket's server, as recently measured,
// whichever is longer. It does not include the time for opening connections. Altogether a call needs at most a second.
// A second is also the timeout before the server's first answer. Ready waits for that answer.
//
// With a shorter timeout, calls may fail because Redis is slow for a moment, although Redis has executed them. With a
// longer timeout, callers wait longer while Redis is unavailable. If a call ends after less than four round trips, the
// server may be healthy. So its error is ErrUnavailable with ReasonDistance, in every degraded mode.
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

// WithLeave denies a call that would leave fewer than n tokens in the bucket. These tokens are left for more urgent
// work. n is 0 to policy.MaxTokens. RetryAfter of a denial is the time until the bucket has n tokens beyond those of
// the call.
func WithLeave(n int64) CallOption { return leaveOption(policy.Leave{Tokens: n}) }

// WithLeavePercent is like WithLeave, but the number of tokens is given as a part of the bucket's capacity: 0 to 100
// percent, rounded up.
func WithLeavePercent(percent int64) CallOption { return leaveOption(policy.Leave{Percent: percent}) }

func leaveOption(l policy.Leave) CallOption {
	return callOption(func(c *callConfig) error {
		c.leave = l
		return c.uses(usesLeave, l.Validate())
	})
}

// WithFlow names the flow for which a call takes tokens, such as a user, a tenant or a job. The name has 1 to
// policy.MaxFlowLen bytes and up to three levels, as in team-a/user-7. A bucket that has flows is divided fairly among
// them. Each flow gets up to its part, however much the others ask for. The parts that some flows don't need are
// available to all others. All takes without a name belong to one further flow. A bucket without flows ignores the
// name.
//
// The division is fair among names. A caller that can choose its name can get the parts of many flows. So derive the
// name from an authenticated identity, and use one name for all unauthenticated callers. The Client keeps denials,
// lines of Wait and blocks (WithLease) separately for each flow.
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

// WithRequestID names the request for which a take is made. The id has 1 to lua.MaxRequestIDLen printable ASCII
// characters without spaces, and is unique among the takes of a bucket. The bucket remembers the id for some time
// (WithRequestMemory). In that time all takes with this id charge the bucket once, whichever consumer makes them. All
// of them get the result of the first take that was charged. So a take that ended with ErrUnavailable can be repeated.
// The Client itself repeats it once if its connection fails and the timeout leaves time. A denial takes nothing and is
// not remembered, so the request may be made again.
//
// Only the bucket remembers the id. While its server is unavailable, the degraded mode policy.DegradedLocal charges
// each take that it grants to this Client's part of the bucket, also if the id was used before. A later take with the
// id that the bucket answers charges the bucket, too.
//
// If the id was used for another number of tokens, another leave or another flow, the error is ErrRequestReused.
//
// Such a take is a separate call, which doesn't queue behind callers of Wait. For each id that the bucket remembers,
// Redis keeps a key of about a hundred bytes. If the caller stops waiting, the tokens are not given back, because the
// request may be repeated. If Redis loses a bucket, it loses the bucket's request ids, too. On a Cluster or Ring all
// buckets of a TakeAll with a request id must be in one slot.
func WithRequestID(id string) CallOption {
	return callOption(func(c *callConfig) error {
		c.request = id
		return c.uses(usesRequest, lua.CheckRequestID(id))
	})
}

// WithRequestMemory sets how long a request id is remembered after the take that was charged: whole milliseconds up to
// lua.MaxRequestMemory. As an option of New it applies to every take that doesn't have it as its own option. As an
// option of a call it needs WithRequestID. Make it longer than the time for which callers retry.
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

// WithReservationID names a reservation: 1 to lua.MaxIDLen bytes, unique in the bucket. While the reservation lasts, a
// Reserve with the same id and n takes no further tokens, so it can be repeated. The bucket doesn't know reservations
// that a degraded mode granted, so each of these takes tokens. Without this option the id is random.
func WithReservationID(id string) CallOption {
	return callOption(func(c *callConfig) error {
		c.reservation = id
		return c.uses(usesReservation, lua.CheckID(id))
	})
}

// WithOverrun sets what happens if more tokens are used than were reserved, and the bucket has too few for the
// difference. With policy.OverrunClamp, the default, the rest is forgiven. With policy.OverrunDebt the rest is owed, up
// to the bucket's capacity: later refills pay it before they add tokens.
func WithOverrun(o policy.Overrun) CallOption {
	return callOption(func(c *callConfig) error {
		if o != policy.OverrunClamp && o != policy.OverrunDebt {
			return fmt.Errorf("%w: overrun %d; want policy.OverrunClamp or policy.OverrunDebt", ErrInvalidOption, o)
		}
		c.overrun = o
		return c.uses(usesOverrun, nil)
	})
}

// WithConcurrency bounds the concurrent round trips to a server. n is 1 to 65,536. So it also bounds the Client's
// connections, and the goroutines that make calls. PoolSize and MaxActiveConns of the Redis client are further bounds.
// Each round trip sends all calls that wait at that time. At most about 65,000 calls may wait. A further call returns
// ErrUnavailable.
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

// WithCacheSize sets how many buckets the Client remembers: at least the n buckets that it used last. n is 1 to
// 16,777,216. A take from a forgotten bucket also asks for the policy. This costs Redis several times as much as a take
// without the policy. While Redis is unavailable, the degraded mode of a forgotten bucket is unknown.
//
// The Client remembers up to 2n buckets. Each of them needs about 220 bytes and the length of its key. With the default
// size these are 90 MB, beside the keys. A bucket needs no memory before it is used.
func WithCacheSize(n int) Option {
	return clientOption(func(c *config) error {
		c.cacheSize = n
		return inRange("cache size", n, maxCacheSize)
	})
}

// WithDenyCache turns the memory of denials on, which is the default, or off.
//
// If it is on, the Client remembers a denial until its tokens are due, but at most for a second. Meanwhile it denies
// further takes itself, with SourceCached, if they want at least as many tokens and leave at least as many. A return of
// tokens through the same Client makes it forget the denial. Tokens that other programs return, or that an operator
// grants, have no effect before the time is over. Denials of a pool's bucket are not remembered: the bucket must count
// them, because the pool computes the need of its region from their number.
//
// If it is off, every take asks the bucket.
func WithDenyCache(on bool) Option {
	return clientOption(func(c *config) error {
		c.denyCache = on
		return nil
	})
}

// WithRescue turns rescues on, which is the default, or off.
//
// If it is on, a take that is denied although a refill is overdue makes the refill itself and asks again. Its result
// has SourceRescued. A refill is overdue in two cases:
//
//   - The last refill is more than two refill intervals ago. Each Client adds a part of its own to this time, up to a
//     quarter of an interval.
//   - The last refill is in the future, because the server's clock went back.
//
// The Client calls the refillers' script with the version that the denial reported. The script credits the elapsed
// time, whichever program calls it. The call changes no policy and creates no bucket. A Client makes at most one such
// refill per bucket and interval. Buckets with a schedule are not rescued, because only refillers have the schedule.
//
// If it is off, takes are denied while no refiller is alive.
func WithRescue(on bool) Option {
	return clientOption(func(c *config) error {
		c.rescue = on
		return nil
	})
}

// WithPublishedTemplates turns the templates that refillers publish on, which is the default, or off.
//
// If it is on, the Client reads the templates from Redis when it is first used. While it is used, it checks about twice
// a second whether they have changed. Every key that a template matches has a bucket. For keys that no template
// matches, the Client reads the templates again, at most once in a tenth of a second for all of them. It stores nothing
// in Redis for such keys.
//
// If it is off, no templates are read, and keys of templates are unknown.
func WithPublishedTemplates(on bool) Option {
	return clientOption(func(c *config) error {
		c.published = on
		return nil
	})
}

// WithUnknownDegraded sets the degraded mode of buckets whose policy this Client doesn't know, and whose key no
// template matches: DegradedClosed, the default, or DegradedOpen. Once a bucket has answered, the degraded mode of its
// policy applies for as long as the Client remembers the bucket. DegradedLocal is refused, because it needs the
// bucket's rate.
func WithUnknownDegraded(mode policy.Degraded) Option {
	return clientOption(func(c *config) error {
		if mode != policy.DegradedClosed && mode != policy.DegradedOpen {
			return fmt.Errorf("%w: degraded mode %d of unknown buckets; want closed or open", ErrInvalidOption, mode)
		}
		c.unknown = mode
		return nil
	})
}

// WithTemplates gives the Client templates, for programs without a refiller: every key that a template matches is a
// bucket with the template's policy. Each template must be lazy (policy.EnforceLazy) or have a schedule, which makes
// its buckets budgets. In both cases the takes themselves credit the tokens, exactly. A full lazy bucket needs no key
// in Redis. If two templates match a key, the more specific one applies. If neither is more specific, the templates are
// refused.
//
// The Client then doesn't read the templates that refillers publish. All programs that share the keys should have the
// same templates. Lazy buckets have no reservations and no request ids: calls that need them return ErrLazyBucket. To
// change the policy of budgets later, use WithTemplatesVersion.
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

// WithTemplatesVersion sets the version of the templates of WithTemplates, 0 to 2^52-1; the default is 0. Raise it with
// every change of the templates, because the policy of a budget is replaced only by one of a higher version.
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

// versioned sets the version of the templates.
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
