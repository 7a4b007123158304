// Package fetchprom exports metrics of a [fetch.Client] to Prometheus.
//
//	hook := fetchprom.New(fetchprom.Policies("checkout", "user:*"))
//	registry.MustRegister(hook)
//	client, err := fetch.New(rdb, fetch.WithHook(hook))
//	hook.Watch(client)
//
// Keys often contain the names of users, and there may be any number of them. So they are never labels. Instead a
// function makes the label "policy" of a key. It must have few different results. [Policies] makes such a function from
// a list. The package is not for the metrics of refillers, which they serve themselves.
//
//	refiller_consumer_calls_total{op, policy, outcome, source}
//	refiller_consumer_tokens_taken_total{policy, source}
//	refiller_consumer_call_seconds{op}
//	refiller_consumer_degraded_total{policy, reason}
//	refiller_consumer_shadowed_total{policy}
//
// outcome is taken, denied or done. If the call failed, it is unavailable, deadline, cancelled, unknown_bucket,
// exceeds_capacity or refused. With Watch, the Client's own counts are exported, too: refiller_consumer_rescues_total,
// refiller_consumer_breaker_opened_total, refiller_consumer_calls_abandoned_total,
// refiller_consumer_tokens_returned_total, refiller_consumer_tokens_clamped_total, refiller_consumer_tokens_lost_total
// and refiller_consumer_tokens_leased.
package fetchprom
