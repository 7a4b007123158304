package system

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/traffic"
)

// region is the region of all replicas.
const region = "here"

// config returns the configuration with a version.
func (s *System) config(url string, endpoints []string, version int) string {
	var b strings.Builder
	fmt.Fprintf(&b,
		"region: %s\nredis: {url: %q}\nversion: %d\nrefill_interval: %s\nlisten: 127.0.0.1:0\nlog: {format: json}\n",
		region, url, version, s.Interval)
	if len(endpoints) > 0 {
		fmt.Fprintf(&b, "election: {mode: etcd, ttl: %s, endpoints: [%s]}\n", s.TTL, strings.Join(endpoints, ", "))
	}
	var buckets, templates, pools []string
	for _, bucket := range s.Buckets {
		lines := bucket.lines(version)
		switch bucket.Kind {
		case record.Refilled, record.Lazy:
			template := fmt.Sprintf("{prefix: %q, enforce: %s, %s}", bucket.Prefix, bucket.Kind, lines)
			if !slices.Contains(templates, template) { // several buckets under test may be of one template
				templates = append(templates, template)
			}
		case record.Pooled:
			pools = append(pools, fmt.Sprintf("{name: %q, %s}", bucket.Key, lines))
		default:
			buckets = append(buckets, fmt.Sprintf("{key: %q, %s}", bucket.Key, lines))
		}
	}
	section := func(name string, items []string) {
		if len(items) > 0 {
			fmt.Fprintf(&b, "%s:\n  - %s\n", name, strings.Join(items, "\n  - "))
		}
	}
	section("buckets", buckets)
	section("templates", templates)
	section("pools", pools)
	return b.String()
}

// buckets returns the buckets for the record.
func (s *System) buckets() []record.Bucket {
	versions := map[int]bool{}
	for _, r := range s.Replicas {
		versions[r.Version] = true
	}
	if s.Later > 0 {
		versions[s.Later] = true
	}
	list := make([]record.Bucket, len(s.Buckets))
	for i, b := range s.Buckets {
		list[i] = record.Bucket{Key: b.Key, Kind: b.Kind, Linear: b.Linear,
			Plain: s.Consumers == deck.Plain && b.Kind != record.Lazy, Operated: b.Operated, Overridden: b.Overridden,
			MaxKeys: b.MaxKeys}
		if b.MaxKeys > 0 {
			list[i].Prefix = b.Prefix
		}
		if b.Leased && s.Consumers == deck.SDK {
			list[i].Blocks = traffic.Block * int64(s.Callers)
		}
	}
	for v := range versions {
		endpoints := []string{"127.0.0.1:1"}
		if s.Spec.Etcd == 0 {
			endpoints = nil
		}
		cfg, err := config.Load(config.Source{Data: []byte(s.config("redis://127.0.0.1:1/0", endpoints, v))})
		if err != nil {
			s.T.Fatal(err)
		}
		for i := range list {
			terms, steps := termsOf(cfg, list[i], int64(v))
			list[i].Terms, list[i].Steps = append(list[i].Terms, terms.Encode()), append(list[i].Steps, steps)
		}
	}
	for i, b := range list {
		if b.Overridden {
			own := policy.Policy{Capacity: traffic.Own.Capacity, Rate: traffic.Own.Rate}
			list[i].Terms = append(b.Terms, own.Terms(policy.Fence{Epoch: policy.OwnEpoch}).Encode())
			list[i].Steps = append(b.Steps, "")
		}
	}
	return list
}

// termsOf returns the policy that a version of the configuration gives a bucket under test. It also returns the
// schedule if the policy is stepped.
func termsOf(cfg config.Config, b record.Bucket, version int64) (terms policy.Terms, steps string) {
	fence := policy.Fence{Epoch: version}
	switch b.Kind {
	case record.Refilled, record.Lazy:
		return cfg.Templates.Of(b.Key).Terms, ""
	case record.Pooled:
		for _, p := range cfg.Pools {
			if p.Name == b.Key {
				terms = policy.Policy{Capacity: p.Capacity, Rate: p.Rate, Interval: p.Interval}.Terms(fence)
			}
		}
		return terms, ""
	}
	for _, configured := range cfg.Buckets {
		if configured.Key == b.Key {
			if configured.Policy.Steps != nil {
				steps = configured.Policy.Steps.String()
			}
			return configured.Policy.Terms(fence), steps
		}
	}
	return terms, ""
}
