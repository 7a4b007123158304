package drift

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/config"
)

const (
	atOnce    = 32          // buckets that are read at the same time
	scanned   = 1000        // keys that a server reads in one step
	abandoned = time.Minute // a bucket whose refill is overdue for longer counts as no longer refilled
)

// These are the kinds of changes.
const (
	Added    = "added"
	Changed  = "changed"
	Removed  = "removed"  // refillers would no longer refill it, or it would not exist any more
	Conflict = "conflict" // it differs under a version that is not above the one in force, so replicas ignore it
)

// Change is one change that a configuration would make.
type Change struct {
	What    string              `json:"what"` // version, pools_version, bucket, template or pool
	Name    string              `json:"name,omitempty"`
	Change  string              `json:"change"`
	Version int64               `json:"version_in_force,omitempty"`
	Fields  []config.Difference `json:"fields,omitempty"`
}

// Report has all changes that a configuration would make.
type Report struct {
	// Version and PoolsVersion are the highest versions in force among all compared policies. -1 means that none is in
	// force.
	Version      int64 `json:"version_in_force"`
	PoolsVersion int64 `json:"pools_version_in_force"`

	Changes []Change `json:"changes"`
	Notes   []string `json:"notes,omitempty"` // what could not be read, and other remarks
}

// Refused returns the changes that replicas would refuse, because their version is not above the one in force.
func (r Report) Refused() []Change {
	var refused []Change
	for _, c := range r.Changes {
		if c.Change == Conflict {
			refused = append(refused, c)
		}
	}
	return refused
}

// Read compares a configuration with the policies in force in Redis. If etcd isn't nil, it also compares the pools
// below the configuration's prefix in etcd. It writes nothing.
func Read(ctx context.Context, cfg config.Config, rdb redis.UniversalClient, etcd *clientv3.Client) (Report, error) {
	r := reader{cfg: cfg, rdb: rdb, report: Report{Version: -1, PoolsVersion: -1, Changes: []Change{}}}
	if err := r.buckets(ctx); err != nil {
		return Report{}, err
	}
	if err := r.templates(ctx); err != nil {
		return Report{}, err
	}
	r.version("version", r.report.Version, cfg.Version)
	switch {
	case cfg.Pools == nil:
	case etcd == nil:
		r.remark("the pools are not compared: no etcd is configured")
	default:
		if err := r.pools(ctx, etcd); err != nil {
			return Report{}, err
		}
	}
	slices.SortStableFunc(r.report.Changes, func(a, b Change) int {
		return cmp.Or(cmp.Compare(slices.Index(order, a.What), slices.Index(order, b.What)), cmp.Compare(a.Name, b.Name))
	})
	return r.report, nil
}

var order = []string{"version", "bucket", "template", "pools_version", "pool"}

type reader struct {
	cfg config.Config
	rdb redis.UniversalClient

	mu     sync.Mutex
	report Report
}

func (r *reader) add(c Change) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Changes = append(r.report.Changes, c)
}

func (r *reader) remark(text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Notes = append(r.report.Notes, text)
}

func (r *reader) seen(version int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Version = max(r.report.Version, version)
}

// version adds a change if the file has another version than the one in force. inForce is negative if none is in force.
func (r *reader) version(what string, inForce, file int64) {
	if inForce == file || inForce < 0 {
		return
	}
	c := Change{What: what, Change: Changed, Version: inForce, Fields: []config.Difference{
		{Field: what, InForce: strconv.FormatInt(inForce, 10), File: strconv.FormatInt(file, 10)},
	}}
	if file < inForce {
		c.Change = Conflict
	}
	r.add(c)
}

// change adds a change if a policy has different fields.
func (r *reader) change(what, name string, version int64, fields []config.Difference, file int64) {
	if len(fields) == 0 {
		return
	}
	c := Change{What: what, Name: name, Change: Changed, Version: version, Fields: fields}
	if file <= version {
		c.Change = Conflict
	}
	r.add(c)
}
