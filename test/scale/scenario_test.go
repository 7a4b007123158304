package scale

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// scenario describes one measurement.
type scenario struct {
	// Configured means that the buckets are in the configuration, and all of them are refilled. Otherwise they are of a
	// template.
	Configured bool          `json:"configured"`
	Keys       int           `json:"keys"`           // number of buckets
	Active     int           `json:"active_buckets"` // number of buckets that are not full
	Cluster    bool          `json:"cluster"`
	Replicas   int           `json:"replicas"`
	Interval   time.Duration `json:"interval_ns"`
}

func (s scenario) String() string {
	kind, store := "template", "one Redis"
	if s.Configured {
		kind = "configured"
	}
	if s.Cluster {
		store = "Cluster"
	}
	return fmt.Sprintf("%s %s, %s active, %s, %d replicas, every %s", thousands(s.Keys), kind, thousands(s.Active), store,
		s.Replicas, s.Interval)
}

// capacity is so large, and rate so low, that a bucket stays active during a
// measurement.
const (
	capacity = 100_000
	rate     = 10 // per second
	prefix   = "user:"
)

func (s scenario) key(i int) string { return prefix + strconv.Itoa(100_000+i) }

// config returns the configuration of the replicas.
func (s scenario) config(redisURL string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "redis: {url: %q}\nversion: 1\nrefill_interval: %s\nlisten: 127.0.0.1:0\n", redisURL, s.Interval)
	if !s.Configured {
		fmt.Fprintf(&b, "templates:\n  - {prefix: %q, enforce: refilled, capacity: %d, rate: %d/s}\n", prefix, capacity, rate)
		return b.String()
	}
	b.WriteString("buckets:\n")
	for i := range s.Keys {
		fmt.Fprintf(&b, "  - {key: %q, capacity: %d, rate: %d/s}\n", s.key(i), capacity, rate)
	}
	return b.String()
}

// most is the largest number of refills per second. With more active buckets, the
// interval is longer.
const most = 100_000

// scenarios returns all combinations. Of a template's buckets, so many percent are
// active. Configured buckets are all active.
func scenarios(configured, templates, percents []int, stores []bool, replicas []int) (list []scenario) {
	add := func(s scenario) {
		s.Interval = time.Second * time.Duration(max(1, s.Active/most))
		list = append(list, s)
	}
	for _, cluster := range stores {
		for _, r := range replicas {
			for _, keys := range templates {
				for _, p := range percents {
					add(scenario{Keys: keys, Active: keys * p / 100, Cluster: cluster, Replicas: r})
				}
			}
			for _, keys := range configured {
				add(scenario{Configured: true, Keys: keys, Active: keys, Cluster: cluster, Replicas: r})
			}
		}
	}
	return list
}

// thousands formats a number with commas, such as 12,345.
func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
