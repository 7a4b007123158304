package dev

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/tokenrefill/refiller/internal/config"
)

// sampleVersion fences the sample buckets: raise it when one of them changes, for those who keep them in a store of
// their own.
const sampleVersion = 2

// samples are the sample buckets and a template, as a configuration has them.
const samples = `buckets:
  - {key: checkout, capacity: 1000, rate: 500/s}
  - {key: mail, capacity: 20, rate: 10/s}
  - {key: llm-tokens, capacity: 60000, rate: 1000/s}
  - {key: digest, capacity: 5, every: 10s, tokens: 5}
  - {key: daily-report, capacity: 3, cron: "0 0 * * *", tokens: 3}
templates:
  - {prefix: "user:", enforce: lazy, capacity: 10, rate: 1/s}
`

// anyUser is a bucket of the sample template, which makes one of every such name.
const anyUser = "user:42"

// watched is the sample bucket whose admissions are held against the bound; the first of samples.
const watched = "checkout"

// demands ask for 600 tokens/s of checkout, 20 % more than it gives, and a little of others so that they move.
var demands = []demand{
	{key: watched, tokens: 3, wanted: always(600)},
	{key: "llm-tokens", tokens: 2500, wanted: always(1250)},
	{key: "digest", tokens: 1, wanted: always(0.7)},
}

func always(perSecond float64) func() float64 { return func() float64 { return perSecond } }

// settings are what differs between configurations of the playground.
type settings struct {
	redis  string
	mode   config.Mode
	etcd   []string
	listen string
}

// electionPrefix keeps the playground apart from real replicas that use the same etcd.
const electionPrefix = "/refiller-dev"

// configText is the content of a replica's configuration file.
func configText(s settings) string {
	var b strings.Builder
	fmt.Fprintf(&b, "version: %d\n", sampleVersion)
	if s.mode == config.ModeEtcd {
		endpoints := make([]string, len(s.etcd))
		for i, e := range s.etcd {
			endpoints[i] = strconv.Quote(e)
		}
		fmt.Fprintf(&b, "election: {mode: etcd, prefix: %s, ttl: 2s, endpoints: [%s]}\n", electionPrefix,
			strings.Join(endpoints, ", "))
	} else {
		b.WriteString("election: {mode: race}\n")
	}
	b.WriteString("refill_interval: 100ms\n")
	b.WriteString(samples)
	fmt.Fprintf(&b, "listen: %s\n", strconv.Quote(s.listen))
	return b.String()
}

// decided are the variables that Run decides itself. The login and the certificates of a server are for the given one:
// an embedded server has none.
var (
	decided = []string{"REFILLER_REDIS_URL", "REFILLER_LISTEN", "REFILLER_IDENTITY", "REFILLER_REGION",
		"REFILLER_LOG_", "REFILLER_ELECTION_MODE", "REFILLER_ETCD_ENDPOINTS"}
	loginOfRedis = []string{"REFILLER_REDIS_"}
	loginOfEtcd  = []string{"REFILLER_ETCD_", "REFILLER_POOL_REGISTRY_"}
)

// environ is the environment of replicas.
func environ(all []string, givenRedis, givenEtcd bool) []string {
	drop := append([]string(nil), decided...)
	if !givenRedis {
		drop = append(drop, loginOfRedis...)
	}
	if !givenEtcd {
		drop = append(drop, loginOfEtcd...)
	}
	var kept []string
next:
	for _, v := range all {
		for _, prefix := range drop {
			if strings.HasPrefix(v, prefix) {
				continue next
			}
		}
		kept = append(kept, v)
	}
	return kept
}
