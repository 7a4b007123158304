// Package metrics exports the metrics of a replica to Prometheus. The metrics of consumers are not here: see packages
// fetchprom and fetchotel.
//
// The label "bucket" has the key of a configured bucket, and never a key that a client chose. At most [MaxBuckets]
// buckets have such a label: the first ones in the order of their keys. The others are summed up as bucket="other". So
// the number of series is bounded for any configuration.
//
// The alert rules and dashboards of deploy/monitoring use the names and labels.
package metrics
