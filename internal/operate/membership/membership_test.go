package membership

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

const key = "refiller:replicas:/refiller"

func member(rdb redis.UniversalClient, identity, role string) *Members {
	return New(rdb, key, func() Entry { return Entry{Identity: identity, Role: role, Version: 7} })
}

func names(t *testing.T, r *Members) (list []string) {
	t.Helper()
	replicas, err := r.Replicas()
	require.NoError(t, err)
	for _, one := range replicas {
		list = append(list, one.Identity+" "+one.Role)
	}
	return list
}

func TestReplicasSeeEachOtherUntilTheyLeave(t *testing.T) {
	t.Parallel()
	servers := map[string]redis.UniversalClient{
		"single":  testenv.Redis(t).Client(),
		"cluster": testenv.Cluster(t).Client(),
	}
	for name, rdb := range servers {
		a, b := member(rdb, "a", "leads"), member(rdb, "b", "stands by")
		_, err := a.Replicas()
		require.Error(t, err, "the list is not known yet")
		a.beat(t.Context())
		require.Equal(t, []string{"a leads"}, names(t, a), name)
		b.beat(t.Context())
		a.self = func() Entry { return Entry{Identity: "a", Role: "stands by"} }
		b.self = func() Entry { return Entry{Identity: "b", Role: "leads"} }
		a.beat(t.Context())
		b.beat(t.Context())
		require.Equal(t, []string{"a stands by", "b leads"}, names(t, b), "%s: the previous text was removed", name)
		list, err := b.Replicas()
		require.NoError(t, err)
		require.WithinDuration(t, time.Now(), list[0].LastReport, patience)

		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { b.Run(ctx) })
		cancel()
		running.Wait()
		a.beat(t.Context())
		require.Equal(t, []string{"a stands by"}, names(t, a), name)
	}
}

const patience = 30 * time.Second

func TestASilentReplicaIsDroppedAndTheListExpires(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	a := member(rdb, "a", "races")
	now, err := rdb.Time(ctx).Result()
	require.NoError(t, err)
	silent := float64(now.Add(-Silence - time.Second).UnixMilli())
	require.NoError(t, rdb.ZAdd(ctx, key, redis.Z{Score: silent, Member: `{"identity":"gone"}`}).Err())
	ahead := float64(now.Add(time.Hour).UnixMilli()) // the server's clock was ahead when the replica died
	require.NoError(t, rdb.ZAdd(ctx, key, redis.Z{Score: ahead, Member: `{"identity":"gone, too"}`}).Err())
	a.beat(ctx)
	require.Equal(t, []string{"a races"}, names(t, a))
	left, err := rdb.PTTL(ctx, key).Result()
	require.NoError(t, err)
	require.Positive(t, left)
	require.LessOrEqual(t, left, Silence)
}

// A replica that crashed and came back under its name is listed once. A replica of a version with another kind of text
// isn't listed.
func TestAReplicaIsListedOnceAsItIsNow(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	member(rdb, "a", "leads").beat(ctx)
	again := member(rdb, "a", "races")
	require.Eventually(t, func() bool { // wait for the next millisecond
		again.beat(ctx)
		list := names(t, again)
		return len(list) == 1 && list[0] == "a races"
	}, patience, time.Millisecond)
	now, err := rdb.Time(ctx).Result()
	require.NoError(t, err)
	require.NoError(t, rdb.ZAdd(ctx, key, redis.Z{Score: float64(now.UnixMilli()), Member: "no JSON"}).Err())
	again.beat(ctx)
	require.Equal(t, []string{"a races"}, names(t, again))
}

func TestTheListIsBounded(t *testing.T) {
	t.Parallel()
	ctx, rdb := t.Context(), testenv.Redis(t).Client()
	var last *Members
	for i := range Most + 10 {
		last = member(rdb, fmt.Sprintf("%03d", i), "races")
		last.beat(ctx)
	}
	require.Len(t, names(t, last), Most)
	n, err := rdb.ZCard(ctx, key).Result()
	require.NoError(t, err)
	require.EqualValues(t, Most, n)
}

func TestAnUnavailableServerIsAnError(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	a := member(server.Client(), "a", "races")
	a.beat(t.Context())
	server.Kill()
	a.beat(t.Context())
	_, err := a.Replicas()
	require.ErrorContains(t, err, "members")
}
