package sidecar

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/fetch"
)

// ErrOptions is returned for options that are out of range; the error names each
// of them.
var ErrOptions = errors.New("sidecar: bad options")

// Options is what a Server serves, where and to whom.
type Options struct {
	Client *fetch.Client
	// Envoy is what Envoy's rate limit service answers by; nil: no such service.
	Envoy *RateLimits
	// HTTP and GRPC are addresses, host:port or unix:/path; at least one.
	HTTP, GRPC []string
	// Admin are addresses for plain HTTP that answer probes and metrics and nothing
	// else, for who must not reach the buckets.
	Admin []string
	// TLS is for TCP, but not Admin's; nil: plain. Unix sockets are plain: file permissions guard
	// them.
	TLS *tls.Config
	// Metrics answers GET /metrics of HTTP and Admin; nil: nothing is there.
	Metrics http.Handler
	Limits  Limits
	Drain   Drain
	Logger  hclog.Logger // nil: none
}

// Limits bounds what one client can do.
type Limits struct {
	// Calls is the most calls under way, waits included.
	Calls int
	// Connections is the most connections from one address or process.
	Connections int
	// Body is the most bytes of a request.
	Body int
	// Wait is the longest wait for tokens that a call may ask for.
	Wait time.Duration
	// Patience is how long a client may take to send a request, and to read the
	// answer. A call that doesn't wait is cut off after three times that, an idle
	// HTTP connection after six times; the deadline of Client's calls is less.
	Patience time.Duration
}

// Drain is how a Server ends.
type Drain struct {
	// Delay is for how long calls are still accepted after health has turned, so
	// that load balancers notice.
	Delay time.Duration
	// Timeout is how long calls under way may take after that.
	Timeout time.Duration
}

// DefaultLimits leaves three clients out of four room to call while one has all
// its calls stuck in the SDK, which makes fetch.DefaultConcurrency at once.
func DefaultLimits() Limits {
	return Limits{
		Calls: fetch.DefaultConcurrency / 4, Connections: 256, Body: 64 << 10, Wait: time.Minute, Patience: 10 * time.Second,
	}
}

// DefaultDrain ends within the 30 seconds that Kubernetes gives a pod.
func DefaultDrain() Drain { return Drain{Timeout: 15 * time.Second} }

// Validate reports every option that is out of range.
func (o Options) Validate() error {
	var errs []error
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...)))
		}
	}
	bad(o.Client != nil, "the client is nil")
	bad(len(o.HTTP)+len(o.GRPC) > 0, "no address: want one for HTTP or gRPC at least")
	bad(o.Envoy == nil || len(o.GRPC) > 0, "rate limits for envoy want an address for gRPC")
	l, d := o.Limits, o.Drain
	bad(l.Calls >= 1 && l.Calls <= 1<<16, "calls of a client: %d is not from 1 to %d", l.Calls, 1<<16)
	bad(l.Connections >= 1 && l.Connections <= 1<<16, "connections of a client: %d is not from 1 to %d", l.Connections, 1<<16)
	bad(l.Body >= 1<<10 && l.Body <= 4<<20, "request size: %d bytes is not from %d to %d", l.Body, 1<<10, 4<<20)
	bad(l.Wait >= time.Millisecond && l.Wait <= time.Hour, "longest wait: %s is not from 1ms to 1h", l.Wait)
	bad(l.Patience >= 10*time.Millisecond && l.Patience <= time.Hour, "patience: %s is not from 10ms to 1h", l.Patience)
	bad(d.Delay >= 0 && d.Delay <= time.Hour, "drain delay: %s is not from 0 to 1h", d.Delay)
	bad(d.Timeout >= 0 && d.Timeout <= time.Hour, "drain timeout: %s is not from 0 to 1h", d.Timeout)
	return errors.Join(errs...)
}
