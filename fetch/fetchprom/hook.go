package fetchprom

import (
	"context"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/internal/keylabel"
)

// Other is the policy label of keys that match no entry of [Policies].
const Other = keylabel.Other

// Policies returns a function that gives each key its policy label. Each entry is a bucket's key, or a prefix with a *
// behind it. The label of a key is the entry that equals it. If there is none, it is the longest prefix that matches.
// If no prefix matches either, it is [Other].
func Policies(entries ...string) func(key string) string { return keylabel.Of(entries) }

// Hook is a fetch.Hook and a prometheus.Collector. Its methods are safe for
// concurrent use.
type Hook struct {
	policy   func(key string) string
	client   atomic.Pointer[fetch.Client]
	calls    *prometheus.CounterVec
	tokens   *prometheus.CounterVec
	degraded *prometheus.CounterVec
	shadowed *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
}

var (
	_ fetch.Hook           = (*Hook)(nil)
	_ prometheus.Collector = (*Hook)(nil)
)

// New makes a Hook. policy returns the policy label of a key. If policy is nil, the label is [Other] for every key.
func New(policy func(key string) string) *Hook {
	if policy == nil {
		policy = Policies()
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "refiller_consumer_" + name, Help: help}, labels)
	}
	return &Hook{
		policy: policy,
		calls: counter("calls_total", "Calls of the SDK, by how they ended and who answered.", "op", "policy", "outcome",
			"source"),
		tokens: counter("tokens_taken_total", "Tokens taken, by who gave them.", "policy", "source"),
		degraded: counter("degraded_total", "Calls that the bucket's server did not answer, by the reason.", "policy",
			"reason"),
		shadowed: counter("shadowed_total", "Takes that were admitted although a bucket in shadow mode had too few tokens.",
			"policy"),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "refiller_consumer_call_seconds", Help: "Time of the SDK's calls, waits for tokens included.",
			Buckets: []float64{.00001, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .06, .1, .25, 1, 10},
		}, []string{"op"}),
	}
}

// Watch exports the counts of a Client, too. A further call replaces the Client.
func (h *Hook) Watch(c *fetch.Client) { h.client.Store(c) }

// Begin implements fetch.Hook.
func (h *Hook) Begin(ctx context.Context, _ fetch.Call) context.Context { return ctx }

// End implements fetch.Hook.
func (h *Hook) End(_ context.Context, call fetch.Call, o fetch.Outcome) {
	op := call.Op.String()
	policy := h.policy(call.Key)
	source := o.Result.Source.Kind.String()
	if o.Err != nil {
		source = "none"
	}
	h.calls.WithLabelValues(op, policy, o.Name(call.Op), source).Inc()
	h.seconds.WithLabelValues(op).Observe(o.Duration.Seconds())
	if o.Results == nil {
		h.count(policy, o.Result)
	}
	for i, r := range o.Results { // the tokens of a TakeAll count under the policy of each bucket
		h.count(h.policy(call.Requests[i].Key), r)
	}
	if o.Reason != fetch.ReasonNone {
		h.degraded.WithLabelValues(policy, o.Reason.String()).Inc()
	}
}

// count counts the tokens that a bucket gave.
func (h *Hook) count(policy string, r fetch.Result) {
	if r.Taken > 0 {
		h.tokens.WithLabelValues(policy, r.Source.Kind.String()).Add(float64(r.Taken))
	}
	if r.Shadow {
		h.shadowed.WithLabelValues(policy).Inc()
	}
}

func desc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("refiller_consumer_"+name, help, nil, nil)
}

var (
	descRescues   = desc("rescues_total", "Refills that the SDK made because they were overdue.")
	descOpened    = desc("breaker_opened_total", "Times that calls were stopped because calls to a server failed.")
	descAbandoned = desc("calls_abandoned_total", "Calls that were under way when their callers stopped waiting.")
	descReturned  = desc("tokens_returned_total", "Tokens that the SDK gave back because their callers had left.")
	descClamped   = desc("tokens_clamped_total", "Tokens that came back to buckets that were full, and were dropped.")
	descLost      = desc("tokens_lost_total", "Tokens that calls may have taken although no caller got them, and those "+
		"of leases that could not be given back.")
	descLeased = desc("tokens_leased", "Tokens that the SDK holds in leases.")
)

// Describe implements prometheus.Collector.
func (h *Hook) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range []prometheus.Collector{h.calls, h.tokens, h.degraded, h.shadowed, h.seconds} {
		c.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{descRescues, descOpened, descAbandoned, descReturned, descClamped, descLost,
		descLeased} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (h *Hook) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []prometheus.Collector{h.calls, h.tokens, h.degraded, h.shadowed, h.seconds} {
		c.Collect(ch)
	}
	c := h.client.Load()
	if c == nil {
		return
	}
	s := c.Stats()
	for d, n := range map[*prometheus.Desc]int64{
		descRescues: s.Rescues, descOpened: s.BreakerOpened, descAbandoned: s.Abandoned, descReturned: s.Returned,
		descClamped: s.Clamped, descLost: s.Lost,
	} {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(n))
	}
	ch <- prometheus.MustNewConstMetric(descLeased, prometheus.GaugeValue, float64(s.Leased))
}
