// Package metrics counts and times the calls to the sidecar, by the interface (door) through which they came.
package metrics

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// These are the reasons of a refusal.
const (
	QueueFull   = "queue_full"
	QueueWait   = "queue_wait"
	TokenWaits  = "waits"
	Connections = "connections"
)

// These are the doors: the interfaces of the sidecar, as metrics name them.
const (
	HTTP  = "http"
	GRPC  = "grpc"
	Check = "check" // a proxy asks whether a request may pass
	Envoy = "envoy"
)

// These are the outcomes of a request to a limit.
const (
	admitted  = "admitted"
	nearLimit = "near_limit" // admitted, with more than nearPercent of the limit in use
	denied    = "denied"
	shadow    = "shadow"    // admitted, since the limit or its bucket is in shadow mode
	failed    = "failed"    // there was no decision
	refused   = "refused"   // the request itself is wrong
	cancelled = "cancelled" // the client left
)

const nearPercent = 80

const (
	// mostDetails is the highest number of labels that contain values of requests.
	mostDetails = 1000
	maxLabel    = 256 // bytes
	// other is the label of a request whose own label would exceed mostDetails or maxLabel.
	other = "other"
)

// Metrics counts calls. It is safe for concurrent use. A nil Metrics counts nothing.
type Metrics struct {
	Refused *prometheus.CounterVec // by reason

	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec

	mu      sync.Mutex
	details map[string]bool // labels with values of requests
}

// New makes Metrics and registers them. If registry is nil, New does not register them.
func New(registry prometheus.Registerer) *Metrics {
	m := &Metrics{
		Refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refiller_sidecar_refused_total",
			Help: "Calls and connections that the sidecar refused because of its own bounds, by reason: queue_full and " +
				"queue_wait (calls), waits (waits for tokens), connections (connections of one client)."}, []string{"reason"}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refiller_sidecar_limit_requests_total",
			Help: "Requests to named limits and to limits for Envoy, by outcome: admitted, near_limit (admitted, with more " +
				"than 80 % of the limit in use), denied, shadow (admitted in shadow mode), failed, refused, cancelled."},
			[]string{"door", "limit", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "refiller_sidecar_call_seconds",
			Help:    "Time of calls in the sidecar, including their time in the queue. Waits for tokens are not measured.",
			Buckets: []float64{.00025, .0005, .001, .0025, .005, .01, .02, .05, .1, .25, .5, 1, 2.5},
		}, []string{"door"}),
		details: make(map[string]bool),
	}
	for _, reason := range []string{QueueFull, QueueWait, TokenWaits, Connections} {
		m.Refused.WithLabelValues(reason)
	}
	for _, door := range []string{HTTP, GRPC, Check, Envoy} {
		m.seconds.WithLabelValues(door)
	}
	if registry != nil {
		registry.MustRegister(m.Refused, m.requests, m.seconds)
	}
	return m
}

// Decided counts a request to a limit, by its result or its error.
func (m *Metrics) Decided(door, limit string, r fetch.Result, err error) {
	if m == nil {
		return
	}
	m.requests.WithLabelValues(door, limit, outcomeOf(r, err)).Inc()
}

func outcomeOf(r fetch.Result, err error) string {
	switch {
	case errors.Is(err, context.Canceled):
		return cancelled
	case err != nil && call.FailureOf(err).HTTP >= http.StatusInternalServerError:
		return failed
	case err != nil:
		return refused
	case r.Shadow:
		return shadow
	case !r.OK:
		return denied
	case r.Limit > 0 && r.Limit-r.Remaining > r.Limit/100*nearPercent+r.Limit%100*nearPercent/100:
		return nearLimit
	}
	return admitted
}

// ObserveCall records the duration of a call that came through a door.
func (m *Metrics) ObserveCall(door string, d time.Duration) {
	if m != nil {
		m.seconds.WithLabelValues(door).Observe(d.Seconds())
	}
}

// Detail returns the label of a limit that has values of requests in its name. The number of such labels is bounded.
// Further names, and names that are too long, become "other".
func (m *Metrics) Detail(name string) string {
	if m == nil || len(name) > maxLabel {
		return other
	}
	if !utf8.ValidString(name) {
		name = strings.ToValidUTF8(name, "\uFFFD")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.details[name] {
		return name
	}
	if len(m.details) == mostDetails {
		return other
	}
	m.details[name] = true
	return name
}
