package config

import (
	"time"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/policy"
)

// This file defines the structure of a configuration file. "make config-docs" writes the comments of fields to
// docs/configuration.md and to the schema.

// file is a whole configuration file.
type file struct {
	// Region of this replica. It is required if there are pools.
	Region string `yaml:"region" is:"region" env:"REGION"`
	// The Redis that stores the buckets.
	Redis redisconn.Options `yaml:"redis" env:"REDIS_"`

	agreed `yaml:",inline"`

	// How replicas decide which of them refills, and how they reach etcd.
	Election Election `yaml:"election" env:""`
	// The etcd in which the regions share pools, if it is not the etcd of the election.
	PoolRegistry *Etcd `yaml:"pool_registry" env:"POOL_REGISTRY_"`
	// Address of the metrics, the health checks and the status page.
	Listen string `yaml:"listen" is:"listen" default:"127.0.0.1:9090" env:"LISTEN"`
	// Which messages are logged on stderr, and in which format.
	Log logging `yaml:"log" env:"LOG_"`
}

// agreed is the part of a configuration that is the same for all replicas of a region. It may be in a document that
// they share.
type agreed struct {
	// Version of this configuration. Raise it with every change: a higher version replaces a lower one, never the
	// reverse.
	Version int64 `yaml:"version" is:"version" default:"0"`
	// Version of the pools only, so that you can change the buckets of one region without changing the pools. By default
	// it equals the field version.
	PoolsVersion *int64 `yaml:"pools_version" is:"version"`
	// Default of the field interval of buckets and templates.
	RefillInterval time.Duration `yaml:"refill_interval" is:"interval" default:"100ms"`
	// Buckets to keep full. The file needs at least one bucket, template or pool.
	Buckets []bucket `yaml:"buckets"`
	// Up to 256 policies, each for every key with a prefix. Their buckets begin full, also after Redis has lost them. If
	// the field is left out, the published templates stay in force, except for the buckets of this file. An empty list
	// ends them: no new buckets are created, but consumers can still take from existing ones.
	Templates []template `yaml:"templates"`
	// Rates that regions share. They are the same in the files of all regions. An empty list ends all pools.
	Pools []sharedPool `yaml:"pools"`
}

// Election is how replicas decide which of them refills.
type Election struct {
	// With race, the replica that comes first refills a bucket. With etcd, an elected replica refills all buckets.
	Mode Mode `yaml:"mode" is:"mode" default:"race" env:"ELECTION_MODE"`
	Etcd `yaml:",inline" env:"ETCD_"`
}

// Etcd is how etcd is reached, and which keys and leases are used. DefaultPrefix and DefaultTTL apply to the election.
// The registry of pools uses the values of the election by default.
type Etcd struct {
	etcdconn.Options `yaml:",inline" env:""`
	// Beginning of all keys in etcd. The default is /refiller, and for the pool registry the prefix of the election.
	Prefix string `yaml:"prefix" is:"prefix" env:"PREFIX"`
	// Time for which a lease stays in force after its holder has died. The default is 5s, and for the pool registry the
	// ttl of the election.
	TTL time.Duration `yaml:"ttl" is:"ttl"`
}

// logging selects the messages that are logged, and their format.
type logging struct {
	// Least severe level of messages that are logged.
	Level string `yaml:"level" is:"level" default:"info" env:"LEVEL"`
	// Format of messages: text for people, or JSON lines.
	Format bool `yaml:"format" is:"format" default:"text" env:"FORMAT"`
}

// limits are the fields that buckets and templates have in common.
type limits struct {
	// Most tokens that the bucket holds. With a rate, it is at least the number of tokens of two refill intervals.
	Capacity int64 `yaml:"capacity,required" is:"tokens"`
	// Number of tokens that fall due, evenly over time. A bucket has exactly one of rate, every and cron.
	Rate policy.Rate `yaml:"rate" is:"rate"`
	// Number of tokens of a new bucket. The default, and the most, is its capacity. A template's bucket always begins
	// full.
	Initial *int64 `yaml:"initial" is:"tokens or none"`
	// Time between two refills. The default is refill_interval. A new bucket can be used after two intervals.
	Interval time.Duration `yaml:"interval" is:"interval"`
	// Tokens of the bucket after Redis came back with an older state: none, or the number of the older state.
	OnRollback policy.Rollback `yaml:"on_rollback" is:"on_rollback" default:"empty"`
	// What happens to the tokens when the capacity, the rate or the schedule changes. No value adds any token.
	CarryOver policy.CarryOver `yaml:"carry_over" is:"carry_over" default:"keep"`
	// What consumers do while Redis is unavailable: return an error, admit everything, or limit themselves to a share of
	// the rate.
	Degraded policy.Degraded `yaml:"degraded" is:"degraded" default:"closed"`
	// Whether consumers admit and count requests that the bucket denies.
	Shadow bool `yaml:"shadow" is:"truth" default:"false"`
	// Whether the bucket keeps room for outstanding tokens, which reservations and leases hold. If so, the bucket and its
	// outstanding tokens together are never more than the capacity.
	Strict bool `yaml:"strict" is:"truth" default:"false"`
	// Divides the bucket fairly among the flows for which takes are made. To use the defaults write flows: {}. The bucket
	// must have a rate, and be refilled.
	Flows *flows `yaml:"flows"`
}

// steps are the fields of a schedule, which buckets and templates may have in place of a rate.
type steps struct {
	// Time between the instants at which tokens fall due. The instants are multiples of it since 1970-01-01 UTC. In a
	// template it is at least 1s.
	Every time.Duration `yaml:"every" is:"step"`
	// Calendar of the instants at which tokens fall due.
	Cron string `yaml:"cron" is:"cron"`
	// With every and cron: number of tokens that fall due at each instant, at most the capacity.
	Tokens int64 `yaml:"tokens" is:"tokens"`
	// Time zone of cron. The default is UTC.
	TimeZone *time.Location `yaml:"time_zone" is:"zone"`
}

// bucket is a bucket with the times at which its tokens fall due.
type bucket struct {
	// Name of the bucket, and its key in Redis.
	Key    string `yaml:"key,required" is:"key"`
	limits `yaml:",inline"`
	// Tokens of the bucket after Redis has lost it. A template has no on_loss, since its buckets come back full.
	OnLoss policy.Loss `yaml:"on_loss" is:"on_loss" default:"empty"`
	steps  `yaml:",inline"`
}

// flows configures the division of a bucket among its flows.
type flows struct {
	// Part of the capacity that is kept for flows that ask for little.
	Headroom int64 `yaml:"headroom" is:"headroom" default:"10%"`
	// Weights of flows and teams by the beginning of their names. gold/: 5 is the weight of the team gold, whose flows
	// share its part. All others have weight 1.
	Weights map[string]int64 `yaml:"weights" is:"flow weights"`
	// Most flows that are distinguished at a time.
	Most int64 `yaml:"most" is:"most flows" default:"10000"`
}

// template is a policy for every key with a prefix.
type template struct {
	// Beginning of the keys. A * matches a segment between colons.
	Prefix string `yaml:"prefix,required" is:"template prefix"`
	// When tokens are added: by refills, or with lazy at each take. With lazy, interval and on_rollback have no effect. A
	// template with every or cron has no enforce: its buckets are budgets.
	Enforce policy.Enforce `yaml:"enforce" is:"enforce" default:"refilled"`
	limits  `yaml:",inline"`
	steps   `yaml:",inline"`
	_       struct{} `yaml:"on_loss,refused" is:"not of a template"`
	// Highest number of buckets of the template that exist at the same time; 0 for no bound. Not for lazy templates.
	MaxKeys int64 `yaml:"max_keys" is:"tokens or none" default:"0"`
}

// sharedPool is one rate and one capacity for the buckets of a name in several regions.
type sharedPool struct {
	// Key of the pool's bucket in each region.
	Name string `yaml:"name,required" is:"pool"`
	// Rate of all regions together.
	Rate policy.Rate `yaml:"rate,required" is:"rate"`
	// Capacity of all regions' buckets together.
	Capacity int64 `yaml:"capacity,required" is:"tokens"`
	// Time between two refills.
	Interval time.Duration `yaml:"interval" is:"interval" default:"100ms"`
	// Highest part of the rate that the floors of all regions may have together. A floor is never lent to another region.
	FloorShare int64 `yaml:"floor_share" is:"floor share" default:"20%"`
	// Regions by name, up to 100.
	Regions []poolRegion `yaml:"regions,required"`
	// Divides this region's bucket fairly among the flows for which takes are made. To use the defaults write flows: {}.
	// Each region uses its own file.
	Flows *flows `yaml:"flows"`
}

// poolRegion is a region's part in a pool.
type poolRegion struct {
	Name string `yaml:",key" is:"region"`
	// Weight of the region when tokens are scarce or left over.
	Weight int64 `yaml:"weight" is:"weight" default:"1"`
	// Rate that the region may always use. The default is its part, by weight, of floor_share.
	Floor policy.Rate `yaml:"floor" is:"rate"`
	// Capacity of the region's bucket. It is at least the number of tokens of two intervals of the pool's rate. The
	// default is the region's part of the capacity by weight.
	Burst int64 `yaml:"burst" is:"tokens"`
	// Highest rate that the region gets, at least its floor. The default is no limit.
	Ceiling policy.Rate `yaml:"ceiling" is:"rate"`
}
