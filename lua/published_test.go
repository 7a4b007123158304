package lua_test

import (
	"context"
	"fmt"
	"strings"
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
			require.Nil(t, again, "a known set is not read again")
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
	require.Equal(t, lua.Publication{OK: false, Before: 7}, publish(changed), "a version belongs to only one set")
	require.True(t, read().Equal(first))
	require.Nil(t, earlier())
	require.Equal(t, lua.Publication{OK: true, Before: 7}, publish(later))
	require.True(t, earlier().Equal(first))
	require.Equal(t, lua.Publication{OK: false, Before: 8}, publish(first), "an older version is not published")
	require.True(t, read().Equal(later))
	require.True(t, earlier().Equal(first))

	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	require.Equal(t, lua.Publication{OK: true, Before: -1}, publish(first), "the lost set can be published again")

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
	require.Equal(t, lua.Publication{OK: true, Before: -1}, publish(later), "an unreadable set is replaced")
}

// meanwhile is a client for which something happens just before its next script runs.
type meanwhile struct {
	lua.Client
	happens func()
}

func (m meanwhile) Process(ctx context.Context, cmd redis.Cmder) error {
	if strings.HasPrefix(cmd.Name(), "eval") {
		m.happens()
	}
	return m.Client.Process(ctx, cmd)
}

// A replica reads what is published before it publishes; the script decides if another replica was faster.
func TestWhatIsPublishedMeanwhileIsRegarded(t *testing.T) {
	withEmbedded(t, func(t *testing.T, rdb *redis.Client) {
		ctx := t.Context()
		first := templateSet(t, 7, 60)
		for name, c := range map[string]struct {
			meanwhile *policy.Templates
			want      lua.Publication
		}{
			"the same set":                    {first, lua.Publication{OK: true, Before: 7}},
			"another set of the same version": {templateSet(t, 7, 61), lua.Publication{Before: 7}},
			"a set of a later version":        {templateSet(t, 8, 60), lua.Publication{Before: 8}},
			"a set of an earlier version":     {templateSet(t, 6, 60), lua.Publication{OK: true, Before: 6}},
		} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			got, err := lua.PublishTemplates(ctx, meanwhile{rdb, func() {
				_, err := lua.PublishTemplates(ctx, rdb, c.meanwhile)
				require.NoError(t, err)
			}}, first)
			require.NoError(t, err, name)
			require.Equal(t, c.want, got, name)
			stays := c.meanwhile
			if got.OK {
				stays = first
			}
			set, _, err := lua.ReadTemplates(ctx, rdb, "")
			require.NoError(t, err)
			require.True(t, set.Equal(stays), name)
			if name == "the same set" {
				require.Empty(t, rdb.HGet(ctx, lua.TemplatesKey, "earlier").Val(), "the set replaced no earlier set")
			}
		}
		for name, spoil := range map[string]func() error{
			"a string":               func() error { return rdb.Set(ctx, lua.TemplatesKey, "x", 0).Err() },
			"a version of no digits": func() error { return rdb.HSet(ctx, lua.TemplatesKey, "version", "x").Err() },
		} {
			require.NoError(t, rdb.FlushAll(ctx).Err())
			_, err := lua.PublishTemplates(ctx, meanwhile{rdb, func() { require.NoError(t, spoil()) }}, first)
			require.ErrorIs(t, err, lua.ErrMalformedBucket, name)
			require.ErrorContains(t, err, lua.TemplatesKey, name)
		}
	})
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

func TestBucketsInOtherSlotsThanTheirTemplateAreCounted(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Cluster(t).Client()
	call := user()
	call.CrossSlot, call.MaxKeys = true, 100
	many := lua.NewTemplate(ruled(call), true)
	for i := range 5 {
		key := fmt.Sprintf("user:%d", i)
		r, err := takeTemplate(ctx, rdb, key, call, one(1), false, false)
		require.NoError(t, err)
		require.NotZero(t, r.Till)
		require.False(t, isActive(ctx, t, rdb, key))
		for range 2 {
			require.NoError(t, many.Enter(ctx, rdb, key, r.Till), "Enter may be repeated")
		}
		require.True(t, isActive(ctx, t, rdb, key))
		require.EqualValues(t, i+1, rdb.ZCard(ctx, lua.AliveKey("user:")).Val())
	}
}

func TestABucketIsClaimedBeforeItIsCreated(t *testing.T) {
	t.Parallel()
	withEmbedded(t, aBucketIsClaimedBeforeItIsCreated)
}

func aBucketIsClaimedBeforeItIsCreated(t *testing.T, rdb *redis.Client) {
	ctx := t.Context()
	call := user()
	call.CrossSlot, call.MaxKeys = true, 2
	rule := ruled(call)
	rule.Terms = policy.Policy{Capacity: 100, Rate: policy.PerSecond(1)}.Terms(policy.Fence{}) // it drains in 100 s
	two := lua.NewTemplate(rule, true)
	counted := func(key string) time.Duration {
		score := rdb.ZScore(ctx, lua.AliveKey("user:"), key).Val()
		return time.Duration(int64(score)*1_000_000-serverTime(ctx, t, rdb)) * time.Microsecond
	}
	require.NoError(t, two.Enter(ctx, rdb, "user:gone", serverTime(ctx, t, rdb)/1_000_000))
	require.NoError(t, two.Claim(ctx, rdb, "user:1"))
	require.Greater(t, counted("user:1"), 190*time.Second, "a claim lasts twice the time in which the bucket drains")
	require.LessOrEqual(t, counted("user:1"), 201*time.Second)
	require.NoError(t, two.Claim(ctx, rdb, "user:2"), "an expired bucket doesn't count as alive")
	require.ErrorContains(t, two.Claim(ctx, rdb, "user:3"), "2 are alive, at most 2 may be")
	require.ErrorIs(t, two.Claim(ctx, rdb, "user:3"), lua.ErrTooManyBuckets)
	require.NoError(t, two.Claim(ctx, rdb, "user:1"), "a bucket with a claim may claim again")
	require.EqualValues(t, 2, rdb.ZCard(ctx, lua.AliveKey("user:")).Val())

	require.NoError(t, rdb.Set(ctx, lua.AliveKey("user:"), "something else", 0).Err())
	require.NoError(t, two.Claim(ctx, rdb, "user:3"), "a take succeeds although the set has another type")
}
