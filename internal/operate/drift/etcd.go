package drift

import (
	"context"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/pool"
)

// pools compares the pools with those in force in etcd.
func (r *reader) pools(ctx context.Context, etcd *clientv3.Client) error {
	inForce, found, err := pool.ReadSettings(ctx, etcd, r.cfg.PoolsPrefix())
	if err != nil {
		return err
	}
	version := int64(-1)
	if found {
		version = inForce.Version
		r.report.PoolsVersion = version
		r.version("pools_version", version, r.cfg.PoolsVersion)
	}
	before := map[string]pool.Pool{}
	for _, p := range inForce.Pools {
		before[p.Name] = p
	}
	add := func(name, change string, fields []config.Difference) {
		if r.cfg.PoolsVersion <= version {
			change = Conflict
		}
		r.add(Change{What: "pool", Name: name, Change: change, Version: max(0, version), Fields: fields})
	}
	for _, p := range r.cfg.Pools {
		was, there := before[p.Name]
		delete(before, p.Name)
		if !there {
			add(p.Name, Added, nil)
		} else if fields := config.PoolDifferences(was, p); len(fields) > 0 {
			add(p.Name, Changed, fields)
		}
	}
	for name := range before {
		add(name, Removed, nil)
	}
	return nil
}
