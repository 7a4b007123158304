package config

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/tokenrefill/refiller/pool"
)

// Change describes the differences between the configuration in force and the next one.
type Change struct {
	Added, Removed, Changed []string // keys of buckets
	Templates               bool     // the templates differ
	Pools                   bool     // the pools differ
	Level                   bool     // the log level differs
	Version                 bool     // the version differs, or the version of the pools
	Restart                 []string // fields that differ and take effect at the next start
}

// Applies reports whether the running replica can put any of the differences in force.
func (c Change) Applies() bool {
	return c.Level || c.Version || c.Templates || c.Pools || len(c.Added)+len(c.Removed)+len(c.Changed) > 0
}

// To compares c, which is in force, with the next configuration. It returns Problems if next can't replace c. This is
// so if next has a lower version, or if it has different policies, templates or pools under the same version.
func (c Config) To(next Config) (Change, error) {
	change := Change{Level: c.Log.Level != next.Log.Level, Version: c.Version != next.Version, Restart: c.restart(next)}
	old := make(map[string]Bucket, len(c.Buckets))
	for _, b := range c.Buckets {
		old[b.Key] = b
	}
	for _, b := range next.Buckets {
		before, found := old[b.Key]
		switch {
		case !found:
			change.Added = append(change.Added, b.Key)
		case !before.Policy.Equal(b.Policy):
			change.Changed = append(change.Changed, b.Key)
		}
		delete(old, b.Key)
	}
	for _, b := range c.Buckets {
		if _, gone := old[b.Key]; gone {
			change.Removed = append(change.Removed, b.Key)
		}
	}
	if c.Pooled() && next.Pooled() { // otherwise a restart is needed, or next has no field for pools
		change.Pools = !(pool.Settings{Pools: c.Pools}).Equal(pool.Settings{Pools: next.Pools})
		change.Version = change.Version || c.PoolsVersion != next.PoolsVersion
	}
	if next.Templates != nil { // otherwise next has no field for templates
		change.Templates = c.Templates == nil || !c.Templates.SameAs(next.Templates)
	}
	var pools []string // new buckets with names of pools that the replica refills until it restarts
	if !next.Pooled() {
		for _, p := range c.OwnPools() {
			if slices.Contains(change.Added, p.Name) {
				pools = append(pools, p.Name)
			}
		}
	}
	refuse := func(field, format string, args ...any) (Change, error) {
		return change, Problems{{Field: field, Msg: fmt.Sprintf(format, args...)}}
	}
	switch {
	case next.Version < c.Version:
		return refuse("version", "%d is below %d, which is in force: a version never goes back; to restore older policies, "+
			"give them a version above %d", next.Version, c.Version, c.Version)
	case next.Version == c.Version && len(change.Changed) > 0:
		return refuse("version", "%d is in force already with another policy for %s: raise it with every change of a policy",
			c.Version, some(change.Changed))
	case next.Version == c.Version && change.Templates && c.Templates != nil:
		return refuse("version", "%d is in force already with other templates, or with other buckets that they match: "+
			"raise it with every change of these", c.Version)
	case c.Pooled() && next.Pooled() && next.PoolsVersion < c.PoolsVersion:
		return refuse("pools_version", "%d is below %d, which is in force: a version never goes back",
			next.PoolsVersion, c.PoolsVersion)
	case change.Pools && next.PoolsVersion == c.PoolsVersion:
		return refuse("pools_version", "%d is in force already with other pools: raise it, or version, with every change of "+
			"the pools, in all regions", c.PoolsVersion)
	case len(pools) > 0:
		return refuse("buckets", "%s was a pool, and stays one until the replica restarts: restart all replicas",
			some(pools))
	}
	return change, nil
}

// restart lists the fields that differ and that a replica reads only at its start.
func (c Config) restart(next Config) []string {
	var fields []string
	for _, f := range []struct {
		name string
		same bool
	}{
		{"region", c.Region == next.Region},
		{"redis", reflect.DeepEqual(c.Redis, next.Redis)},
		{"election", reflect.DeepEqual(c.Election, next.Election)},
		{"pools", c.Pooled() == next.Pooled()},
		{"pool_registry", !c.Pooled() || !next.Pooled() || reflect.DeepEqual(c.PoolRegistry, next.PoolRegistry)},
		// The refill interval is also the interval of the pulse, which can't change while the replica runs. Buckets use
		// their new intervals at once.
		{"refill_interval", c.RefillInterval == next.RefillInterval || c.Election.Mode != ModeEtcd},
		{"listen", c.Listen == next.Listen},
		{"log.format", c.Log.JSON == next.Log.JSON},
	} {
		if !f.same {
			fields = append(fields, f.name)
		}
	}
	return fields
}
