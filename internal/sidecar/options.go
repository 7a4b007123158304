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
	// Envoy has the limits that the rate limit service for Envoy enforces. If it is nil, there is no such service.
	Envoy *envoy.Limits
	// Named has the limits by name. If it is nil, there are none.
	Named *limits.Set
	// Deadline is the longest time for a call to a named limit or a window. 0 means the timeout of the Client, but at
	// least half a second.
	Deadline time.Duration
	// HTTP and GRPC are addresses of the form host:port or unix:/path. At least one address is needed.
	HTTP, GRPC []string
	// Admin are addresses for plain HTTP that serve only probes and metrics. They are for clients that must not reach the
	// buckets.
	Admin []string
	// TLS is for HTTP and GRPC over TCP. If it is nil, these are plain. Unix sockets are always plain, because file
	// permissions protect them.
	TLS *tls.Config
	// Metrics serves GET /metrics of HTTP and Admin. If it is nil, there is no such path.
	Metrics http.Handler
	// Registry gets the Server's metrics. If it is nil, they are not exported.
	Registry prometheus.Registerer
	// Traces makes a span of each call. If it is nil, there are no spans.
	Traces trace.TracerProvider
	Limits Limits
	Drain  Drain
	Logger hclog.Logger // nil if nothing is logged
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
	// TokenWaits is the largest number of waits for tokens under way. One client may have half of them.
	TokenWaits int
	// Connections is the largest number of connections from one address or process.
	Connections int
	// ConnectionAge is the age of a connection at which the client is asked to open another one; 0 means no bound. Without
	// a bound, the clients of a service that is scaled out would go on using the first servers.
	ConnectionAge time.Duration
	// Body is the largest size of a request in bytes.
	Body int
	// Wait is the longest wait for tokens that a call may ask for.
	Wait time.Duration
	// Patience is the longest time for a client to send a request, and to read the reply. A call that doesn't wait for
	// tokens is cut off after QueueWait plus three times Patience. An idle HTTP connection is closed after six times
	// Patience. Patience should be longer than the deadline of the Client's calls.
	Patience time.Duration
}

// Drain has the times for the end of a Server.
type Drain struct {
	// Delay is the time for which calls are still accepted after health checks fail. In this time load balancers stop
	// sending calls.
	Delay time.Duration
	// Timeout is the longest time that calls under way get after Delay.
	Timeout time.Duration
}

// DefaultLimits returns the default bounds. As many calls run at once as the SDK makes by default
// (fetch.WithConcurrency). One client may have half of them. So the other half is free even if all calls of one client
// are stuck in the SDK. The queue has room for a proxy's burst of 16,384 calls.
func DefaultLimits() Limits {
	return Limits{
		Calls: 256, ClientCalls: 128, Queue: 1 << 15,
		QueueWait: 2 * time.Second, TokenWaits: 4096, Connections: 4096, ConnectionAge: 24 * time.Hour, Body: 64 << 10,
		Wait: time.Minute, Patience: 10 * time.Second,
	}
}

// DefaultDrain ends within the 30 seconds that Kubernetes gives a pod.
func DefaultDrain() Drain { return Drain{Timeout: 15 * time.Second} }

// leastDeadline is the least default of Options.Deadline. In a burst of ten thousand calls this process takes a tenth
// of a second to read a reply that has arrived. A shorter deadline would then expire, although Redis is healthy.
const leastDeadline = 500 * time.Millisecond

// CallDeadline returns the present value of Deadline, or of its default.
func (o Options) CallDeadline() time.Duration {
	if o.Deadline > 0 {
		return o.Deadline
	}
	return max(leastDeadline, o.Client.Timeout(lua.TemplatesKey))
}

// Validate returns an error that has every option out of range, by its flag of "consumer serve".
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
	bad(len(o.HTTP)+len(o.GRPC) > 0, "no address: want at least one for HTTP or gRPC")
	bad(o.Envoy == nil || len(o.GRPC) > 0, "--envoy needs an address for gRPC")
	for flag, addresses := range map[string][]string{"--http": o.HTTP, "--grpc": o.GRPC, "--admin": o.Admin} {
		for _, a := range addresses {
			bad(isAddress(a), "%s %q: want host:port with a port from 0 to 65535, or unix:/path", flag, a)
		}
	}
	l, d := o.Limits, o.Drain
	within("--calls", l.Calls, 1, 1<<16)
	within("--client-calls", l.ClientCalls, 1, 1<<16)
	within("--queue", l.Queue, 0, 1<<20)
	within("--waits", l.TokenWaits, 1, 1<<20)
	within("--client-connections", l.Connections, 1, 1<<16)
	within("--max-request", l.Body, 1<<10, 4<<20)
	between("--max-wait", l.Wait, time.Millisecond, time.Hour)
	between("--drain-delay", d.Delay, 0, time.Hour)
	between("--drain-timeout", d.Timeout, 0, time.Hour)
	between("--client-timeout", l.Patience, 10*time.Millisecond, time.Hour)
	bad(l.ConnectionAge == 0 || l.ConnectionAge >= time.Second && l.ConnectionAge <= 30*24*time.Hour,
		"--max-connection-age %s: want 1s to 720h, or 0 for no limit", l.ConnectionAge)
	between("--queue-wait", l.QueueWait, time.Millisecond, time.Minute)
	return errors.Join(errs...)
}
