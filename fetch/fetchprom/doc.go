// Package fetchprom exports what a [fetch.Client] does to Prometheus.
//
//	hook := fetchprom.New(fetchprom.Policies("checkout", "user:*"))
//	registry.MustRegister(hook)
//	client, err := fetch.New(rdb, fetch.WithHook(hook))
//	hook.Watch(client)
//
// Keys often hold the names of users and are without number, so they are never
// labels: the label "policy" is what a function makes of a key, and that must have
// few values. [Policies] makes one of a list.
//
//	refiller_consumer_calls_total{op, policy, outcome, source}
//	refiller_consumer_tokens_taken_total{policy, source}
//	refiller_consumer_call_seconds{op}
//	refiller_consumer_degraded_total{policy, reason}
//	refiller_consumer_shadowed_total{policy}
//
// outcome is taken, denied or done, or what went wrong: unavailable, deadline,
// cancelled, unknown_bucket, exceeds_capacity, refused. With Watch, the Client's
// own counts as well: refiller_consumer_rescues_total,
// refiller_consumer_breaker_opened_total, refiller_consumer_calls_abandoned_total,
// refiller_consumer_tokens_returned_total, refiller_consumer_tokens_clamped_total,
// refiller_consumer_tokens_lost_total and refiller_consumer_tokens_leased.
package fetchprom
