// Package fetchotel makes spans and metrics of the calls of a [fetch.Client], for OpenTelemetry.
//
// # Spans
//
//	client, err := fetch.New(rdb, fetch.WithHook(fetchotel.New(otel.GetTracerProvider(), nil)))
//
// Each call has a span, which is a child of the span in the caller's context. If the Redis client is instrumented, the
// spans of its commands are children of the call's span. The span's name has the kind of the call, such as "refiller
// take". The span has these attributes:
//
//	refiller.op         take, take_up_to, take_all, wait, peek, return, reserve, settle
//	refiller.bucket     the result of the bucket function for the key; missing if there is none
//	refiller.tokens     tokens that were asked for; for settle, tokens that were used
//	refiller.outcome    taken, denied, done, or the kind of failure (see fetch.Outcome.Name)
//	refiller.taken      tokens that were taken; missing if there were none
//	refiller.source     the origin of the result: shared, leased, cached, rescued, fallback
//	refiller.shadow     true if a bucket in shadow mode had too few tokens for the call
//	refiller.reason     the reason for which the bucket's server did not answer; missing if it did
//
// If the call returns an error, the span's status is an error, with the outcome as its description. The error's text is
// not used, because it has the key. A denial is not an error. Calls that share a script call have one span each. The
// span of the script call is a child of only one of them.
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
// With Watch, the Client's own counts are added: rescues, breaker_opened, calls_abandoned, tokens_returned,
// tokens_clamped, tokens_lost and tokens_leased. Keys are never attributes. Instead a function makes the attribute
// "policy" of a key. It must have few different results.
package fetchotel
