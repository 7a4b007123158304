package override_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/override"
	"github.com/tokenrefill/refiller/policy"
)

func publish(t *testing.T, rdb redis.UniversalClient, version int64, list ...policy.Template) {
	t.Helper()
	set, err := policy.NewTemplates(version, list, []string{"user:root"})
	require.NoError(t, err)
	p, err := lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	require.True(t, p.OK)
}

// users are buckets of 60 tokens that gain one an hour.
func users(prefix string, enforce policy.Enforce) policy.Template {
	return policy.Template{Prefix: prefix, Enforce: enforce,
		Policy: policy.Policy{Capacity: 60, Rate: policy.Rate{Tokens: 1, Per: time.Hour}, Interval: time.Second}}
}

func overrides(t *testing.T, s *override.Store) map[string]override.Limit {
	t.Helper()
	all := map[string]override.Limit{}
	for l, err := range s.All(t.Context()) {
		require.NoError(t, err)
		require.True(t, l.Own)
		require.NotContains(t, all, l.Key)
		all[l.Key] = l
	}
	return all
}

func TestAnOverrideCountsAtOnceAndUntilItIsUnset(t *testing.T) {
	t.Parallel()
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		counts(t, testenv.Redis(t).Client())
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		counts(t, testenv.Cluster(t).Client())
	})
}

func counts(t *testing.T, rdb redis.UniversalClient) {
	ctx, s := t.Context(), override.New(rdb)
	version := int64(0)
	renew := func(list ...policy.Template) {
		version++
		publish(t, rdb, version, list...)
	}
	lazy, refilled := users("lazy:", policy.EnforceLazy), users("user:", policy.EnforceRefilled)
	renew(lazy, refilled)
	c, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.WithoutCancel(ctx))) })
	require.Empty(t, overrides(t, s))
	for _, pair := range [][2]policy.Template{{lazy, refilled}, {refilled, lazy}} {
		template, other := pair[0], pair[1]
		prefix, enforce := template.Prefix, template.Enforce
		known, fresh := prefix+"known", prefix+"new"
		_, err := c.Take(ctx, known, 50)
		require.NoError(t, err)
		got, err := s.Get(ctx, known)
		require.NoError(t, err)
		want := override.Limit{Key: known, Template: prefix, Enforce: enforce, Capacity: 60,
			Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
		require.Equal(t, want, got)

		got, err = s.Set(ctx, known, policy.Override{Capacity: 600})
		require.NoError(t, err)
		want.Own = true
		want.Capacity = 600
		want.Exists = true
		want.Tokens = 10
		require.Equal(t, want, got)
		r, err := c.Take(ctx, known, 11)
		require.NoError(t, err)
		require.False(t, r.OK, "an override adds no tokens")
		require.EqualValues(t, 10, r.Remaining)
		require.EqualValues(t, 600, r.Limit)
		if enforce == policy.EnforceRefilled {
			require.True(t, rdb.SIsMember(ctx, lua.ActiveKey(prefix, lua.ActiveShard(known)), known).Val())
		}

		got, err = s.Set(ctx, fresh, policy.Override{Rate: policy.PerSecond(2), Capacity: 100})
		require.NoError(t, err)
		require.Equal(t, enforce == policy.EnforceLazy, got.Exists)
		if enforce == policy.EnforceLazy {
			require.EqualValues(t, 60, got.Tokens, "the bucket was full")
		} else {
			r, err = c.Take(ctx, fresh, 99)
			require.NoError(t, err)
			require.True(t, r.OK, "the bucket is created with the override's capacity")
		}

		// A later version of the template doesn't change the override.
		later := template
		later.Policy.Capacity = 30
		renew(later, other)
		got, err = s.Get(ctx, known)
		require.NoError(t, err)
		require.EqualValues(t, 600, got.Capacity)

		require.Equal(t, []int64{600, 100}, []int64{overrides(t, s)[known].Capacity, overrides(t, s)[fresh].Capacity})
		got, err = s.Unset(ctx, known)
		require.NoError(t, err)
		require.True(t, got.Changed)
		require.False(t, got.Own)
		require.EqualValues(t, 10, got.Tokens)
		require.EqualValues(t, 30, got.Capacity)
		require.NotContains(t, overrides(t, s), known)
		got, err = s.Unset(ctx, known)
		require.NoError(t, err)
		require.False(t, got.Changed, "Unset may be repeated")
		_, err = s.Unset(ctx, fresh)
		require.NoError(t, err)
		require.Zero(t, rdb.Exists(ctx, lua.OverrideKey(fresh)).Val())
		renew(template, other)
	}
	require.Zero(t, rdb.Exists(ctx, lua.OverridesKey).Val())
}

func TestWhatCannotBeOverriddenIsRefused(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	s := override.New(rdb)
	set := func(key string, o policy.Override) error {
		_, err := s.Set(ctx, key, o)
		return err
	}
	require.ErrorIs(t, set("user:1", policy.Override{Capacity: 5}), override.ErrNoTemplate, "no templates are published")
	publish(t, rdb, 7, users("user:", policy.EnforceLazy))
	for _, key := range []string{"order:1", "user:root"} {
		require.ErrorIs(t, set(key, policy.Override{Capacity: 5}), override.ErrNoTemplate, key)
		_, err := s.Get(ctx, key)
		require.ErrorIs(t, err, override.ErrNoTemplate, key)
		_, err = s.Unset(ctx, key)
		require.ErrorIs(t, err, override.ErrNoTemplate, key)
	}
	require.ErrorIs(t, set("user:1", policy.Override{}), override.ErrOverride)
	require.ErrorIs(t, set("user:1", policy.Override{Capacity: -1}), policy.ErrPolicy)
	require.ErrorIs(t, set("user:}", policy.Override{Capacity: 5}), lua.ErrInvalidKey)
	require.EqualValues(t, 1, rdb.DBSize(ctx).Val(), "Redis stores only the templates")

	require.NoError(t, set("user:1", policy.Override{Capacity: 5}))
	publish(t, rdb, 8)
	require.Len(t, overrides(t, s), 1, "the override outlives its template")
	l, err := s.Unset(ctx, "user:1")
	require.NoError(t, err)
	require.True(t, l.Changed)
	require.Empty(t, overrides(t, s))
}

func TestThousandsOfOverridesAreListed(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	s := override.New(rdb)
	publish(t, rdb, 7, users("user:", policy.EnforceLazy))
	const many = 3000
	own := users("user:", policy.EnforceLazy).Policy.Terms(policy.Fence{Epoch: policy.OwnEpoch}).Encode()
	_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := range many {
			key := fmt.Sprintf("user:%d", i)
			p.SAdd(ctx, lua.OverridesKey, key)
			if i%10 > 0 { // the other keys have lost their override, or it is just being set
				p.Set(ctx, lua.OverrideKey(key), own, 0)
			}
		}
		return nil
	})
	require.NoError(t, err)
	require.Len(t, overrides(t, s), many*9/10)
	for _, err := range s.All(ctx) {
		require.NoError(t, err)
		break // the reader may stop at any time
	}
}

// between calls do once, after the first command with the given name.
type between struct {
	name string
	do   func()
	once sync.Once
}

func (b *between) DialHook(next redis.DialHook) redis.DialHook { return next }

func (b *between) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (b *between) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == b.name && err == nil {
			b.once.Do(b.do)
		}
		return err
	}
}

// One caller sets an override while another one removes it. Whatever the order, the list has the override if it is in
// force.
func TestAnOverrideInForceIsInTheListWhateverElseHappens(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	publish(t, rdb, 7, users("user:", policy.EnforceRefilled))
	other := override.New(rdb)
	set := func(s *override.Store) func() {
		return func() {
			_, err := s.Set(ctx, "user:7", policy.Override{Capacity: 600})
			require.NoError(t, err)
		}
	}
	unset := func(s *override.Store) func() {
		return func() {
			_, err := s.Unset(ctx, "user:7")
			require.NoError(t, err)
		}
	}
	for _, after := range []string{"sadd", "evalsha", "srem", "get"} {
		for _, first := range []func(*override.Store) func(){set, unset} {
			for _, second := range []func(*override.Store) func(){set, unset} {
				set(other)()
				hooked := redis.NewClient(rdb.Options())
				hooked.AddHook(&between{name: after, do: second(other)})
				first(override.New(hooked))()
				require.NoError(t, hooked.Close())
				l, err := other.Get(ctx, "user:7")
				require.NoError(t, err)
				require.Equal(t, l.Own, len(overrides(t, other)) == 1, "another call after %s", after)
			}
		}
	}
}

// A configured bucket stays in Redis after it was removed from the file. Then it is in force instead of the template.
func TestAConfiguredBucketOfTheKeyIsReported(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	s := override.New(rdb)
	publish(t, rdb, 7, users("user:", policy.EnforceRefilled), users("lazy:", policy.EnforceLazy))
	configured := policy.Policy{Capacity: 600, Rate: policy.PerSecond(100)}.Terms(policy.Fence{Epoch: 6})
	for _, key := range []string{"user:1", "lazy:1"} {
		_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &configured})
		require.NoError(t, err)
	}
	want := override.Limit{Key: "user:1", Template: "user:", Enforce: policy.EnforceRefilled, Bucket: true,
		Capacity: 600, Rate: policy.PerSecond(100), Exists: true, Tokens: 600}
	for name, ask := range map[string]func(context.Context, string) (override.Limit, error){
		"get": s.Get, "unset": s.Unset,
	} {
		got, err := ask(ctx, "user:1")
		require.NoError(t, err, name)
		require.Equal(t, want, got, name)
		got, err = ask(ctx, "lazy:1")
		require.NoError(t, err, name)
		require.False(t, got.Bucket, "%s: a lazy template has no refilled bucket", name)
		require.EqualValues(t, 60, got.Capacity, name)
	}
	_, err := s.Set(ctx, "user:1", policy.Override{Capacity: 5})
	require.ErrorIs(t, err, lua.ErrNotOfTemplate)
	require.NoError(t, rdb.Del(ctx, "user:1", "{user:1}", "{user:1}:ctl").Err())
	got, err := s.Get(ctx, "user:1")
	require.NoError(t, err)
	require.False(t, got.Bucket)
	require.EqualValues(t, 60, got.Capacity)
}
