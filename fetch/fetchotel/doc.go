// Package fetchotel has spans and metrics of the calls of a [fetch.Client], for OpenTelemetry.
//
// # Spans
//
//	client, err := fetch.New(rdb, fetch.WithHook(fetchotel.New(otel.GetTracerProvider(), nil)))
//
// A span is a child of the one in the caller's context. The commands of an instrumented Redis client are below it. Its
// name is that of the call, such as "refiller take". These are its attributes:
//
//	refiller.op         take, take_up_to, take_all, wait, peek, return, reserve, settle
//	refiller.bucket     what a function makes of the key; missing without one
//	refiller.tokens     asked for, or used
//	refiller.outcome    taken, denied, done, or what went wrong: see fetch.Outcome.Name
//	refiller.taken      tokens, if any
//	refiller.source     who answered: shared, leased, cached, rescued, fallback
//	refiller.shadow     true if a bucket in shadow mode would have denied the call
//	refiller.reason     why the bucket's server did not answer; missing if it did
//
// The span's status is an error only if the call ends with one; a denial is none. Its description is the outcome, since
// the error's text has the key. Of calls that share a script call, each has a span; the one that sent it has the rest.
//
// # Metrics
//
//	metrics, err := fetchotel.NewMetrics(otel.GetMeterProvider(), fetchotel.Policies("checkout", "user:*"))
//	client, err := fetch.New(rdb, fetch.WithHook(metrics))
//	metrics.Watch(client)
//
// These are the metrics of package fetchprom. OpenTelemetry's exporters write the same names, for the same dashboards:
//
//	refiller.consumer.calls{op, policy, outcome, source}
//	refiller.consumer.tokens_taken{policy, source}
//	refiller.consumer.call{op}, a histogram in seconds
//	refiller.consumer.degraded{policy, reason}
//	refiller.consumer.shadowed{policy}
//
// The Client that is watched adds rescues, breaker_opened, calls_abandoned, tokens_returned, tokens_clamped,
// tokens_lost and tokens_leased. Keys are never attributes. A function makes the policy of a key; it must have few
// values.
package fetchotel
