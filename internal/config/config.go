package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/credential"
	"github.com/tokenrefill/refiller/internal/redisconn"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// Defaults of fields; those of a policy are in package policy, those of Redis in package redisconn.
const (
	DefaultPrefix   = "/refiller"
	DefaultTTL      = 5 * time.Second
	DefaultListen   = "127.0.0.1:9090"
	DefaultLogLevel = "info"
)

// Config is a valid configuration with defaults filled in. It prints without secrets and is not changed once read.
type Config struct {
	Region         string
	Redis          redisconn.Options
	Version        int64 // fences the policies: a higher one replaces a lower one
	Election       Election
	RefillInterval time.Duration
	Buckets        []Bucket // no two with the same key
	// Templates under the version; the buckets and pools whose names they match have policies of their own. Nil: the replica
	// has nothing to say of templates. None: there are none any more.
	Templates *policy.Templates
	// Pools of all regions; they and Region are as package pool wants them. Nil:
	// the replica takes no part in pools. Empty: there are none any more.
	Pools  []pool.Pool
	Listen string // host:port
	Log    Log
}

// Bucket is a bucket to keep filled.
type Bucket struct {
	Key    string
	Policy policy.Policy // valid; its interval is set
}

// Mode says which replica refills.
type Mode int

// Modes.
const (
	ModeRace Mode = iota // whichever comes first
	ModeEtcd             // the one that leads in etcd
)

// String returns the mode as it is written in a file.
func (m Mode) String() string { return modes[m] }

var modes = []string{"race", "etcd"}

// Election says how replicas find who refills, and how etcd is reached.
type Election struct {
	Mode      Mode
	Endpoints []string      // of etcd; at least one in ModeEtcd and with pools
	Prefix    string        // of all keys in etcd
	TTL       time.Duration // whole seconds
	Username  string
	Password  credential.Password
	TLS       credential.TLS
}

// Log says what is logged and how.
type Log struct {
	Level string // trace, debug, info, warn, error or off
	JSON  bool   // JSON lines instead of text
}

// Load reads the file at path and lays the environment and then the flags over it. A nil getenv is an empty
// environment. The error is Problems, or says why the file can't be read.
func Load(path string, getenv func(string) string, flags ...Override) (Config, error) {
	return LoadShared(path, Shared{}, getenv, flags...)
}

// LoadShared is Load with what is shared laid over the file first.
func LoadShared(path string, shared Shared, getenv func(string) string, flags ...Override) (Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return Config{}, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return Config{}, fmt.Errorf("config: %w", err)
	}
	var overrides []Override
	if getenv != nil {
		overrides = fromEnvironment(getenv)
	}
	c, err := parse(data, shared, append(overrides, flags...))
	var problems Problems
	if errors.As(err, &problems) {
		for i := range problems {
			if problems[i].Source == "" {
				problems[i].Source = path
			}
		}
	}
	return c, err
}

// Parse reads a configuration from the content of a file alone. The error is Problems, which name no source.
func Parse(data []byte) (Config, error) { return parse(data, Shared{}, nil) }

func parse(data []byte, shared Shared, overrides []Override) (Config, error) {
	d := &decoder{sources: map[*yaml.Node]string{}, files: map[*yaml.Node]string{}}
	var c Config
	if root := d.readTree(data); root != nil {
		d.share(root, shared)
		for _, o := range overrides {
			d.lay(root, o)
		}
		c = d.config(root)
	}
	if len(d.problems) > 0 {
		d.problems.sort()
		return Config{}, d.problems
	}
	return c, nil
}

// Summary is the configuration in a few words, without secrets.
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

// Pooled reports whether the replica takes part in pools, be it to learn that
// there are none any more.
func (c Config) Pooled() bool { return c.Pools != nil }

// plain are the names of the buckets with policies of their own.
func (c Config) plain() []string {
	names := make([]string, 0, len(c.Buckets)+len(c.Pools))
	for _, b := range c.Buckets {
		names = append(names, b.Key)
	}
	for _, p := range c.Pools {
		names = append(names, p.Name)
	}
	return names
}

// OwnPools are those that the replica's region takes part in.
func (c Config) OwnPools() []pool.Pool {
	var own []pool.Pool
	for _, p := range c.Pools {
		if p.Has(c.Region) {
			own = append(own, p)
		}
	}
	return own
}

// PoolsPrefix is that of the pools' keys in etcd, which all regions share.
func (c Config) PoolsPrefix() string { return c.Election.Prefix + "/pools" }

// RefillPrefix is that of the election of who refills, which with pools each
// region has to itself, since the regions share etcd.
func (c Config) RefillPrefix() string {
	if !c.Pooled() {
		return c.Election.Prefix
	}
	return c.Election.Prefix + "/regions/" + c.Region
}

// LogFields is the configuration as keys and values for a structured log, without secrets.
func (c Config) LogFields() []any {
	return []any{
		"region", c.Region, "redis", c.Redis.String(), "version", c.Version,
		"election-mode", c.Election.Mode.String(), "election-endpoints", strings.Join(c.Election.Endpoints, ","),
		"election-prefix", c.Election.Prefix, "election-ttl", c.Election.TTL.String(),
		"refill-interval", c.RefillInterval.String(), "buckets", len(c.Buckets), "templates", len(c.Templates.All()), "pools", len(c.Pools), "listen", c.Listen,
	}
}
