package lua_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func templateSet(t *testing.T, version, capacity int64) *policy.Templates {
	t.Helper()
	set, err := policy.NewTemplates(version, []policy.Template{{Prefix: "user:", Enforce: policy.EnforceLazy,
		Policy: policy.Policy{
			Capacity: capacity, Rate: policy.PerSecond(1), Interval: time.Millisecond,
		}}}, []string{"user:root"})
	require.NoError(t, err)
	return set
}

func TestALaterVersionOfTheTemplatesStaysPublished(t *testing.T) {
	t.Parallel()
	t.Run("Redis", func(t *testing.T) {
		t.Parallel()
		publishing(t, testenv.Redis(t).Client())
	})
	t.Run("Cluster", func(t *testing.T) {
		t.Parallel()
		publishing(t, testenv.Cluster(t).Client())
	})
	t.Run("Embedded", func(t *testing.T) {
		t.Parallel()
		_, rdb := embedded(t)
		publishing(t, rdb)
	})
}

func publishing(t *testing.T, rdb redis.UniversalClient) {
	ctx := t.Context()
	publish := func(set *policy.Templates) lua.Publication {
		p, err := lua.PublishTemplates(ctx, rdb, set)
		require.NoError(t, err)
		return p
	}
	read := func() *policy.Templates {
		set, id, err := lua.ReadTemplates(ctx, rdb, "")
		require.NoError(t, err)
		if set != nil {
			again, same, err := lua.ReadTemplates(ctx, rdb, id)
			require.NoError(t, err)
			require.Equal(t, id, same)
			require.Nil(t, again, "it is known")
		}
		return set
	}
	earlier := func() *policy.Templates {
		set, err := lua.EarlierTemplates(ctx, rdb)
		require.NoError(t, err)
		return set
	}
	require.Nil(t, read())
	require.Nil(t, earlier())
	first := templateSet(t, 7, 60)
	changed := templateSet(t, 7, 61)
	later := templateSet(t, 8, 62)
	require.Equal(t, lua.Publication{OK: true, Before: -1}, publish(first))
	require.True(t, read().Equal(first))
	require.Equal(t, lua.Publication{OK: true, Before: 7}, publish(first))
	require.Equal(t, lua.Publication{OK: false, Before: 7}, publish(changed), "the same version stands for one set")
	require.True(t, read().Equal(first))
	require.Nil(t, earlier())
	require.Equal(t, lua.Publication{OK: true, Before: 7}, publish(later))
	require.True(t, earlier().Equal(first))
	require.Equal(t, lua.Publication{OK: false, Before: 8}, publish(first), "an old replica")
	require.True(t, read().Equal(later))
	require.True(t, earlier().Equal(first))

	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	require.Equal(t, lua.Publication{OK: true, Before: -1}, publish(first), "it was lost")

	require.NoError(t, rdb.Set(ctx, lua.TemplatesKey, "x", 0).Err())
	_, err := lua.PublishTemplates(ctx, rdb, later)
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.ErrorContains(t, err, lua.TemplatesKey)
	_, _, err = lua.ReadTemplates(ctx, rdb, "")
	require.ErrorIs(t, err, lua.ErrMalformedBucket)
	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	require.NoError(t, rdb.HSet(ctx, lua.TemplatesKey, "id", "x", "text", "{}{").Err())
	_, _, err = lua.ReadTemplates(ctx, rdb, "")
	require.ErrorIs(t, err, policy.ErrTemplates)
	require.Equal(t, lua.Publication{OK: true, Before: -1}, publish(later), "what can't be read is nothing")
}

func TestReplicasThatPublishAtOnceAgree(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	const versions = 40
	var wg sync.WaitGroup
	for i := range versions {
		set := templateSet(t, int64(i), 60)
		wg.Go(func() {
			if _, err := lua.PublishTemplates(ctx, rdb, set); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	set, _, err := lua.ReadTemplates(ctx, rdb, "")
	require.NoError(t, err)
	require.EqualValues(t, versions-1, set.Version())
}

func TestBucketsApartFromTheirTemplateAreEnteredAndCounted(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Cluster(t).Client()
	call := user()
	call.Apart, call.MaxKeys = true, 100
	many := lua.NewTemplate(ruled(call), true)
	for i := range 5 {
		key := fmt.Sprintf("user:%d", i)
		r, err := takeTemplate(ctx, rdb, key, call, one(1), false, false)
		require.NoError(t, err)
		require.NotZero(t, r.Till)
		require.False(t, isActive(ctx, t, rdb, key))
		for range 2 {
			require.NoError(t, many.Enter(ctx, rdb, key, r.Till), "it may be repeated")
		}
		require.True(t, isActive(ctx, t, rdb, key))
		alive, err := many.Alive(ctx, rdb)
		require.NoError(t, err)
		require.EqualValues(t, i+1, alive)
	}
	require.NoError(t, many.Enter(ctx, rdb, "user:gone", time.Now().Add(-time.Minute).Unix()))
	alive, err := lua.Alive(ctx, rdb, "user:")
	require.NoError(t, err)
	require.EqualValues(t, 5, alive, "one that has expired isn't alive")
}
