package fetchotel

import (
	"context"
	"errors"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/internal/keylabel"
)

// Other is the policy attribute of keys that match no entry of [Policies].
const Other = keylabel.Other

// Policies returns a function that gives each key its policy attribute. Each entry is a bucket's key, or a prefix with
// a * behind it. The attribute of a key is the entry that equals it. If there is none, it is the longest prefix that
// matches. If no prefix matches either, it is [Other].
func Policies(entries ...string) func(key string) string { return keylabel.Of(entries) }

// Metrics is a fetch.Hook that counts calls. Its methods are safe for concurrent use.
type Metrics struct {
	policy                            func(key string) string
	client                            atomic.Pointer[fetch.Client]
	calls, tokens, degraded, shadowed metric.Int64Counter
	seconds                           metric.Float64Histogram
}

var _ fetch.Hook = (*Metrics)(nil)

// NewMetrics makes Metrics that get their instruments from the provider. policy returns the policy attribute of a key.
// If policy is nil, the attribute is [Other] for every key.
func NewMetrics(provider metric.MeterProvider, policy func(key string) string) (*Metrics, error) {
	if policy == nil {
		policy = Policies()
	}
	m, meter := &Metrics{policy: policy}, provider.Meter(scope)
	var errs []error
	counter := func(name, unit, help string) metric.Int64Counter {
		c, err := meter.Int64Counter(prefix+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	m.calls = counter("calls", "{call}", "Calls of the SDK, by how they ended and who answered.")
	m.tokens = counter("tokens_taken", "{token}", "Tokens taken, by who gave them.")
	m.degraded = counter("degraded", "{call}", "Calls that the bucket's server did not answer, by the reason.")
	m.shadowed = counter("shadowed", "{take}",
		"Takes that were admitted although a bucket in shadow mode had too few tokens.")
	var err error
	m.seconds, err = meter.Float64Histogram(prefix+"call", metric.WithUnit("s"),
		metric.WithDescription("Time of the SDK's calls, waits for tokens included."),
		metric.WithExplicitBucketBoundaries(
			.00001, .0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .06, .1, .25, 1, 10))
	return m, errors.Join(append(errs, err, m.observe(meter))...)
}

// observe registers the instruments for the counts of the Client that is watched.
func (m *Metrics) observe(meter metric.Meter) error {
	var errs []error
	var all []metric.Observable
	counter := func(name, unit, help string) metric.Int64ObservableCounter {
		c, err := meter.Int64ObservableCounter(prefix+name, metric.WithUnit(unit), metric.WithDescription(help))
		errs, all = append(errs, err), append(all, c)
		return c
	}
	rescues := counter("rescues", "{refill}", "Refills that the SDK made because they were overdue.")
	opened := counter("breaker_opened", "{time}", "Times that calls were stopped because calls to a server failed.")
	abandoned := counter("calls_abandoned", "{call}", "Calls that were under way when their callers stopped waiting.")
	returned := counter("tokens_returned", "{token}", "Tokens that the SDK gave back because their callers had left.")
	clamped := counter("tokens_clamped", "{token}", "Tokens that came back to buckets that were full, and were dropped.")
	lost := counter("tokens_lost", "{token}",
		"Tokens that calls may have taken although no caller got them, and those of leases that could not be given back.")
	leased, err := meter.Int64ObservableUpDownCounter(prefix+"tokens_leased", metric.WithUnit("{token}"),
		metric.WithDescription("Tokens that the SDK holds in leases."))
	errs = append(errs, err)
	if errors.Join(errs...) != nil {
		return errors.Join(errs...)
	}
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		c := m.client.Load()
		if c == nil {
			return nil
		}
		s := c.Stats()
		for _, one := range []struct {
			instrument metric.Int64Observable
			n          int64
		}{
			{rescues, s.Rescues}, {opened, s.BreakerOpened}, {abandoned, s.Abandoned}, {returned, s.Returned},
			{clamped, s.Clamped}, {lost, s.Lost}, {leased, s.Leased},
		} {
			o.ObserveInt64(one.instrument, one.n)
		}
		return nil
	}, append(all, leased)...)
	return err
}

// Watch adds the counts of a Client to the metrics. A further call replaces the Client.
func (m *Metrics) Watch(c *fetch.Client) { m.client.Store(c) }

// Begin implements fetch.Hook.
func (m *Metrics) Begin(ctx context.Context, _ fetch.Call) context.Context { return ctx }

// End implements fetch.Hook.
func (m *Metrics) End(ctx context.Context, call fetch.Call, o fetch.Outcome) {
	source := o.Result.Source.Kind.String()
	if o.Err != nil {
		source = "none"
	}
	op, policy := attribute.String("op", call.Op.String()), attribute.String("policy", m.policy(call.Key))
	m.calls.Add(ctx, 1, metric.WithAttributes(op, policy,
		attribute.String("outcome", o.Name(call.Op)), attribute.String("source", source)))
	m.seconds.Record(ctx, o.Duration.Seconds(), metric.WithAttributes(op))
	if o.Results == nil {
		m.count(ctx, policy, o.Result)
	}
	for i, r := range o.Results { // the tokens of a TakeAll count under the policy of each bucket
		m.count(ctx, attribute.String("policy", m.policy(call.Requests[i].Key)), r)
	}
	if o.Reason != fetch.ReasonNone {
		m.degraded.Add(ctx, 1, metric.WithAttributes(policy, attribute.String("reason", o.Reason.String())))
	}
}

// count counts the tokens that a bucket gave.
func (m *Metrics) count(ctx context.Context, policy attribute.KeyValue, r fetch.Result) {
	if r.Taken > 0 {
		m.tokens.Add(ctx, r.Taken, metric.WithAttributes(policy, attribute.String("source", r.Source.Kind.String())))
	}
	if r.Shadow {
		m.shadowed.Add(ctx, 1, metric.WithAttributes(policy))
	}
}
