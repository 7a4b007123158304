package config

import (
	"time"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/policy"
)

// The shape of a configuration file. The comments of fields are the text of docs/configuration.md and of the schema,
// which "make config-docs" writes.

// file is the whole.
type file struct {
	// This replica's region; required with pools.
	Region string `yaml:"region" is:"region" env:"REGION"`
	// Where the buckets are.
	Redis redisconn.Options `yaml:"redis" env:"REDIS_"`

	agreed `yaml:",inline"`

	// Who refills, and how etcd is reached.
	Election Election `yaml:"election" env:""`
	// The etcd in which the regions share pools, if that isn't the election's.
	PoolRegistry *Etcd `yaml:"pool_registry" env:"POOL_REGISTRY_"`
	// Address of metrics, health and status page.
	Listen string `yaml:"listen" is:"listen" default:"127.0.0.1:9090" env:"LISTEN"`
	// What is logged on stderr.
	Log logging `yaml:"log" env:"LOG_"`
}

// agreed is what all replicas of a region must agree on. It may stand in a document that they share.
type agreed struct {
	// Raise it with every change: a higher version replaces a lower one, never the reverse.
	Version int64 `yaml:"version" is:"version" default:"0"`
	// Version of the pools alone, so that one region's buckets can change without touching them; by default version.
	PoolsVersion *int64 `yaml:"pools_version" is:"version"`
	// Default of interval.
	RefillInterval time.Duration `yaml:"refill_interval" is:"interval" default:"100ms"`
	// Buckets to keep full; at least one bucket, template or pool.
	Buckets []bucket `yaml:"buckets"`
	// Policies for every key with a prefix, up to 256. Their buckets begin full, also after Redis has lost them. Left
	// out: those published stay. An empty list ends them: no new buckets; existing ones can still be taken from.
	Templates []template `yaml:"templates"`
	// Rates that regions share, the same in all of them. An empty list ends all.
	Pools []sharedPool `yaml:"pools"`
}

// Election says how replicas find who refills.
type Election struct {
	// race: whichever replica comes first refills. etcd: an elected one does.
	Mode Mode `yaml:"mode" is:"mode" default:"race" env:"ELECTION_MODE"`
	Etcd `yaml:",inline" env:"ETCD_"`
}

// Etcd says how etcd is reached, and what is used of it. DefaultPrefix and DefaultTTL are those of the election; the
// pools' registry has the election's.
type Etcd struct {
	etcdconn.Options `yaml:",inline" env:""`
	// Beginning of all keys in etcd, by default /refiller; of the pool registry, the election's.
	Prefix string `yaml:"prefix" is:"prefix" env:"PREFIX"`
	// How long a lease outlasts its holder, by default 5s; of the pool registry, the election's.
	TTL time.Duration `yaml:"ttl" is:"ttl"`
}

// logging is what is logged and how.
type logging struct {
	// Least severe level that is logged.
	Level string `yaml:"level" is:"level" default:"info" env:"LEVEL"`
	// Text for people, or JSON lines.
	Format bool `yaml:"format" is:"format" default:"text" env:"FORMAT"`
}

// limits are what buckets and templates have in common.
type limits struct {
	// Most tokens the bucket holds: at least those of two refill intervals.
	Capacity int64 `yaml:"capacity,required" is:"tokens"`
	// Tokens that fall due, evenly over time. A bucket has one of rate, every and cron.
	Rate policy.Rate `yaml:"rate" is:"rate"`
	// Tokens of a new bucket, by default its capacity, which is the most. A template's bucket always begins full.
	Initial *int64 `yaml:"initial" is:"tokens or none"`
	// Time between two refills, by default refill_interval. A new bucket opens after two.
	Interval time.Duration `yaml:"interval" is:"interval"`
	// What the bucket holds after Redis came back with an older state: nothing, or what it had then.
	OnRollback policy.Rollback `yaml:"on_rollback" is:"on_rollback" default:"empty"`
	// What becomes of the tokens when the policy changes; none adds any.
	CarryOver policy.CarryOver `yaml:"carry_over" is:"carry_over" default:"keep"`
	// While Redis is away consumers get an error, admit everything, or limit at a share of the rate.
	Degraded policy.Degraded `yaml:"degraded" is:"degraded" default:"closed"`
	// Have consumers admit and count what the bucket denies.
	Shadow bool `yaml:"shadow" is:"truth" default:"false"`
	// Keep room for tokens that are outstanding, so that the bound holds with reservations and leases.
	Strict bool `yaml:"strict" is:"truth" default:"false"`
}

// bucket is a bucket and when its tokens fall due.
type bucket struct {
	// Name of the bucket, and its key in Redis.
	Key    string `yaml:"key,required" is:"key"`
	limits `yaml:",inline"`
	// What the bucket holds after Redis has lost it. A template has no on_loss: its buckets come back full.
	OnLoss policy.Loss `yaml:"on_loss" is:"on_loss" default:"empty"`
	// How often tokens fall due at once, aligned to multiples since 1970-01-01 UTC.
	Every time.Duration `yaml:"every" is:"step"`
	// When tokens fall due at once.
	Cron string `yaml:"cron" is:"cron"`
	// Tokens that fall due at once, with every and cron, at most the capacity.
	Tokens int64 `yaml:"tokens" is:"tokens"`
	// Time zone of cron, by default UTC.
	TimeZone *time.Location `yaml:"time_zone" is:"zone"`
}

// template is a policy for every key with a prefix.
type template struct {
	// Beginning of the keys; a * stands for a segment between colons.
	Prefix string `yaml:"prefix,required" is:"template prefix"`
	// lazy: tokens fall due at takes, and interval and on_rollback have no effect.
	Enforce policy.Enforce `yaml:"enforce" is:"enforce" default:"refilled"`
	limits  `yaml:",inline"`
	_       struct{} `yaml:"on_loss,refused" is:"not of a template"`
	// Most buckets of a refilled template that exist at once; 0: no bound.
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
	// Part of the rate that floors may take together; it can't move to another region.
	FloorShare int64 `yaml:"floor_share" is:"floor share" default:"20%"`
	// Regions by name, up to 100.
	Regions []poolRegion `yaml:"regions,required"`
}

// poolRegion is a region's part in a pool.
type poolRegion struct {
	Name string `yaml:",key" is:"region"`
	// The region's part of what is short or spare.
	Weight int64 `yaml:"weight" is:"weight" default:"1"`
	// Rate that is always the region's, by default its part, by weight, of floor_share.
	Floor policy.Rate `yaml:"floor" is:"rate"`
	// Capacity of the region's bucket: at least two intervals of the pool's rate, by default its part by weight.
	Burst int64 `yaml:"burst" is:"tokens"`
	// Most that the region gets, at least its floor, by default no limit.
	Ceiling policy.Rate `yaml:"ceiling" is:"rate"`
}
