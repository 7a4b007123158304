package config

import (
	"errors"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// pools reads the pools; nil if the field isn't there.
func pools(v value, buckets []Bucket) []pool.Pool {
	if !v.present() {
		return nil
	}
	taken := make(map[string]string, len(buckets))
	for _, b := range buckets {
		taken[b.Key] = "the key of a bucket"
	}
	list := []pool.Pool{}
	for _, item := range v.list() {
		p, name := readPool(item)
		if p.Name != "" {
			if other, twice := taken[p.Name]; twice {
				name.bad("%q is already %s: a pool has its bucket's name to itself", brief(p.Name), other)
				continue
			}
			taken[p.Name] = "the name of the pool " + name.line()
		}
		list = append(list, p)
	}
	return list
}

// readPool reads one pool and returns the value of its name too.
func readPool(v value) (pool.Pool, value) {
	before := len(v.d.problems)
	o := v.object([]string{"name", "rate", "capacity", "interval", "regions"})
	name := o.field("name")
	if v.node.Kind != yaml.MappingNode {
		return pool.Pool{}, name
	}
	p := pool.Pool{Interval: policy.DefaultInterval}
	p.Name, _ = name.text("a pool's name")
	if !name.present() {
		name.bad("it is required: want the key of the pool's buckets")
	}
	if !o.field("rate").present() {
		o.field("rate").bad("it is required: want tokens/time such as 10000/s")
	}
	p.Rate, _ = readRate(o.field("rate"))
	capacity := o.field("capacity")
	if p.Capacity, _ = capacity.integer(1, policy.MaxTokens); !capacity.present() {
		capacity.bad("it is required: want a whole number from 1 to %d", int64(policy.MaxTokens))
	}
	if i, ok := o.field("interval").interval(); ok {
		p.Interval = i
	}
	regions := poolRegions(o.field("regions"))
	for _, r := range regions {
		p.Regions = append(p.Regions, r.Region)
	}
	if len(v.d.problems) == before {
		validatePool(o, regions, p)
	}
	return p, name
}

// poolRegion is a region of a pool and where it is written.
type poolRegion struct {
	pool.Region
	object
}

// poolRegions reads the mapping from regions' names to their parts.
func poolRegions(v value) []poolRegion {
	const want = "regions by name, such as {eu-west-1: {weight: 2, floor: 1000/s}, us-east-1: {weight: 1, floor: 500/s}}"
	if !v.present() || v.node.Kind != yaml.MappingNode {
		if v.present() {
			v.bad("want %s, not %s", want, describe(v.node))
		} else {
			v.bad("it is required: want %s", want)
		}
		return nil
	}
	names := make([]string, 0, len(v.node.Content)/2)
	for i := 0; i < len(v.node.Content); i += 2 {
		names = append(names, v.node.Content[i].Value)
	}
	byName := v.object(names)
	var list []poolRegion
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		field, ok := byName.fields[v.node.Content[i].Value]
		if !ok || field.parent != v.node.Content[i] {
			continue // reported
		}
		o := field.object([]string{"weight", "floor", "burst", "ceiling"})
		r := poolRegion{pool.Region{Name: field.parent.Value, Weight: 1}, o}
		checkRegion(value{d: v.d, node: field.parent, parent: field.parent, path: field.path}, r.Name)
		if n, ok := o.field("weight").integer(1, pool.MaxWeight); ok {
			r.Weight = n
		}
		r.Burst, _ = o.field("burst").integer(1, policy.MaxTokens)
		r.Floor, _ = readRate(o.field("floor"))
		r.Ceiling, _ = readRate(o.field("ceiling"))
		list = append(list, r)
	}
	return list
}

// validatePool reports what package pool finds wrong between fields, at the field that it names.
func validatePool(o object, regions []poolRegion, p pool.Pool) {
	for _, err := range joined(p.Validate()) {
		var wrong *pool.FieldError
		if !errors.As(err, &wrong) {
			continue
		}
		at := o.field(wrong.Field)
		for _, r := range regions {
			if r.Name == wrong.Region {
				at = r.field(wrong.Field)
			}
		}
		at.bad("%s", wrong.Msg)
	}
}

// checkPools reports what pools need of the rest of the configuration.
func checkPools(o object, c Config) {
	v := o.field("pools")
	if !v.present() {
		return
	}
	election := child(o.node, "election")
	if election == nil || election.Kind != yaml.MappingNode {
		election = v.parent
	}
	if child(election, "endpoints") == nil {
		at := value{d: v.d, parent: election, path: "election.endpoints"}
		at.bad("it is required with pools, which meet in etcd: want its addresses, such as [127.0.0.1:2379]")
	}
	var known []string
	seen := map[string]bool{}
	for _, p := range c.Pools {
		for _, r := range p.Regions {
			if !seen[r.Name] {
				seen[r.Name] = true
				known = append(known, brief(r.Name))
			}
		}
	}
	at := o.field("region")
	switch {
	case c.Region == "" && !at.present():
		at.bad("it is required with pools: want the name of the region that this replica is in")
	case len(known) > 0 && c.Region != "" && !seen[c.Region]:
		msg := "%q is in no pool, whose regions are %s"
		if near := closest(c.Region, known); near != "" {
			msg += ": did you mean " + near + "?"
		}
		at.bad(msg, brief(c.Region), brief(strings.Join(known, ", ")))
	}
	if len(v.d.problems) > 0 {
		return
	}
	if err := (pool.Settings{Version: c.Version, Pools: c.Pools}).Validate(); err != nil {
		v.bad("%s", brief(unwrapped(err, pool.ErrPool)))
	}
}
