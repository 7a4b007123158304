// Package metrics counts what the sidecar's doors do.
package metrics

import "github.com/prometheus/client_golang/prometheus"

// Reasons of a refusal.
const (
	QueueFull   = "queue_full"
	QueueWait   = "queue_wait"
	Waits       = "waits"
	Connections = "connections"
)

// Metrics counts calls. It is safe for concurrent use.
type Metrics struct {
	Refused *prometheus.CounterVec // by reason
}

// New makes Metrics and registers them. A nil registry keeps them to itself.
func New(registry prometheus.Registerer) *Metrics {
	m := &Metrics{
		Refused: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refiller_sidecar_refused_total",
			Help: "Calls and connections that the sidecar refused for its own bounds, by reason: queue_full and queue_wait " +
				"for calls, waits for waits for tokens, connections for connections of one client."}, []string{"reason"}),
	}
	for _, reason := range []string{QueueFull, QueueWait, Waits, Connections} {
		m.Refused.WithLabelValues(reason)
	}
	if registry != nil {
		registry.MustRegister(m.Refused)
	}
	return m
}
