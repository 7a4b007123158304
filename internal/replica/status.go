package replica

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/operate/membership"
	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// peeks is the number of buckets that are read at once for a status.
	peeks = 16
	// glance is the time for which the last reading of a bucket is shown without another reading.
	glance = 300 * time.Millisecond
	// pingTimeout bounds the check whether Redis answers.
	pingTimeout = time.Second
	// maxRateAge is the age up to which a bucket's rate of takes is shown. A replica that doesn't refill the bucket gets
	// no new rate.
	maxRateAge = 3 * time.Second
	// maxMismatches is the largest number of buckets that are named because another policy than the file's is in force.
	maxMismatches = 20
	// mostActive is the largest number of buckets of a template that are named.
	mostActive = 5
	// maxTroubles is the largest number of reasons for which buckets can't be refilled. maxTroubled is the largest number
	// of buckets for each reason.
	maxTroubles, maxTroubled = 3, 10
)

// Status implements admin.Source.
func (r *Replica) Status(ctx context.Context, q admin.Query) admin.Status {
	s, cfg := r.refiller.Stats(), r.config()
	out := admin.Status{
		Identity: r.identity, Region: cfg.Region, Version: r.build, Mode: cfg.Election.Mode.String(), Config: s.Version,
		Redis: cfg.Redis.String(), Started: r.started, Now: time.Now(), Leading: s.Leading, Racing: s.Racing, Epoch: s.Epoch,
		Calls: map[string]int64{}, Errors: s.Errors, Faults: s.Faults, Added: s.Added, Clamped: s.Clamped,
		Total: len(buckets(cfg)), Pooled: len(pooled(cfg)), Buckets: []admin.Bucket{},
		Takeovers: []admin.Takeover{}, Replicas: []admin.Replica{},
	}
	r.mu.Lock()
	out.Reload = r.lastReload
	r.mu.Unlock()
	for status, n := range s.Calls {
		out.Calls[status.String()] = n
	}
	for _, t := range r.stats.Takeovers() {
		out.Takeovers = append(out.Takeovers, admin.Takeover{At: t.At, Buckets: t.Buckets,
			Gap: float64(t.Gap.Microseconds()) / 1000})
	}
	var asking sync.WaitGroup // a silent etcd must not use up the time for Redis
	if r.elector != nil {
		asking.Go(func() {
			leader, err := r.who.ask(ctx)
			out.Leader = leader
			if err != nil {
				out.Election, out.Unknown = err.Error(), !errors.Is(err, election.ErrNoLeader)
			}
		})
	}
	if r.pools != nil {
		asking.Go(func() { out.Pools = r.pools.status(ctx, cfg) })
	}
	replicas, err := r.members.Replicas()
	if err != nil {
		out.Unlisted = err.Error()
	}
	for _, one := range replicas {
		silent := max(0, out.Now.Sub(one.LastReport))
		out.Replicas = append(out.Replicas, admin.Replica{
			Identity: one.Identity, Build: one.Build, Role: one.Role, Config: one.Version, Started: one.Started,
			Silent: float64(silent.Microseconds()) / 1000, Late: silent > membership.Late,
		})
	}
	for _, t := range s.Templates {
		one := admin.Template{
			Prefix: t.Prefix, Shards: t.Shards, Active: t.Active, Refills: t.Calls[policy.StatusApplied],
			Errors: t.Errors + t.Faults,
		}
		ofTemplate := func(key string) bool {
			m := cfg.Templates.Of(key)
			return m != nil && m.Prefix == t.Prefix
		}
		for _, a := range r.stats.MostActive(mostActive, out.Now, ofTemplate) {
			one.Most = append(one.Most, admin.Active(a))
		}
		out.Templates = append(out.Templates, one)
	}
	out.Buckets, out.Found = r.find(ctx, cfg, q)
	for i := range out.Buckets {
		out.Buckets[i].Flows = r.flows(out.Buckets[i].Key, q.Flows, out.Now)
	}
	if s.Away != nil {
		out.Away = s.Away.Error()
	}
	out.Conflicts, out.Outdated = r.mismatches(out.Buckets)
	out.Troubles = r.troubles()
	asking.Wait()
	return out
}

// troubles returns the reasons for which buckets could not be refilled, the most frequent ones first.
func (r *Replica) troubles() []admin.Trouble {
	var list []admin.Trouble
	for why, keys := range r.stats.Faults() {
		list = append(list, admin.Trouble{Why: why, Total: len(keys), Buckets: keys[:min(len(keys), maxTroubled)]})
	}
	slices.SortFunc(list, func(a, b admin.Trouble) int {
		return cmp.Or(cmp.Compare(b.Total, a.Total), cmp.Compare(a.Why, b.Why))
	})
	return list[:min(len(list), maxTroubles)]
}

// mismatches returns what differs from this replica's configuration. Conflicts are other policies, templates or pools
// under the same version. Outdated are those that a later version replaced. They are found by refill calls, and by the
// readings in read, since a standby makes no refill calls.
func (r *Replica) mismatches(read []admin.Bucket) (conflicts, outdated admin.Mismatch) {
	conflicts.Buckets, outdated.Buckets = r.stats.Conflicts(), r.stats.Outdated()
	for _, b := range read {
		if b.Conflict {
			conflicts.Buckets = append(conflicts.Buckets, b.Key)
		}
		if b.Outdated {
			outdated.Buckets = append(outdated.Buckets, b.Key)
		}
	}
	r.mu.Lock()
	if r.templatesConflict {
		conflicts.Templates = "other templates are published under this version"
	}
	if r.templatesOutdated > 0 {
		outdated.Templates = fmt.Sprintf("the templates of version %d are published", r.templatesOutdated)
	}
	r.mu.Unlock()
	if r.pools != nil {
		switch s := r.pools.agent.State(); {
		case s.Unread != "":
			conflicts.Pools = "the pools in etcd can't be read and stay in force: " + s.Unread
		case s.Conflict:
			conflicts.Pools = "other pools are in force under this version"
		case s.Outdated > 0:
			outdated.Pools = fmt.Sprintf("the pools of version %d are in force", s.Outdated)
		}
	}
	for _, m := range []*admin.Mismatch{&conflicts, &outdated} {
		slices.Sort(m.Buckets)
		m.Buckets = slices.Compact(m.Buckets)
		m.Total = len(m.Buckets)
		m.Buckets = m.Buckets[:min(len(m.Buckets), maxMismatches)]
		for _, other := range []string{m.Templates, m.Pools} {
			if other != "" {
				m.Total++
			}
		}
	}
	return conflicts, outdated
}

// entry returns the entry that the replica publishes for the others.
func (r *Replica) entry() membership.Entry {
	s, cfg := r.refiller.Stats(), r.config()
	role := admin.Role(s.Leading, s.Racing, cfg.Election.Mode == config.ModeEtcd)
	return membership.Entry{Identity: r.identity, Build: r.build, Role: role, Version: s.Version, Started: r.started}
}

// find reads the buckets that the query asks for. found is the number of buckets that match, before the query's offset
// and limit are applied.
func (r *Replica) find(ctx context.Context, cfg config.Config, q admin.Query) (list []admin.Bucket, found int) {
	var all []config.Bucket
	search := strings.ToLower(q.Search)
	for _, b := range cfg.Buckets {
		if (q.Key == "" || b.Key == q.Key) && strings.Contains(strings.ToLower(b.Key), search) {
			all = append(all, b)
		}
	}
	if q.Sort == admin.SortKey {
		slices.SortStableFunc(all, func(a, b config.Bucket) int { return strings.Compare(a.Key, b.Key) })
	}
	from := min(q.Offset, len(all))
	to := from + min(q.Limit, len(all)-from)
	order := orders[q.Sort]
	if order == nil || len(all) > admin.MaxSorted {
		return r.readBuckets(ctx, all[from:to], cfg.Version), len(all)
	}
	read := r.readBuckets(ctx, all, cfg.Version)
	slices.SortStableFunc(read, order)
	return read[from:to], len(all)
}

// orders compare buckets by values in Redis.
var orders = map[admin.Sort]func(a, b admin.Bucket) int{
	admin.SortFill: func(a, b admin.Bucket) int { return cmp.Compare(a.Fill(), b.Fill()) },
	admin.SortAge:  func(a, b admin.Bucket) int { return cmp.Compare(b.Age, a.Age) },
	admin.SortTaken: func(a, b admin.Bucket) int {
		rate := func(b admin.Bucket) float64 {
			if b.Taken == nil {
				return -1
			}
			return *b.Taken
		}
		return cmp.Compare(rate(b), rate(a))
	},
}

// readBucket is a reading of a bucket, which is shown again for a moment.
type readBucket struct {
	at     time.Time
	bucket admin.Bucket
}

// readBuckets reads the buckets from Redis, several at once. A bucket that was read a moment ago isn't read again, so
// many viewers cost no more than a single one.
func (r *Replica) readBuckets(ctx context.Context, shown []config.Bucket, version int64) []admin.Bucket {
	r.reading.Lock()
	defer r.reading.Unlock()
	now := time.Now()
	maps.DeleteFunc(r.recent, func(_ string, l readBucket) bool { return now.Sub(l.at) > glance })
	out := make([]admin.Bucket, len(shown))
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(peeks, len(shown)) {
		wg.Go(func() {
			for i := range next {
				out[i] = r.bucket(ctx, shown[i], version)
			}
		})
	}
	for i, b := range shown {
		if l, there := r.recent[b.Key]; there {
			out[i] = l.bucket
			continue
		}
		next <- i
	}
	close(next)
	wg.Wait()
	for i, b := range shown {
		if _, there := r.recent[b.Key]; !there && out[i].Error == "" {
			r.recent[b.Key] = readBucket{now, out[i]}
		}
	}
	return out
}

func (r *Replica) bucket(ctx context.Context, b config.Bucket, version int64) admin.Bucket {
	out := admin.Bucket{Key: b.Key}
	file := b.Policy.Terms(policy.Fence{})
	if t, ok := r.stats.Bucket(b.Key); ok && time.Since(t.Won) < max(maxRateAge, 3*b.Policy.Interval) {
		out.Taken, out.Dry = &t.TakeRate, &t.Dry
	}
	for _, p := range r.stats.Trend(b.Key, time.Now()) {
		out.Trend = append(out.Trend, admin.TrendPoint(p))
	}
	p, err := lua.Peek(ctx, r.rdb, b.Key, 1)
	switch {
	case errors.Is(err, lua.ErrUnknownBucket):
		out.Error = "not in Redis: created once missing for two refill intervals"
	case err != nil:
		out.Error = err.Error()
	}
	inForce := file
	if err == nil && p.Terms != nil {
		inForce = *p.Terms
		out.Policy = inForce.FileVersion()
		out.Differs = config.BucketDifferences(p, b.Policy)
		out.Override = inForce.Fence.Own()
		out.Outdated = version < out.Policy && !out.Override
		out.Conflict = len(out.Differs) > 0 && version == out.Policy
	}
	out.Capacity = inForce.Capacity
	switch {
	case inForce.Kind == policy.Smooth:
		out.Rate = inForce.Rate().InUnits().String()
	case b.Policy.Steps != nil:
		out.Schedule = fmt.Sprintf("%d, %s", inForce.Tokens, b.Policy.Steps)
	default: // Redis doesn't know the schedule
		out.Schedule = fmt.Sprintf("%d at a time", inForce.Tokens)
	}
	if err != nil {
		return out
	}
	out.Tokens = p.Tokens
	out.Index = p.Version.Index
	out.Era = p.Version.Era
	out.Outstanding, out.Debt = p.Outstanding, p.Debt
	out.Age = float64(p.Now-p.Last) / 1000
	return out
}

// flows returns how a bucket is divided, with at most n flows. It returns nil if the bucket isn't divided, or if this
// replica has never read the division.
func (r *Replica) flows(key string, n int, now time.Time) *admin.Flows {
	b, _ := r.stats.Bucket(key)
	late, known := r.stats.Flows(key, n, now)
	if !known {
		return nil
	}
	out := &admin.Flows{
		Seen: b.Flows.Seen, Listed: b.Flows.Listed, Level: b.Flows.Level, Covered: late.Covered.Seconds(),
		List: []admin.Flow{},
	}
	shown := func(f stats.Flow) admin.Flow {
		return admin.Flow{Name: f.Name, Got: f.Got, Demand: f.Asked, Denied: f.Denied, Listed: f.Listed}
	}
	for _, f := range late.Flows {
		out.List = append(out.List, shown(f))
	}
	if late.Others.Asked > 0 {
		others := shown(late.Others)
		out.Others = &others
	}
	return out
}

// shadow returns the tokens that the buckets in shadow mode have counted as denied. Buckets that can't be read are left
// out.
func (r *Replica) shadow(ctx context.Context) map[string]int64 {
	var keys []string
	for _, b := range r.config().Buckets {
		if b.Policy.Shadow {
			keys = append(keys, b.Key)
		}
	}
	denied := map[string]int64{}
	for i, t := range lua.Tickets(ctx, r.rdb, keys) {
		if t.Err == nil {
			denied[keys[i]] = t.Denied
		}
	}
	return denied
}

// state returns the state of the replica for a scrape.
func (r *Replica) state() metrics.State {
	ctx, cancel := context.WithTimeout(context.Background(), pingTimeout)
	defer cancel()
	s := metrics.State{
		Refill: r.refiller.Stats(), RedisUp: r.rdb.Ping(ctx).Err() == nil, Elected: r.elector != nil,
	}
	s.Shadow = r.shadow(ctx)
	conflicts, outdated := r.mismatches(nil)
	s.TemplatesConflict = conflicts.Templates != ""
	s.PoolsConflict = conflicts.Pools != ""
	s.Conflict = conflicts.Total > 0
	s.TemplatesOutdated, s.PoolsOutdated = outdated.Templates != "", outdated.Pools != ""
	if r.elector != nil {
		e := r.elector.State()
		s.ElectionUp, s.Terms = e.Err == nil, e.Terms
	}
	if r.pools != nil {
		s.Pools = r.pools.state()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.Reloads = map[string]int64{
		reloadApplied: r.lastReload.Applied, reloadUnchanged: r.lastReload.Unchanged, reloadRefused: r.lastReload.Refused,
	}
	s.ReloadRefused = r.lastReload.Result == reloadRefused
	s.RestartNeeded = len(r.lastReload.Restart) > 0
	return s
}
