package httplimit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"time"

	"github.com/tokenrefill/refiller/internal/limitcall"
	"github.com/tokenrefill/refiller/limit"
)

// ErrConfig is returned for a Config that can't be used; the error names the
// field.
var ErrConfig = errors.New("httplimit: bad config")

// Config determines what a Middleware limits, and how. Limiter and Key are required.
type Config struct {
	// Limiter has the tokens.
	Limiter limit.Limiter
	// Key returns the key whose tokens a request takes.
	Key KeyFunc
	// Name is the limit's name in headers: 1 to 64 printable ASCII characters; "default" if it is empty. The limits of a
	// limit.Many have names of their own.
	Name string
	// Window is sent to clients, in whole seconds, as the time of the limit. The limiters of package limit don't need it,
	// because they have a window of their own. If neither is known, no time is sent.
	Window time.Duration
	// Weight returns the number of tokens that a request takes. If it returns 0, the request passes. If Weight is nil, a
	// request takes one token.
	Weight func(*http.Request) int64

	// TrustedProxies are the networks of proxies whose X-Forwarded-For is used.
	TrustedProxies []netip.Prefix
	// Allow are the networks of clients that pass without taking tokens.
	Allow []netip.Prefix

	// AllowKey reports keys, such as those of trusted users, whose requests pass without taking tokens; nil: none.
	AllowKey func(key string) bool

	// SlowDown delays requests before they are denied.
	SlowDown SlowDown
	// SkipFailed gives tokens back when a request ends with a status of 400 or more, or with a panic, while its client is
	// still connected. A client that disconnects has used its tokens. The Limiter must be a limit.Undoer or a limit.Many.
	SkipFailed bool
	// Shadow makes the Middleware deny nothing and send no headers. OnLimit is still called.
	Shadow bool
	// FailOpen lets requests pass if the Limiter can't answer, or if their key has no bucket. Otherwise such requests get
	// 503. So declare a template for keys that clients choose. Errors that the request itself has caused, and a flood of
	// new keys, are still refused: see limit.Outcome.
	FailOpen bool
	// Timeout bounds the wait for the Limiter's answer. If it is 0, a fetch.Client uses its own timeout, which depends on
	// the measured distance to its server. Any other Limiter then has DefaultTimeout, so set Timeout if its server is more
	// than 30 ms away.
	//
	// If the Limiter is a fetch.Client, a Timeout above 0 must be more than twice the Client's own timeout. While this
	// process lacks processor time, the Client extends its timeout, at most to twice its length. If the Timeout ends
	// before, the bucket's degraded mode does not apply.
	//
	// If a limit of pacing makes the request wait for its place, that wait comes after the Timeout.
	Timeout time.Duration

	// XHeaders adds X-RateLimit-Limit, X-RateLimit-Remaining and
	// X-RateLimit-Reset.
	XHeaders bool
	// NoHeaders leaves out RateLimit and RateLimit-Policy.
	NoHeaders bool
	// Jitter is the longest time that is added to Retry-After at random. Like the header, it counts in whole seconds.
	Jitter time.Duration

	// Status is the HTTP status of a denial, 400 to 599; 0 means 429.
	Status int
	// Message is the detail in the problem document that a denied client gets.
	Message string
	// MessageKey replaces the problem document if it isn't empty. A denied client then gets a JSON object with Message at
	// this key, such as {"message": "..."}.
	MessageKey string
	// Denied serves denied requests in place of the problem document. The headers are set before, and FromContext returns
	// the Decision.
	Denied http.Handler
	// OnLimit is called for each denial before it is answered, in shadow mode too. It must not block. AbuseLog.Record is
	// such a function.
	OnLimit func(Request, Decision)
	// OnError is called for each request about which no decision could be made, and for tokens that could not be given
	// back.
	OnError func(Request, error)
}

// SlowDown delays requests when few tokens are left: the first request beyond After by Step, the next by two Steps, and
// so on.
type SlowDown struct {
	// After is the number of tokens that may be taken before delays begin.
	After int64
	// Step is the delay that each further token adds; 0 switches delays off.
	Step time.Duration
	// Max is the longest delay; it must be set with Step. A delayed request
	// occupies its connection.
	Max time.Duration
}

// DefaultTimeout bounds the wait for a Limiter other than a fetch.Client, if no Timeout is given.
const DefaultTimeout = 150 * time.Millisecond

func (c Config) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w", ErrConfig, fmt.Errorf(format, args...))
	}
	if c.Limiter == nil {
		return bad("limiter: it is nil")
	}
	if c.Key == nil {
		return bad("key: it is nil")
	}
	if len(c.Name) > 64 {
		return bad("name: it has %d bytes; want 1 to 64", len(c.Name))
	}
	for _, b := range []byte(c.Name) {
		if b < 0x20 || b > 0x7e {
			return bad("name: %q has a character that is not printable ASCII", c.Name)
		}
	}
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"window", c.Window}, {"timeout", c.Timeout}, {"jitter", c.Jitter}, {"slow down: step", c.SlowDown.Step},
		{"slow down: max", c.SlowDown.Max}} {
		if d.value < 0 {
			return bad("%s: %s is negative", d.field, d.value)
		}
	}
	if c.Status != 0 && (c.Status < 400 || c.Status > 599) {
		return bad("status: %d is not from 400 to 599", c.Status)
	}
	if c.SlowDown.After < 0 {
		return bad("slow down: after: %d is negative", c.SlowDown.After)
	}
	if c.SlowDown.Step > 0 && c.SlowDown.Max < c.SlowDown.Step {
		return bad("slow down: max: %s is less than the step, %s", c.SlowDown.Max, c.SlowDown.Step)
	}
	if c.SkipFailed && !limitcall.Returns(c.Limiter) {
		return bad("skip failed: the limiter can't take tokens back")
	}
	for _, list := range []struct {
		field    string
		prefixes []netip.Prefix
	}{{"trusted proxies", c.TrustedProxies}, {"allow", c.Allow}} {
		for i, p := range list.prefixes {
			if !p.IsValid() || p.Addr().Is4In6() {
				return bad("%s[%d]: %s is no network", list.field, i, p)
			}
		}
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name = "default"
	}
	if c.Status == 0 {
		c.Status = http.StatusTooManyRequests
	}
	if w, ok := c.Limiter.(interface{ Window() time.Duration }); ok && c.Window == 0 {
		c.Window = w.Window()
	}
	return c
}

// New makes a Middleware. It sends nothing. Its errors match ErrConfig.
func New(cfg Config) (*Middleware, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Middleware{config: cfg.withDefaults(), now: time.Now, random: rand.Int64N}, nil
}
