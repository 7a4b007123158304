// Package metrics exports what a replica does to Prometheus.
//
// A label "bucket" holds the key of a configured bucket, never a key that came
// from outside, and of at most [MaxBuckets] buckets: the first ones in the order
// of their keys. The others are summed up as bucket="other". So the number of
// series is bounded whatever is configured.
//
// The names and labels are what alert rules and dashboards of deploy/monitoring
// rely on.
package metrics
