package dev

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

const (
	// sampleVersion fences the sample buckets. It has to be raised when one of them changes, because people may keep them
	// in their own store.
	sampleVersion = 2
	// electionPrefix separates the playground from real replicas that use the same etcd.
	electionPrefix = "/refiller-dev"
	// redisVariable gives replicas the address of the store, so that no file on disk has an address with a password.
	redisVariable = "REFILLER_REDIS_URL"
)

// samples are the sample buckets and a template, in the form of a configuration.
const samples = `buckets:
  - {key: checkout, capacity: 1000, rate: 500/s}
  - {key: mail, capacity: 20, rate: 10/s}
  - {key: llm-tokens, capacity: 60000, rate: 1000/s}
  - {key: digest, capacity: 5, every: 10s, tokens: 5}
  - {key: daily-report, capacity: 3, cron: "0 0 * * *", tokens: 3}
templates:
  - {prefix: "user:", enforce: lazy, capacity: 10, rate: 1/s}
`

// configText returns the content of the configuration file of a region's replicas. A single region has the sample
// buckets, or the two buckets of the scene with flows. Several regions share the pool.
func (o Options) configText(region string, etcd []string, listen string) string {
	quote := func(value any) string { // JSON is YAML
		text, _ := json.Marshal(value) // doesn't fail for strings
		return string(text)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "version: %d\nlisten: %s\nrefill_interval: 100ms\n", sampleVersion, quote(listen))
	if o.elects() {
		fmt.Fprintf(&b, "election: {mode: etcd, prefix: %s, ttl: %s, endpoints: %s}\n", electionPrefix, electionTTL, quote(etcd))
	} else {
		b.WriteString("election: {mode: race}\n")
	}
	switch {
	case o.Flows:
		b.WriteString(flowBuckets)
		return b.String()
	case o.Regions == nil:
		b.WriteString(samples)
		return b.String()
	}
	fmt.Fprintf(&b, "region: %s\npools:\n  - name: %s\n    rate: %d/s\n    capacity: %d\n    regions:\n", quote(region),
		sharedPool, sharedRate, sharedStock)
	for _, r := range o.Regions {
		fmt.Fprintf(&b, "      %s: {weight: 1}\n", quote(r))
	}
	return b.String()
}

// elects reports whether replicas elect a leader in etcd, which a pool needs.
func (o Options) elects() bool { return o.Mode == config.ModeEtcd || o.Regions != nil }

// config returns the configuration of a region's replicas, with the values of the environment.
func (o Options) config(region, redis string, etcd, environ []string) (config.Config, error) {
	env := fields.EnvironmentOf(append(slices.Clone(environ), redisVariable+"="+redis))
	return config.Load(config.Source{Data: []byte(o.configText(region, etcd, "127.0.0.1:0")), Env: env})
}

// environ returns the environment of replicas, without the address of their store and the variables that Run sets
// itself. It keeps the login and the certificates of a server only if the user has given that server, because an
// embedded server has none.
func environ(all []string, givenRedis, givenEtcd bool) []string {
	drop := []string{redisVariable, "REFILLER_LISTEN", "REFILLER_IDENTITY", "REFILLER_REGION", "REFILLER_LOG_",
		"REFILLER_ELECTION_MODE", "REFILLER_ETCD_ENDPOINTS"}
	if !givenRedis {
		drop = append(drop, "REFILLER_REDIS_")
	}
	if !givenEtcd {
		drop = append(drop, "REFILLER_ETCD_", "REFILLER_POOL_REGISTRY_")
	}
	return slices.DeleteFunc(slices.Clone(all), func(variable string) bool {
		return slices.ContainsFunc(drop, func(prefix string) bool { return strings.HasPrefix(variable, prefix) })
	})
}
