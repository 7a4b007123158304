package sidecar

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/lua"
)

// ErrOptions is returned for options that are out of range. The error names each of them.
var ErrOptions = errors.New("sidecar: bad options")

// Options are the options of a Server: its content, its addresses and the bounds of its clients.
type Options struct {
	Client *fetch.Client
	// Envoy has the limits that the rate limit service for Envoy enforces; nil: there is no such service.
	Envoy *envoy.Limits
	// Named are the limits by name; nil: none.
	Named *limits.Set
	// Deadline is how long a call to a named limit or a window may take; 0 means the timeout of the Client, but at least
	// half a second.
	Deadline time.Duration
	// HTTP and GRPC are addresses, host:port or unix:/path; at least one.
	HTTP, GRPC []string
	// Admin are addresses for plain HTTP that serve only probes and metrics. They are for clients that must not reach the
	// buckets.
	Admin []string
	// TLS is for HTTP and GRPC over TCP; nil: plain. Unix sockets are always plain, because file permissions protect them.
	TLS *tls.Config
	// Metrics serves GET /metrics of HTTP and Admin; nil: there is no such path.
	Metrics http.Handler
	// Registry gets the Server's metrics; nil: they are not exported.
	Registry prometheus.Registerer
	// Traces makes a span of each call; nil: there are none.
	Traces trace.TracerProvider
	Limits Limits
	Drain  Drain
	Logger hclog.Logger // nil: none
}

// Limits are the bounds for clients.
type Limits struct {
	// Calls is the largest number of calls that run at once, without waits for tokens. Further calls queue.
	Calls int
	// ClientCalls is the largest number of calls of one client that run at once.
	ClientCalls int
	// Queue is the largest number of calls that queue. A large request counts several times. A call is refused if the
	// queued calls of its client, this one included, would take more places than are free.
	Queue int
	// QueueWait is the longest time for which a call without a deadline queues.
	QueueWait time.Duration
	// Waits is the largest number of waits for tokens under way. One client may have half of them.
	Waits int
	// Connections is the largest number of connections from one address or process.
	Connections int
	// ConnectionAge is the age of a connection at which the client is asked to open another one; 0 means no bound.
	// Otherwise the clients of a service that is scaled out would go on using the first servers.
	ConnectionAge time.Duration
	// Body is the largest size of a request in bytes.
	Body int
	// Wait is the longest wait for tokens that a call may ask for.
	Wait time.Duration
	// Patience is how long a client may take to send a request, and to read the answer. A call that doesn't wait for
	// tokens is cut off after QueueWait and three times Patience. An idle HTTP connection is closed after six times
	// Patience. The deadline of the calls of the Client is shorter.
	Patience time.Duration
}

// Drain has the times in which a Server ends.
type Drain struct {
	// Delay is the time for which calls are still accepted after health checks fail. In this time load balancers stop
	// sending calls.
	Delay time.Duration
	// Timeout is the longest time for calls under way after that.
	Timeout time.Duration
}

// DefaultLimits runs as many calls at once as the SDK makes by default (fetch.WithConcurrency). While all calls of one
// client are stuck in the SDK, half of that is left for other clients. The queue has room for a proxy's burst of 16,384
// calls.
func DefaultLimits() Limits {
	return Limits{
		Calls: 256, ClientCalls: 128, Queue: 1 << 15,
		QueueWait: 2 * time.Second, Waits: 4096, Connections: 4096, ConnectionAge: 24 * time.Hour, Body: 64 << 10,
		Wait: time.Minute, Patience: 10 * time.Second,
	}
}

// DefaultDrain ends within the 30 seconds that Kubernetes gives a pod.
func DefaultDrain() Drain { return Drain{Timeout: 15 * time.Second} }

// leastDeadline is the least default of Options.Deadline. In a burst of ten thousand calls this process takes a tenth
// of a second to read a reply that has arrived. A shorter deadline would then expire, although Redis is healthy.
const leastDeadline = 500 * time.Millisecond

// CallDeadline returns how long a call to a named limit or a window may take at present.
func (o Options) CallDeadline() time.Duration {
	if o.Deadline > 0 {
		return o.Deadline
	}
	return max(leastDeadline, o.Client.Timeout(lua.TemplatesKey))
}

// Validate reports every option that is out of range, by the flags of "consumer serve".
func (o Options) Validate() error {
	var errs []error
	bad := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...)))
		}
	}
	within := func(flag string, n, least, most int) {
		bad(n >= least && n <= most, "%s %d: want %d to %d", flag, n, least, most)
	}
	between := func(flag string, d, least, most time.Duration) {
		bad(d >= least && d <= most, "%s %s: want %s to %s", flag, d, least, most)
	}
	bad(len(o.HTTP)+len(o.GRPC) > 0, "no address: want one for HTTP or gRPC at least")
	bad(o.Envoy == nil || len(o.GRPC) > 0, "rate limits for envoy want an address for gRPC")
	for flag, addresses := range map[string][]string{"--http": o.HTTP, "--grpc": o.GRPC, "--admin": o.Admin} {
		for _, a := range addresses {
			bad(isAddress(a), "%s %q: want host:port with a port from 0 to 65535, or unix:/path", flag, a)
		}
	}
	l, d := o.Limits, o.Drain
	within("--calls", l.Calls, 1, 1<<16)
	within("--client-calls", l.ClientCalls, 1, 1<<16)
	within("--queue", l.Queue, 0, 1<<20)
	within("--waits", l.Waits, 1, 1<<20)
	within("--client-connections", l.Connections, 1, 1<<16)
	within("--max-request", l.Body, 1<<10, 4<<20)
	between("--max-wait", l.Wait, time.Millisecond, time.Hour)
	between("--drain-delay", d.Delay, 0, time.Hour)
	between("--drain-timeout", d.Timeout, 0, time.Hour)
	between("--client-timeout", l.Patience, 10*time.Millisecond, time.Hour)
	bad(l.ConnectionAge == 0 || l.ConnectionAge >= time.Second && l.ConnectionAge <= 30*24*time.Hour,
		"--max-connection-age %s: want 1s to 720h, or 0 for no bound", l.ConnectionAge)
	between("--queue-wait", l.QueueWait, time.Millisecond, time.Minute)
	return errors.Join(errs...)
}
