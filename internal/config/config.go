package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// These defaults depend on the section of a field. The others are in the tags of the file's fields.
const (
	DefaultPrefix = "/refiller"
	DefaultTTL    = 5 * time.Second
)

// Problem describes one error in a configuration.
type Problem = fields.Problem

// Problems are all errors in a configuration, in the order of the file. There is at least one. Errors of Load about the
// content of a configuration are Problems.
type Problems = fields.Problems

// Override is a value that replaces a value of the file. Only fields that have a variable can be replaced.
type Override = fields.Override

// Config is a valid configuration with defaults filled in. It prints without secrets, and does not change after it was
// read.
type Config struct {
	Region         string
	Redis          redisconn.Options
	Version        int64 // fences the policies: a higher one replaces a lower one
	PoolsVersion   int64 // fences the pools in the same way
	Election       Election
	PoolRegistry   Etcd // the etcd of the election, unless the file has another one
	RefillInterval time.Duration
	Buckets        []Bucket // no two with the same key
	// Templates are fenced by Version. A bucket or pool whose name matches a template keeps its own policy. If Templates
	// is nil, the file has no such field, and the published templates stay in force. If it is empty, there are no
	// templates any more.
	Templates *policy.Templates
	// Pools are the pools of all regions. They and Region meet the requirements of package pool. If Pools is nil, the
	// replica takes no part in pools. If it is empty, there are no pools any more.
	Pools  []pool.Pool
	Listen string // host:port
	Log    Log
}

// Bucket is a bucket that the replica keeps filled.
type Bucket struct {
	Key    string
	Policy policy.Policy // valid; its interval is set
}

// Mode is the rule by which replicas decide which of them refills.
type Mode int

// Modes.
const (
	ModeRace Mode = iota // the replica that comes first refills a bucket
	ModeEtcd             // the leader that is elected in etcd refills all buckets
)

// String returns the mode as it is written in a file.
func (m Mode) String() string { return modes[m] }

// Log selects the messages that are logged, and their format.
type Log struct {
	Level string // trace, debug, info, warn, error or off
	JSON  bool   // JSON lines instead of text
}

// Shared is a part of the configuration that replicas read from one place, in addition to their files. It is YAML with
// a version and any of the fields that are the same for all replicas. If its version is above the file's version, its
// fields replace the file's fields. Otherwise it has no effect.
type Shared struct {
	Source string // its name in a Problem
	Data   []byte // empty if there is no shared part
}

// Source is the origin of a configuration.
type Source struct {
	Path   string // of the file; also its name in a Problem
	Data   []byte // the content of the file; if it is nil, the file is read from Path
	Under  string // the field of the file whose value is the configuration; empty means the whole file
	Shared Shared
	// Defaults are values for fields that the file leaves out.
	Defaults []Override
	Env      fields.Environment
	Flags    []Override
}

// Load reads the file. The shared part, the environment and the flags replace its values, in this order. The error is
// Problems, or the reason for which the file can't be read.
func Load(s Source) (Config, error) {
	if s.Data == nil {
		f, err := os.Open(s.Path)
		if err != nil {
			return Config{}, fmt.Errorf("config: %w", err)
		}
		defer f.Close()
		s.Data, err = io.ReadAll(io.LimitReader(f, fields.MaxSize+1))
		if err != nil {
			return Config{}, fmt.Errorf("config: %w", err)
		}
	}
	var f file
	d := fields.New(kinds, &f)
	if !s.read(d) {
		return Config{}, d.Err()
	}
	for _, o := range s.Defaults {
		if !d.Given(fields.Path(strings.Split(o.Field, "."))) {
			d.AddValue(o)
		}
	}
	if len(s.Shared.Data) > 0 {
		share(d, s.Shared, f.Version)
	}
	overlay(d, s.Env, s.Flags)
	d.Require()
	c := f.config(d)
	if err := d.Err(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// read reads the file, or the part of the file that is the configuration. It reports whether the file could be parsed.
func (s *Source) read(d *fields.Decoder) bool {
	if s.Under != "" {
		return d.ReadUnder(s.Path, s.Data, s.Under)
	}
	return d.Read(s.Path, s.Data)
}

// Connections reads the options for Redis and etcd from the environment and from flags only. It is for programs without
// a file. The default address of Redis is redisconn.DefaultURL. The endpoints of etcd are optional.
func Connections(env fields.Environment, flags ...Override) (Config, error) {
	var f file
	d := fields.New(kinds, &f)
	d.AddValue(Override{Source: "default", Field: "redis.url", Value: redisconn.DefaultURL})
	overlay(d, env, flags)
	c := Config{Region: f.Region}
	f.Redis.Settle(d, root.Field("redis"))
	c.Redis = f.Redis
	c.Election = f.election(d)
	c.PoolRegistry = f.registry(d)
	if err := d.Err(); err != nil {
		return Config{}, err
	}
	return c, nil
}

// overlay replaces the file's values by values of the environment and then by values of the flags. It reports variables
// that are misspelled.
func overlay(d *fields.Decoder, env fields.Environment, flags []Override) {
	d.AddEnvironment(env)
	for _, o := range flags {
		d.AddValue(o)
	}
	var known []string
	for _, v := range d.Variables() {
		known = append(known, v.Name)
	}
	d.AddProblems(env.Misspelled(append(known, others...), families))
}

// others are the variables that the programs read but that set no field of a file.
var others = []string{"REFILLER_IDENTITY", "REFILLER_OPERATOR"}

// families are the beginnings of the names of related variables. Names that begin like those of "consumer serve" are
// not listed, because that program checks them itself.
var families = []string{"REFILLER_REDIS_", "REFILLER_ETCD_", "REFILLER_ELECTION_", "REFILLER_POOL_", "REFILLER_LOG_"}

// Variables returns the environment variables that set fields. Each of them is also a flag of the programs, unless it
// holds a secret.
func Variables() []fields.Variable { return fields.New(kinds, &file{}).Variables() }

// share replaces values of the file by values of the shared part, if the version of the shared part is higher. version
// is the version of the file.
func share(d *fields.Decoder, s Shared, version int64) {
	var a agreed
	shared := fields.New(kinds, &a)
	if shared.Read(s.Source, s.Data) && !shared.Given(root.Field("version")) {
		shared.Bad(root.Field("version"), "it is required: want a version above the file's")
	}
	var problems Problems
	if errors.As(shared.Err(), &problems) {
		d.AddProblems(problems)
	} else if a.Version > version {
		d.AddDocument(shared)
	}
}

// root is the path of the whole file. All other paths begin with it.
var root fields.Path

// config returns the configuration of the file. It is valid only if no problem was found.
func (f *file) config(d *fields.Decoder) Config {
	c := Config{
		Region: f.Region, Version: f.Version, PoolsVersion: f.Version, RefillInterval: f.RefillInterval,
		Listen: f.Listen, Log: Log{Level: f.Log.Level, JSON: f.Log.Format},
	}
	if f.PoolsVersion != nil {
		c.PoolsVersion = *f.PoolsVersion
	}
	f.Redis.Settle(d, root.Field("redis"))
	c.Redis = f.Redis
	c.Election = f.election(d)
	c.PoolRegistry = f.registry(d)
	if f.Pools == nil && f.Templates == nil && len(f.Buckets) == 0 && d.Valid(root.Field("buckets")) {
		d.Bad(root.Field("buckets"),
			"there is no bucket to refill: want at least one, such as {key: checkout, capacity: 1000, rate: 500/s}")
	}
	c.Buckets = f.buckets(d)
	c.Pools = f.pools(d, c)
	c.Templates = f.templates(d, c.Names())
	return c
}

// election returns the options of the election with the defaults filled in.
func (f *file) election(d *fields.Decoder) Election {
	e := f.Election
	e.Etcd = e.or(DefaultPrefix, DefaultTTL)
	here := root.Field("election")
	endpoints := here.Field("endpoints")
	switch {
	case len(e.Endpoints) > 0 || !d.Valid(endpoints):
	case d.Given(endpoints):
		d.Bad(endpoints, "the list is empty: want at least one address of etcd, such as 127.0.0.1:2379")
	case e.Mode == ModeEtcd:
		d.Bad(endpoints, "it is required in mode etcd: want the addresses of etcd, such as [127.0.0.1:2379]")
	}
	e.check(d, here)
	return e
}

// registry returns the etcd in which the regions share pools. It is the election's, unless the file has another one.
func (f *file) registry(d *fields.Decoder) Etcd {
	election := f.Election.or(DefaultPrefix, DefaultTTL)
	if f.PoolRegistry == nil {
		return election
	}
	r := f.PoolRegistry.or(election.Prefix, election.TTL)
	here := root.Field("pool_registry")
	if endpoints := here.Field("endpoints"); len(r.Endpoints) == 0 && d.Valid(endpoints) {
		d.Bad(endpoints, "it is required here: want the addresses of the etcd that all regions reach")
	}
	r.check(d, here)
	return r
}

// or returns the options with the defaults filled in.
func (e Etcd) or(prefix string, ttl time.Duration) Etcd {
	if e.Prefix == "" {
		e.Prefix = prefix
	}
	if e.TTL == 0 {
		e.TTL = ttl
	}
	return e
}

func (e Etcd) check(d *fields.Decoder, here fields.Path) {
	if d.Valid(here) {
		d.Check(here, e.Validate())
	}
}

// Summary returns the configuration in a few words, without secrets.
func (c Config) Summary() string {
	held := counted(len(c.Buckets), "bucket")
	if c.Pooled() {
		held += " and " + counted(len(c.OwnPools()), "pool") + " of " + strconv.Itoa(len(c.Pools))
	}
	if c.Templates != nil {
		held += " and " + counted(len(c.Templates.All()), "template")
	}
	return fmt.Sprintf("%s on %s, version %d, election mode %s, refill interval %s",
		held, c.Redis, c.Version, c.Election.Mode, c.RefillInterval)
}

func counted(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return strconv.Itoa(n) + " " + noun
}

// Pooled reports whether the replica takes part in pools. It does so even if Pools is empty: then it publishes that
// there are no pools any more.
func (c Config) Pooled() bool { return c.Pools != nil }

// Names returns the names of the buckets and pools that have policies of their own.
func (c Config) Names() []string {
	names := make([]string, 0, len(c.Buckets)+len(c.Pools))
	for _, b := range c.Buckets {
		names = append(names, b.Key)
	}
	for _, p := range c.Pools {
		names = append(names, p.Name)
	}
	return names
}

// OwnPools returns the pools in which the replica's region takes part.
func (c Config) OwnPools() []pool.Pool {
	var own []pool.Pool
	for _, p := range c.Pools {
		if p.Has(c.Region) {
			own = append(own, p)
		}
	}
	return own
}

// HasSeparateRegistry reports whether the regions share pools in another etcd than that of the election, or under
// another prefix or login.
func (c Config) HasSeparateRegistry() bool {
	return !reflect.DeepEqual(c.PoolRegistry, c.Election.Etcd)
}

// PoolsPrefix returns the prefix of the pools' keys in etcd. It is the same in all regions.
func (c Config) PoolsPrefix() string { return c.PoolRegistry.Prefix + "/pools" }

// RefillPrefix returns the prefix of the election in etcd. With pools each region has a prefix of its own, because the
// regions share etcd.
func (c Config) RefillPrefix() string {
	if !c.Pooled() {
		return c.Election.Prefix
	}
	return c.Election.Prefix + "/regions/" + c.Region
}

// LogFields returns the configuration as keys and values for a structured log, without secrets.
func (c Config) LogFields() []any {
	return []any{
		"region", c.Region, "redis", c.Redis.String(), "version", c.Version,
		"election-mode", c.Election.Mode.String(), "election-endpoints", strings.Join(c.Election.Endpoints, ","),
		"election-prefix", c.Election.Prefix, "election-ttl", c.Election.TTL.String(),
		"refill-interval", c.RefillInterval.String(), "buckets", len(c.Buckets), "templates", len(c.Templates.All()),
		"pools", len(c.Pools), "pools-version", c.PoolsVersion, "listen", c.Listen,
	}
}
