package fetch

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Tokens that a degraded mode granted are from no bucket. If the take is undone when Redis is available again, nothing
// is added to the bucket.
func TestUndoOfADegradedTakeGivesNothingToTheBucket(t *testing.T) {
	f := newFaulty(t, nil)
	for key, mode := range map[string]policy.Degraded{"open": policy.DegradedOpen, "local": policy.DegradedLocal} {
		p := hourly(80)
		p.Degraded = mode
		createBucket(t, f.direct, key, p)
	}
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	for _, key := range []string{"open", "local"} {
		_, err := c.Take(t.Context(), key, 50)
		require.NoError(t, err)
	}
	countsConsumers(t, c, "local", 1)
	f.proxy.Cut()
	taken := map[string]Result{}
	for _, key := range []string{"open", "local"} {
		r, err := c.Take(t.Context(), key, 10)
		require.NoError(t, err)
		require.Equal(t, SourceFallback, r.Source.Kind)
		require.EqualValues(t, 10, r.Taken)
		taken[key] = r
	}
	require.NoError(t, f.proxy.Heal())
	for key, r := range taken {
		require.NoError(t, c.Undo(t.Context(), key, r), "Undo needs no call")
		require.EqualValues(t, 30, tokens(t, f.direct, key), key)
	}
}

// Tokens that a share gave go back to the share, once. They don't go back after the bucket has answered again, since
// the share then has its part of what the bucket has.
func TestUndoGivesTheTokensOfAShareBackToIt(t *testing.T) {
	f, c, left := shareOf(t, 80, 50)
	r, err := c.Take(t.Context(), "b", 10)
	require.NoError(t, err)
	require.EqualValues(t, 20, left())
	for range 2 {
		require.NoError(t, c.Undo(t.Context(), "b", r))
		require.EqualValues(t, 30, left())
	}
	all, err := c.TakeAll(t.Context(), []Request{{Key: "b", N: 2}, {Key: "b", N: 3}})
	require.NoError(t, err)
	require.True(t, all.OK)
	require.EqualValues(t, 25, left())
	for range 2 {
		require.NoError(t, c.Undo(t.Context(), "b", all.Results[0]))
		require.EqualValues(t, 27, left())
	}
	require.NoError(t, c.UndoAll(t.Context(), all))
	require.EqualValues(t, 30, left())
	denied, err := c.TakeAll(t.Context(), []Request{{Key: "b", N: 2}, {Key: "b", N: 29}})
	require.NoError(t, err)
	require.False(t, denied.OK)
	require.NoError(t, c.UndoAll(t.Context(), denied))
	require.EqualValues(t, 30, left())

	r, err = c.Take(t.Context(), "b", 10)
	require.NoError(t, err)
	require.Equal(t, SourceFallback, r.Source.Kind)
	require.NoError(t, f.proxy.Heal())
	eventually(t, func() bool {
		answered, err := c.Take(t.Context(), "b", 1)
		require.NoError(t, err)
		return answered.Source.Kind != SourceFallback
	}, "the bucket answers")
	before := left()
	require.NoError(t, c.Undo(t.Context(), "b", r))
	require.Equal(t, before, left())
}

// The tokens that a bucket in shadow mode lacked were not taken from it, so they don't go back.
func TestUndoInShadowModeGivesBackWhatTheBucketHad(t *testing.T) {
	for name, take := range map[string]func(*Client) (Result, error){
		"take": func(c *Client) (Result, error) { return c.Take(t.Context(), "K", 5) },
		"wait": func(c *Client) (Result, error) { return c.Wait(t.Context(), "K", 5) },
	} {
		t.Run(name, func(t *testing.T) {
			rdb := testenv.Redis(t).Client()
			p := hourly(10)
			p.Shadow = true
			createBucket(t, rdb, "K", p)
			c := newClient(t, rdb, slow())
			_, err := c.Take(t.Context(), "K", 9)
			require.NoError(t, err)
			r, err := take(c)
			require.NoError(t, err)
			require.True(t, r.OK && r.Shadow)
			require.EqualValues(t, 5, r.Taken)
			require.NoError(t, c.Undo(t.Context(), "K", r))
			require.EqualValues(t, 1, tokens(t, rdb, "K"))
		})
	}
}

// A Wait that a degraded mode admitted got its tokens from no bucket. A Wait that the bucket served got them from the
// bucket.
func TestUndoOfAWaitGivesBackWhatTheBucketGave(t *testing.T) {
	f := newFaulty(t, nil)
	p := hourly(80)
	p.Degraded = policy.DegradedOpen
	createBucket(t, f.direct, "b", p)
	c := newClient(t, f.rdb, slow())
	f.warm(t, c)
	_, err := c.Take(t.Context(), "b", 50)
	require.NoError(t, err)
	taken, err := c.Wait(t.Context(), "b", 10)
	require.NoError(t, err)
	era := taken.Era
	require.NotZero(t, era)
	taken.ResetAfter = 0
	taken.MoreAfter = 0
	require.Equal(t, Result{OK: true, Taken: 10, Remaining: 20, Limit: 80}, timeless(taken))
	f.proxy.Cut()
	admitted, err := c.Wait(t.Context(), "b", 5)
	require.NoError(t, err)
	require.Equal(t, SourceFallback, admitted.Source.Kind)
	require.EqualValues(t, 5, admitted.Taken)
	require.NoError(t, f.proxy.Heal())
	require.NoError(t, c.Undo(t.Context(), "b", admitted))
	require.EqualValues(t, 20, tokens(t, f.direct, "b"))
	taken.Era = era
	require.NoError(t, c.Undo(t.Context(), "b", taken))
	require.EqualValues(t, 30, tokens(t, f.direct, "b"))
}

// A take that doesn't read the era has the last one that the Client read, at most ten seconds before. So for that time
// Undo drops tokens of an era that just began. It never gives tokens to another era than theirs.
func TestUndoDropsTokensOfAnEraThatJustBegan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1000)})
		c := newClient(t, b, slow())
		first, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		b.with("checkout", func(bucket *oracle.Bucket) { bucket.Control.Era++ })
		undo := func(era, returned int64) {
			t.Helper()
			r, err := c.Take(t.Context(), "checkout", 10)
			require.NoError(t, err)
			require.Equal(t, era, r.Era)
			before := inBucket(b)
			require.NoError(t, c.Undo(t.Context(), "checkout", r))
			require.Equal(t, returned, inBucket(b)-before)
		}
		undo(first.Era, 0)
		time.Sleep(policyMaxAge - time.Millisecond)
		undo(first.Era, 0)
		require.EqualValues(t, 20, c.Stats().Clamped)
		time.Sleep(time.Millisecond)
		undo(first.Era+1, 10)
		require.EqualValues(t, 20, c.Stats().Clamped)
	})
}

// A take asks for the instants of a stepped bucket after it got its tokens. Meanwhile the Client may read that the
// bucket has begun a new era. The tokens are still of the earlier one.
func TestAResultHasTheEraOfItsTokensAfterAskingForASchedule(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(1000)})
		control := b.buckets["checkout"].Control
		control.Terms.Kind = policy.Stepped
		control.Step, control.Next = control.Last, control.Last+time.Hour.Microseconds()
		c := newClient(t, b, slow())
		era := control.Era
		b.fail(func(script string) fault {
			if script == "peek" {
				control.Era++
				c.buckets.update("checkout", func(i *info) { i.era++ })
			}
			return none
		})
		r, err := c.Take(t.Context(), "checkout", 10)
		require.NoError(t, err)
		require.Greater(t, control.Era, era)
		require.Equal(t, era, r.Era)
		require.Positive(t, r.MoreAfter)
		require.NoError(t, c.Undo(t.Context(), "checkout", r))
		require.EqualValues(t, 990, inBucket(b))
	})
}

// A configured bucket without a policy has an unknown era. A refilled template's bucket always has an era, so tokens of
// an unknown one are from a bucket of another kind.
func TestUndoOfAnUnknownEraGivesNothingToATemplatesBucket(t *testing.T) {
	t.Parallel()
	rdb := testenv.Redis(t).Client()
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:", Policy: hourly(10)}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), rdb, set)
	require.NoError(t, err)
	createBucket(t, rdb, "checkout", hourly(10))
	c := newClient(t, rdb, slow())
	for key, left := range map[string]int64{"checkout": 10, "user:1": 5} {
		r, err := c.Take(t.Context(), key, 5)
		require.NoError(t, err)
		r.Era = 0
		require.NoError(t, c.Undo(t.Context(), key, r))
		require.Equal(t, left, tokens(t, rdb, key), key)
	}
	require.EqualValues(t, 5, c.Stats().Clamped)
}

// If one question serves several waiters, each gets its own Result, as if they had been served one by one.
func TestEachWaiterOfALineHasItsOwnResult(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "b", hourly(100))
	c := newClient(t, rdb, slow())
	_, err := c.Take(t.Context(), "b", 100)
	require.NoError(t, err)
	results := make(chan Result, 3)
	for range 3 {
		go func() {
			r, err := c.Wait(t.Context(), "b", 20)
			if err != nil {
				t.Error(err)
			}
			results <- r
		}()
	}
	eventually(t, func() bool {
		return lineIs(c, "b", func(l *line) bool { return l.total == 60 && !l.denied.IsZero() })
	}, "all calls wait in the line")
	require.NoError(t, c.Return(t.Context(), "b", 90))
	left := map[int64]bool{}
	for range 3 {
		r := <-results
		require.EqualValues(t, 20, r.Taken)
		require.EqualValues(t, 100, r.Limit)
		left[r.Remaining] = true
		require.NoError(t, c.Undo(t.Context(), "b", r))
	}
	require.Equal(t, map[int64]bool{70: true, 50: true, 30: true}, left)
	require.EqualValues(t, 90, tokens(t, rdb, "b"))
}

// UndoAll gives each bucket the tokens that it gave. It gives back nothing if a degraded mode granted the tokens, if a
// bucket in shadow mode lacked them, or if the bucket has begun another era.
func TestUndoAllGivesBackWhatEachBucketGave(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	away := testenv.Redis(t)
	ring := redis.NewRing(&redis.RingOptions{
		Addrs: map[string]string{"up": rdb.Options().Addr, "away": away.Addr()}, HeartbeatFrequency: time.Hour,
	})
	t.Cleanup(func() { _ = ring.Close() })
	keyOn := func(shard, prefix string) string {
		for i := 0; ; i++ {
			key := prefix + strconv.Itoa(i)
			one, err := ring.GetShardClientForKey(key)
			require.NoError(t, err)
			if (one.Options().Addr == away.Addr()) == (shard == "away") {
				return key
			}
		}
	}
	plain, other := keyOn("up", "plain:"), keyOn("up", "other:")
	lacking := keyOn("up", "lacking:")
	lost, open := keyOn("up", "lost:"), keyOn("away", "open:")
	for _, key := range []string{plain, other, lacking, lost, open} {
		p := hourly(10)
		p.Shadow = key == lacking
		if key == open {
			p.Degraded = policy.DegradedOpen
		}
		createBucket(t, ring, key, p)
	}
	c := newClient(t, ring, WithTimeout(time.Second))
	_, err := c.Take(t.Context(), lacking, 8, slow())
	require.NoError(t, err)
	_, err = c.Take(t.Context(), open, 1, slow())
	require.NoError(t, err)
	away.Pause()
	all, err := c.TakeAll(t.Context(), []Request{{Key: plain, N: 2}, {Key: other, N: 3}, {Key: plain, N: 4},
		{Key: lacking, N: 5}, {Key: lost, N: 6}, {Key: open, N: 7}})
	require.NoError(t, err)
	require.True(t, all.OK)
	away.Resume()
	require.NoError(t, rdb.Del(t.Context(), lost, "{"+lost+"}", "{"+lost+"}:ctl").Err())
	p := hourly(10)
	p.Initial = new(int64)
	createBucket(t, rdb, lost, p)

	require.NoError(t, c.UndoAll(t.Context(), all))
	for key, want := range map[string]int64{plain: 10, other: 10, lacking: 2, lost: 0} {
		require.Equal(t, want, tokens(t, rdb, key), key)
	}
	require.EqualValues(t, 9, tokens(t, away.Client(), open))
	denied, err := c.TakeAll(t.Context(), []Request{{Key: plain, N: 1}, {Key: lost, N: 9}})
	require.NoError(t, err)
	require.False(t, denied.OK)
	require.NoError(t, c.UndoAll(t.Context(), denied))
	require.NoError(t, c.UndoAll(t.Context(), AllResult{}))
	require.EqualValues(t, 10, tokens(t, rdb, plain))
	require.Zero(t, tokens(t, rdb, lost))
}
