// Package admin is a refiller replica's HTTP server for probes and operators:
//
//	/livez    200 while the refill loop makes progress
//	/readyz   200 while Redis accepts the replica's calls. A standby is ready, and so is a replica
//	          without its election service. A replica that is about to end is not ready.
//	/status   the state of the replica and of its buckets, as JSON. Parameters: key (one bucket), q (a part
//	          of the key), sort (key, fill, taken or age), offset, limit, flows
//	/shares   how all regions shared the pools in the last hour, as JSON
//	/metrics  for Prometheus
//	/         the status page. A browser with JavaScript keeps it up to date. It loads nothing from other hosts.
//
// The server only reads. Operators change things with the commands of cmd/refiller.
package admin
