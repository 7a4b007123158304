// Package admin is a refiller replica's HTTP server for probes and operators:
//
//	/livez    whether the refill loop makes progress
//	/readyz   Redis takes the replica's calls; a standby is ready, and so is a replica
//	          without its election service; one that is about to end is not
//	/status   what the replica knows, as JSON; ?key= one bucket; ?q= a part of the
//	          key, ?sort= key, fill, taken or age, ?offset=, ?limit=
//	/shares   how all regions shared the pools in the last hour, as JSON
//	/metrics  for Prometheus
//	/         the status page: rendered here, live in a browser with JavaScript,
//	          and without any other host
//
// It only reads: the commands of operators that change something are not here.
package admin
