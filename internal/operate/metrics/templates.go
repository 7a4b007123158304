package metrics

import (
	"strconv"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

var (
	descTemplateActive = desc("template_active_buckets", "Buckets in those shards of the template's active set that this replica refills; the sum over all replicas is how many are not full.", "template")
	descTemplateShards = desc("template_shards", "Shards of the template's active set that this replica refills, of 16.",
		"template")
	descTemplateCalls = desc("template_refill_calls_total",
		"Answers to refill calls for the template's buckets, by what they did.", "template", "status")
	descTemplateErrors = desc("template_refill_errors_total",
		"Refill calls for the template's buckets without an answer.", "template")
	descTemplateFaults = desc("template_refill_bucket_faults_total",
		"Refill calls for buckets of the template that are forbidden, or that make the script fail.", "template")
	descTemplateLeft  = desc("template_left_total", "Times that a bucket left the template's active set, because it was full, or that a name did, because it was no bucket.", "template")
	descTemplateAdded = desc("template_credit_added_tokens_total",
		"Tokens that this replica added to the template's buckets.", "template")
	descTemplateClamped = desc("template_credit_clamped_tokens_total",
		"Tokens due that the template's buckets could not hold, being full.", "template")
	descTemplateLag = desc("template_refill_lag_seconds",
		"How much later than one refill interval a refill of the template's buckets came: after the refill before, "+
			"or after the take that left the bucket less than full.", "template")
)

// collectTemplates exports the results of refills of templates' buckets. Each template has series of its own, because
// there are few templates.
func (m *Metrics) collectTemplates(ch chan<- prometheus.Metric, templates []refill.TemplateStats, gauge,
	count func(*prometheus.Desc, float64, ...string)) {
	for _, t := range templates {
		label := t.Prefix
		if !utf8.ValidString(label) {
			label = strconv.Quote(label)
		}
		gauge(descTemplateActive, float64(t.Active), label)
		gauge(descTemplateShards, float64(t.Shards), label)
		for status := policy.StatusApplied; status <= policy.StatusConflict; status++ {
			if n := t.Calls[status]; n > 0 || status == policy.StatusApplied {
				count(descTemplateCalls, float64(n), label, status.String())
			}
		}
		count(descTemplateErrors, float64(t.Errors), label)
		count(descTemplateFaults, float64(t.Faults), label)
		count(descTemplateLeft, float64(t.Left), label)
		count(descTemplateAdded, float64(t.Added), label)
		count(descTemplateClamped, float64(t.Clamped), label)
		all, buckets := uint64(0), map[float64]uint64{}
		for i, n := range t.Lag {
			all += uint64(n) //nolint:gosec // a count
			if i < len(refill.LagBounds) {
				buckets[refill.LagBounds[i].Seconds()] = all
			}
		}
		ch <- prometheus.MustNewConstHistogram(descTemplateLag, all, t.LagSum.Seconds(), buckets, label, m.region)
	}
}
