// Package fetchotel has spans and metrics of the calls of a [fetch.Client], for OpenTelemetry.
//
// # Spans
//
//	client, err := fetch.New(rdb, fetch.WithHook(fetchotel.New(otel.GetTracerProvider(), nil)))
//
// A span is a child of the one in the caller's context, and what the call does with
// its context, such as the commands of an instrumented Redis client, is below it. Its
// name is that of the call, such as "refiller take", and its attributes are
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
// Only a call that ends with an error is one in the span's status, whose description is the outcome: the text of the
// error has the key. A denial is an answer. A call that joins others in one script call has its own span, and the
// commands are below the span of the call that makes it.
//
// # Metrics
//
//	metrics, err := fetchotel.NewMetrics(otel.GetMeterProvider(), fetchotel.Policies("checkout", "user:*"))
//	client, err := fetch.New(rdb, fetch.WithHook(metrics))
//	metrics.Watch(client)
//
// These are the metrics of package fetchprom, with the same attributes, under names that OpenTelemetry's exporters
// write for Prometheus as fetchprom does, so that the same dashboards show them:
//
//	refiller.consumer.calls{op, policy, outcome, source}
//	refiller.consumer.tokens_taken{policy, source}
//	refiller.consumer.call{op}, a histogram in seconds
//	refiller.consumer.degraded{policy, reason}
//	refiller.consumer.shadowed{policy}
//
// and of the Client that is watched rescues, breaker_opened, calls_abandoned, tokens_returned, tokens_clamped,
// tokens_lost and tokens_leased. Keys are never attributes: policy is what a function makes of a key, and that must
// have few values.
package fetchotel
