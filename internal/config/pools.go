package config

import (
	"errors"
	"strings"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/pool"
)

// pools returns the pools of the file, or nil if the file doesn't have the field.
func (f *file) pools(d *fields.Decoder, c Config) []pool.Pool {
	if f.Pools == nil {
		return nil
	}
	taken := make(map[string]string, len(c.Buckets))
	for _, b := range c.Buckets {
		taken[b.Key] = "the key of a bucket"
	}
	list := make([]pool.Pool, 0, len(f.Pools))
	for i := range f.Pools {
		here := root.Field("pools").Item(i)
		p := f.Pools[i].pool()
		if other, twice := taken[p.Name]; twice && p.Name != "" {
			d.Bad(here.Field("name"), "%s is already %s: want another name", fields.Quote(p.Name), other)
			continue
		}
		taken[p.Name] = "the name of the pool " + d.Where(here.Field("name"))
		if d.Valid(here) {
			checkPool(d, here, p)
		}
		list = append(list, p)
	}
	checkRegions(d, c.Region, list)
	if endpoints := root.Field("election").Field("endpoints"); f.PoolRegistry == nil && !d.Given(endpoints) {
		line := root.Field("election")
		if !d.Given(line) {
			line = root.Field("pools")
		}
		d.BadAt(line, endpoints,
			"it is required with pools, which meet in etcd: want its addresses, such as [127.0.0.1:2379]")
	}
	if d.Err() == nil {
		if err := (pool.Settings{Version: c.PoolsVersion, Pools: list}).Validate(); err != nil {
			d.Bad(root.Field("pools"), "%s", fields.Brief(strings.TrimPrefix(err.Error(), pool.ErrPool.Error()+" ")))
		}
	}
	return list
}

func (s *sharedPool) pool() pool.Pool {
	p := pool.Pool{Name: s.Name, Rate: s.Rate, Capacity: s.Capacity, Interval: s.Interval, FloorShare: s.FloorShare}
	for _, r := range s.Regions {
		p.Regions = append(p.Regions,
			pool.Region{Name: r.Name, Weight: r.Weight, Floor: r.Floor, Burst: r.Burst, Ceiling: r.Ceiling})
	}
	p.Flows = s.Flows.policy()
	return p
}

// checkPool reports the contradictions that package pool finds between fields. Each problem is at the field that the
// error names.
func checkPool(d *fields.Decoder, here fields.Path, p pool.Pool) {
	for _, err := range fields.Joined(p.Validate()) {
		var wrong *pool.FieldError
		errors.As(err, &wrong)
		switch {
		case wrong == nil:
		case wrong.Region != "":
			d.Bad(here.Field("regions").Field(wrong.Region).Field(wrong.Field), "%s", wrong.Msg)
		default:
			d.Bad(here.Field(wrong.Field), "%s", wrong.Msg)
		}
	}
}

// checkRegions reports a replica's region that is missing or is in no pool.
func checkRegions(d *fields.Decoder, region string, pools []pool.Pool) {
	var known []string
	seen := map[string]bool{}
	for _, p := range pools {
		for _, r := range p.Regions {
			if !seen[r.Name] {
				seen[r.Name] = true
				known = append(known, r.Name)
			}
		}
	}
	switch {
	case region == "" && !d.Given(root.Field("region")):
		d.Bad(root.Field("region"), "it is required with pools: want the name of the region that this replica is in")
	case len(known) > 0 && region != "" && !seen[region]:
		msg := fields.Quote(region) + " is in no pool, whose regions are " + fields.Brief(strings.Join(known, ", "))
		if near := fields.Closest(region, known); near != "" {
			msg += ": did you mean " + near + "?"
		}
		d.Bad(root.Field("region"), "%s", msg)
	}
}
