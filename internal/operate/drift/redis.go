package drift

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// buckets compares the buckets of the configuration, and finds those that only Redis has.
func (r *reader) buckets(ctx context.Context) error {
	named := map[string]bool{}
	for _, p := range r.cfg.Pools {
		named[p.Name] = true
	}
	g, calling := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, b := range r.cfg.Buckets {
		named[b.Key] = true
		g.Go(func() error { return r.bucket(calling, b) })
	}
	for _, p := range r.cfg.OwnPools() {
		g.Go(func() error { return r.kind(calling, p.Name) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	others, err := r.others(ctx, named)
	if redis.HasErrorPrefix(err, "NOPERM") {
		r.remark("buckets that are only in Redis are not listed: the Redis user may not SCAN")
		return nil
	} else if err != nil {
		return err
	}
	g, calling = errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, key := range others {
		g.Go(func() error { return r.other(calling, key) })
	}
	return g.Wait()
}

// peek reads a bucket. found is false if the bucket doesn't exist or has no policy. If its keys hold something else,
// peek adds a remark, found is true, and p.Terms is nil.
func (r *reader) peek(ctx context.Context, key string) (p lua.PeekReply, found bool, err error) {
	p, err = lua.Peek(ctx, r.rdb, key, 1)
	switch {
	case errors.Is(err, lua.ErrUnknownBucket), err == nil && p.Terms == nil:
		return p, false, nil
	case errors.Is(err, lua.ErrMalformedBucket):
		r.remark(err.Error())
		return p, true, nil
	}
	return p, err == nil, err
}

// bucket compares one bucket of the configuration.
func (r *reader) bucket(ctx context.Context, b config.Bucket) error {
	p, found, err := r.peek(ctx, b.Key)
	switch {
	case err != nil:
		return fmt.Errorf("bucket %q: %w", b.Key, err)
	case !found:
		r.add(Change{What: "bucket", Name: b.Key, Change: Added})
		return nil
	case p.Terms == nil:
		return nil
	}
	if p.Terms.Fence.Own() {
		r.remark(fmt.Sprintf("bucket %q has an override, which replaces the policy in the file: to remove it, run "+
			"refiller limit unset", b.Key))
		return nil
	}
	version := p.Terms.FileVersion()
	if !p.Terms.Pool {
		r.seen(version)
	}
	r.change("bucket", b.Key, version, config.BucketDifferences(p, b.Policy), r.cfg.Version)
	return nil
}

// kind adds a change if a pool's bucket is still an ordinary bucket in this region.
func (r *reader) kind(ctx context.Context, name string) error {
	p, found, err := r.peek(ctx, name)
	if err != nil || !found || p.Terms == nil || p.Terms.Pool {
		return err
	}
	fields := []config.Difference{{Field: "kind", InForce: "bucket", File: "pool"}}
	r.change("pool", name, p.Terms.FileVersion(), fields, r.cfg.Version)
	return nil
}

// others returns the keys of the buckets in Redis that are not named. It also leaves out buckets of templates, which
// expire.
func (r *reader) others(ctx context.Context, named map[string]bool) ([]string, error) {
	var found []string
	scan := func(ctx context.Context, c redis.UniversalClient) error {
		keys := c.Scan(ctx, 0, "{*}:ctl", scanned).Iterator()
		var batch []string
		compare := func() error {
			kept, err := unexpiring(ctx, c, batch)
			r.mu.Lock()
			defer r.mu.Unlock()
			found, batch = append(found, kept...), batch[:0]
			return err
		}
		for keys.Next(ctx) {
			key := strings.TrimSuffix(strings.TrimPrefix(keys.Val(), "{"), "}:ctl")
			if named[key] || strings.HasPrefix(key, config.Reserved) || lua.CheckKey(key) != nil {
				continue
			}
			batch = append(batch, key)
			if len(batch) == scanned {
				if err := compare(); err != nil {
					return err
				}
			}
		}
		return errors.Join(keys.Err(), compare())
	}
	var err error
	if cluster, ok := r.rdb.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return scan(ctx, c) })
	} else {
		err = scan(ctx, r.rdb)
	}
	slices.Sort(found)
	return slices.Compact(found), err
}

// unexpiring returns the buckets whose state does not expire.
func unexpiring(ctx context.Context, c redis.UniversalClient, buckets []string) ([]string, error) {
	if len(buckets) == 0 {
		return nil, nil
	}
	answers := make([]*redis.DurationCmd, len(buckets))
	_, err := c.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range buckets {
			answers[i] = p.PTTL(ctx, lua.ControlKey(key))
		}
		return nil
	})
	var kept []string
	for i, a := range answers {
		if a.Val() == -1 { // it has no expiry
			kept = append(kept, buckets[i])
		}
	}
	return kept, err
}

// other adds a bucket that only Redis has, if it is still refilled.
func (r *reader) other(ctx context.Context, key string) error {
	p, found, err := r.peek(ctx, key)
	if err != nil || !found || p.Terms == nil {
		return err
	}
	due := p.Last + max(abandoned.Microseconds(), 10*p.Terms.Interval)
	if p.Terms.Kind == policy.Stepped {
		due = p.Next + abandoned.Microseconds()
	}
	if p.Now <= due && !p.Terms.Fence.Own() {
		r.seen(p.Terms.FileVersion())
		r.add(Change{What: "bucket", Name: key, Change: Removed, Version: p.Terms.FileVersion()})
	}
	return nil
}

// templates compares the templates with the published ones.
func (r *reader) templates(ctx context.Context) error {
	published, _, err := lua.ReadTemplates(ctx, r.rdb, "")
	if err != nil {
		return err
	}
	if r.cfg.Templates == nil { // the file has no field for templates
		return nil
	}
	before := map[string]*policy.CompiledTemplate{}
	version := int64(-1)
	if published != nil {
		version = published.Version()
		r.seen(version)
		for _, t := range published.All() {
			before[t.Prefix] = t
		}
	}
	for _, t := range r.cfg.Templates.All() {
		was := before[t.Prefix]
		delete(before, t.Prefix)
		if was == nil {
			r.template(t.Prefix, Added, version, nil)
			continue
		}
		fields := config.Differences(was.Terms, t.Terms)
		if was.Enforce != t.Enforce {
			enforce := config.Difference{Field: "enforce", InForce: was.Enforce.String(), File: t.Enforce.String()}
			fields = append(fields, enforce)
		}
		if was.MaxKeys != t.MaxKeys {
			most := config.Difference{Field: "max_keys", InForce: fmt.Sprint(was.MaxKeys), File: fmt.Sprint(t.MaxKeys)}
			fields = append(fields, most)
		}
		if len(fields) > 0 {
			r.template(t.Prefix, Changed, version, fields)
		}
	}
	for prefix := range before {
		r.template(prefix, Removed, version, nil)
	}
	return nil
}

// template adds a change of a template. Templates can only be replaced all at once, under a higher version.
func (r *reader) template(prefix, change string, version int64, fields []config.Difference) {
	if r.cfg.Version <= version {
		change = Conflict
	}
	r.add(Change{What: "template", Name: prefix, Change: change, Version: max(0, version), Fields: fields})
}
