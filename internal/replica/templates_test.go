package replica_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/override"
	"github.com/tokenrefill/refiller/policy"
)

const (
	oneBucket     = "  - {key: a, capacity: 1000, rate: 500/s}\n"
	users         = oneBucket + `templates: [{prefix: "user:", enforce: lazy, capacity: 60, rate: 1/s}]` + "\n"
	refilledUsers = oneBucket + `templates: [{prefix: "user:", capacity: 100, rate: 100/s, interval: 100ms}]` + "\n"
	fewer         = oneBucket + `templates: [{prefix: "user:", enforce: lazy, capacity: 6, rate: 1/s}]` + "\n"
)

func TestReplicasPublishTheirTemplates(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	capacity := func() int64 {
		set, _, err := lua.ReadTemplates(t.Context(), rdb, "")
		require.NoError(t, err)
		r := set.Of("user:1")
		if r == nil {
			return 0
		}
		return r.Policy.Capacity
	}
	becomes := func(want int64, why string) {
		t.Helper()
		eventually(t, why, func() bool { return capacity() == want })
	}
	r := running(t, parse(t, server.URL(), 7, users), replica.Options{})
	running(t, parse(t, server.URL(), 7, users), replica.Options{})
	becomes(60, "the template is published")
	require.NoError(t, rdb.Del(t.Context(), lua.TemplatesKey).Err())
	becomes(60, "the template is published again")

	began := time.Now()
	require.NoError(t, r.Reload(parse(t, server.URL(), 8, fewer), "test"))
	becomes(6, "the reloaded template is published")
	t.Logf("published after %s", time.Since(began))
	running(t, parse(t, server.URL(), 7, users), replica.Options{})
	old := running(t, parse(t, server.URL(), 8, users), replica.Options{Logger: hclog.NewNullLogger()})
	for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		require.EqualValues(t, 6, capacity(), "replicas of an old or the same version change nothing")
	}

	require.NoError(t, r.Reload(parse(t, server.URL(), 9, oneBucket), "test"))
	require.EqualValues(t, 6, capacity(), "a file without templates leaves them in force")
	require.NoError(t, old.Reload(parse(t, server.URL(), 9, oneBucket+"templates: []\n"), "test"))
	becomes(0, "the templates have ended")
}

// A consumer reads the same template as the configuration has.
func TestAPublishedTemplateIsTheConfigurations(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	running(t, parse(t, server.URL(), 7, oneBucket+
		`templates: [{prefix: "", enforce: lazy, capacity: 60, rate: 10/m, degraded: open, shadow: true}]`+"\n"),
		replica.Options{})
	var set *policy.Templates
	eventually(t, "the template is published", func() bool {
		var err error
		set, _, err = lua.ReadTemplates(t.Context(), server.Client(), "")
		require.NoError(t, err)
		return set != nil
	})
	require.EqualValues(t, 7, set.Version())
	require.Nil(t, set.Of("a"), "a bucket of the file has no template")
	got := set.Of("user:1")
	require.Equal(t, policy.EnforceLazy, got.Enforce)
	require.Equal(t, policy.Template{Policy: policy.Policy{
		Capacity: 60, Rate: policy.Rate{Tokens: 10, Per: time.Minute}, Interval: time.Millisecond,
		Degraded: policy.DegradedOpen, Shadow: true,
	}}.Terms(policy.Fence{Epoch: 7}), got.Terms)
}

// A refilled template is tested from the file to the consumer. Every key has a bucket. While the bucket isn't full, it
// is refilled at the template's rate and within the bound. Its capacity follows the file.
func TestConsumersTakeFromTheBucketsThatReplicasRefill(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	with := func(version, capacity int64) config.Config {
		return parse(t, server.URL(), version, oneBucket+fmt.Sprintf(
			`templates: [{prefix: "user:", capacity: %d, rate: 200/s, interval: 50ms}]`+"\n", capacity))
	}
	first := running(t, with(7, 100), replica.Options{})
	second := running(t, with(7, 100), replica.Options{})
	c := consumer(t, rdb, fetch.WithRescue(false))
	eventually(t, "the template is published", func() bool {
		_, err := c.Peek(ctx, "user:1")
		return err == nil
	})
	for i := range 3 {
		key := fmt.Sprintf("user:%d", i)
		began := time.Now()
		for range 4 { // the bucket has the tokens for the first take, and must be refilled for the others
			_, err := c.Wait(ctx, key, 100)
			require.NoError(t, err)
		}
		due := int64(time.Since(began).Seconds()*200) + 100
		require.LessOrEqual(t, int64(400), due+1, "consumers got no more tokens than fell due")
	}
	active := func() (n int64) {
		for i := range lua.ActiveShards {
			n += rdb.SCard(ctx, lua.ActiveKey("user:", i)).Val()
		}
		return n
	}
	eventually(t, "full buckets leave the active set", func() bool { return active() == 0 })

	require.NoError(t, first.Reload(with(8, 40), "test"))
	require.NoError(t, second.Reload(with(8, 40), "test"))
	eventually(t, "a lower capacity is in force", func() bool {
		r, err := c.Take(ctx, "user:1", 1)
		require.NoError(t, err)
		return r.Remaining < 40 && r.OK
	})
	eventually(t, "new buckets have the lower capacity", func() bool {
		r, err := c.Peek(ctx, "user:new")
		require.NoError(t, err)
		return r.Limit == 40
	})
}

// A consumer remembers a bucket's capacity for ten seconds. If the capacity is lowered in that time, the bucket may be
// full although the consumer believes that it isn't. Then its take doesn't put the bucket into the active set. The
// bucket is refilled all the same.
func TestABucketThatWasLoweredIsRefilledThoughConsumersDoNotKnow(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	running(t, parse(t, server.URL(), 7, oneBucket+
		`templates: [{prefix: "user:", capacity: 100, rate: 20/s, interval: 50ms}]`+"\n"), replica.Options{})
	c := consumer(t, rdb, fetch.WithRescue(false))
	eventually(t, "the template is published", func() bool {
		_, err := c.Take(ctx, "user:1", 1)
		return err == nil
	})
	set := lua.ActiveKey("user:", lua.ActiveShard("user:1"))
	eventually(t, "the bucket is full and has left the active set", func() bool { return rdb.Exists(ctx, set).Val() == 0 })

	_, err := override.New(rdb).Set(ctx, "user:1", policy.Override{Capacity: 5})
	require.NoError(t, err)
	index := peek(t, rdb, "user:1").Version.Index
	eventually(t, "refills find the bucket full", func() bool { return peek(t, rdb, "user:1").Version.Index > index+5 })
	r, err := c.Take(ctx, "user:1", 3)
	require.NoError(t, err)
	require.EqualValues(t, 100, r.Limit, "the consumer still knows the old capacity")
	require.EqualValues(t, 2, r.Remaining)
	eventually(t, "the bucket is refilled", func() bool { return peek(t, rdb, "user:1").Tokens == 5 })
}

// Replicas that start with a later file read from Redis which templates the earlier file had. If a bucket of such a
// template is empty, it is refilled under the template that matches it now, even before its next take.
func TestNewReplicasRefillBucketsOfFormerPrefixes(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	file := func(version int64, buckets, prefix string) config.Config {
		return parse(t, server.URL(), version, oneBucket+buckets+fmt.Sprintf(
			"templates: [{prefix: %q, capacity: 1000, rate: 10/s, interval: 50ms}]\n", prefix))
	}
	_, stop := stoppable(t, file(7, "  - {key: \"user:vip:0\", capacity: 1000, rate: 10/s}\n", "user:vip:"),
		replica.Options{})
	c, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second), fetch.WithRescue(false))
	require.NoError(t, err)
	keys := []string{"user:vip:0", "user:vip:1"}
	for _, key := range keys {
		eventually(t, "the bucket is drained", func() bool {
			r, err := c.Take(ctx, key, 1000)
			return err == nil && r.OK
		})
	}
	require.NoError(t, c.Close(ctx))
	stop()

	running(t, file(8, "", "user:"), replica.Options{})
	for _, key := range keys {
		eventually(t, "the bucket is refilled under the later template", func() bool {
			p := peek(t, rdb, key)
			return p.Terms.Template && p.Terms.FileVersion() == 8 && p.Tokens > 30
		})
	}
}

// Two files come directly after each other. One replica reads both, and the other one only the second.
func TestAReplicaThatMissedAFileRefillsTheBucketsOfItsPrefixes(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	file := func(version int64, prefix string) config.Config {
		return parse(t, server.URL(), version, oneBucket+fmt.Sprintf(
			"templates: [{prefix: %q, capacity: 1000, rate: 100/s, interval: 50ms}]\n", prefix))
	}
	a := running(t, file(1, "user:"), replica.Options{})
	b, stop := stoppable(t, file(1, "user:"), replica.Options{})
	published := func(version int64) func() bool {
		return func() bool {
			set, _, err := lua.ReadTemplates(ctx, rdb, "")
			return err == nil && set != nil && set.Version() == version
		}
	}
	eventually(t, "the first file is published", published(1))
	require.NoError(t, b.Reload(file(2, "vip:"), "test"))
	eventually(t, "the second file is published", published(2))
	c, err := fetch.New(rdb, fetch.WithRescue(false), fetch.WithTimeout(5*time.Second))
	require.NoError(t, err)
	r, err := c.Take(ctx, "vip:1", 1000)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.NoError(t, c.Close(ctx))
	require.NoError(t, a.Reload(file(3, "vi"), "test"))
	stop() // otherwise the test would pass if b, which knows the second file, got the claim
	eventually(t, "the bucket is full after 10 s", func() bool { return peek(t, rdb, "vip:1").Tokens == 1000 })
}

// A file without the field for templates keeps the published templates in force, even after a restart.
func TestPublishedTemplatesStayInForceForAFileWithoutTheField(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	_, stop := stoppable(t, parse(t, server.URL(), 7, refilledUsers), replica.Options{})
	c := consumer(t, rdb, fetch.WithRescue(false))
	eventually(t, "the template is published", func() bool {
		r, err := c.Take(ctx, "user:1", 1)
		return err == nil && r.OK
	})
	stop()
	r := running(t, parse(t, server.URL(), 8, oneBucket), replica.Options{})
	_, err := c.TakeUpTo(ctx, "user:1", 100)
	require.NoError(t, err)
	index := peek(t, rdb, "user:1").Version.Index
	eventually(t, "the bucket is refilled", func() bool { return peek(t, rdb, "user:1").Version.Index > index+2 })
	require.Len(t, r.Status(ctx, admin.Query{}).Templates, 1)

	running(t, parse(t, server.URL(), 9, oneBucket+`templates: [{prefix: "team:", capacity: 5, rate: 1/s}]`+"\n"),
		replica.Options{})
	eventually(t, "the replica follows what another one publishes", func() bool {
		templates := r.Status(ctx, admin.Query{}).Templates
		return len(templates) == 1 && templates[0].Prefix == "team:"
	})
	require.NoError(t, rdb.Del(ctx, lua.TemplatesKey).Err())
	eventually(t, "the templates are published again", func() bool { return rdb.Exists(ctx, lua.TemplatesKey).Val() == 1 })
}

// The leader has started with a file without the field for templates, so it has them from Redis. The standby has
// reloaded that file.
func TestALeaderThatStartsWithoutTheFieldRefillsThePublishedTemplates(t *testing.T) {
	t.Parallel()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	ctx, rdb := t.Context(), server.Client()
	file := func(version int64, more string) config.Config {
		return elected(t, server, etcd, version, "buckets:\n"+more)
	}
	leader := running(t, file(8, oneBucket), replica.Options{Identity: "leader"})
	eventually(t, "it leads", func() bool { return leader.Status(ctx, admin.Query{}).Leading })
	standby := running(t, file(7, refilledUsers), replica.Options{Identity: "standby"})
	c := consumer(t, rdb, fetch.WithRescue(false))
	eventually(t, "the template is published", func() bool {
		r, err := c.Take(ctx, "user:1", 1)
		return err == nil && r.OK
	})
	require.NoError(t, standby.Reload(file(8, oneBucket), "test"))
	eventually(t, "the leader has the template", func() bool {
		return len(leader.Status(ctx, admin.Query{}).Templates) == 1
	})
	began, taken := time.Now(), int64(0)
	for taken < 400 {
		r, err := c.TakeUpTo(ctx, "user:1", 100)
		require.NoError(t, err)
		taken += r.Taken
		require.Less(t, time.Since(began), 6*time.Second, "400 tokens are due in 3 s after the first 100; taken %d", taken)
	}
}

// A bucket of the file keeps its own policy beside a published template that matches its name, although the file has no
// field for templates. Otherwise each loss would bring it back full, as a bucket of the template.
func TestABucketOfAFileWithoutTheFieldIsNoneOfAPublishedTemplate(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	rdb := server.Client()
	const configured = oneBucket + "  - {key: \"user:1\", capacity: 10, rate: 10/s}\n"
	r := running(t, parse(t, server.URL(), 1, oneBucket+
		`templates: [{prefix: "user:", capacity: 100000, rate: 100/s, interval: 100ms}]`+"\n"), replica.Options{})
	published := func() *policy.Templates {
		set, _, err := lua.ReadTemplates(ctx, rdb, "")
		require.NoError(t, err)
		return set
	}
	eventually(t, "the template is published", func() bool { return published() != nil })
	require.NoError(t, r.Reload(parse(t, server.URL(), 2, configured), "test"))
	eventually(t, "the set names the bucket", func() bool { return published().Version() == 2 })
	require.Nil(t, published().Of("user:1"))
	require.NotNil(t, published().Of("user:2"))
	c := consumer(t, rdb)
	eventually(t, "the bucket is there", func() bool {
		r, err := c.Take(ctx, "user:1", 1)
		return err == nil && r.OK
	})
	began, taken := time.Now(), int64(0)
	for range 5 {
		require.NoError(t, rdb.FlushAll(ctx).Err())
		eventually(t, "the bucket is there again", func() bool {
			r, err := c.TakeUpTo(ctx, "user:1", 1_000_000)
			taken += r.Taken
			return err == nil
		})
	}
	require.LessOrEqual(t, taken, 10+int64(time.Since(began).Seconds()*10)+1, "the bucket begins empty after a loss")

	require.NoError(t, r.Reload(parse(t, server.URL(), 3, oneBucket), "test"))
	running(t, parse(t, server.URL(), 3, oneBucket), replica.Options{})
	require.Never(t, func() bool { return published().Of("user:1") != nil }, 1500*time.Millisecond, 50*time.Millisecond,
		"the name stays, because another deployment may have the bucket")
}

// A replica that missed a file has earlier templates than the published ones, and reloads a file without the field.
func TestAReplicaThatMissedAFilePublishesNoEarlierTemplates(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	missed := running(t, parse(t, server.URL(), 7, users), replica.Options{})
	running(t, parse(t, server.URL(), 8, fewer), replica.Options{})
	published := func(version int64) func() bool {
		return func() bool {
			set, _, err := lua.ReadTemplates(ctx, server.Client(), "")
			return err == nil && set.Version() == version && set.Of("user:2").Policy.Capacity == 6
		}
	}
	eventually(t, "the second file is published", published(8))
	configured := oneBucket + "  - {key: \"user:1\", capacity: 10, rate: 10/s}\n"
	require.NoError(t, missed.Reload(parse(t, server.URL(), 9, configured), "test"))
	eventually(t, "the set names the bucket, and the templates stay", published(9))
}

// An override stays in force when its key becomes a configured bucket, and when the key is a template's again.
func TestAnOverrideStaysInForceWhenItsKeyIsConfigured(t *testing.T) {
	t.Parallel()
	for name, template := range map[string]string{
		"refilled": `templates: [{prefix: "user:", capacity: 100, rate: 100/s, interval: 100ms}]` + "\n",
		"lazy":     `templates: [{prefix: "user:", capacity: 100, rate: 100/s, enforce: lazy}]` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, server := t.Context(), testenv.Redis(t)
			rdb := server.Client()
			r := running(t, parse(t, server.URL(), 1, oneBucket+template), replica.Options{})
			c := consumer(t, rdb)
			eventually(t, "the template is published", func() bool {
				r, err := c.Take(ctx, "user:used", 1)
				return err == nil && r.OK
			})
			for _, key := range []string{"user:used", "user:unused"} {
				_, err := override.New(rdb).Set(ctx, key, policy.Override{Capacity: 10, Rate: policy.PerSecond(10)})
				require.NoError(t, err)
			}
			require.NoError(t, r.Reload(parse(t, server.URL(), 2, oneBucket+
				"  - {key: \"user:used\", capacity: 1000, rate: 1000/s}\n"+
				"  - {key: \"user:unused\", capacity: 1000, rate: 1000/s}\n"+template), "test"))
			c = consumer(t, rdb)
			for _, key := range []string{"user:used", "user:unused"} {
				eventually(t, "the bucket is refilled under the override", func() bool {
					p, err := lua.Peek(ctx, rdb, key, 1)
					return err == nil && p.Version.Index > 3
				})
				got, err := c.TakeUpTo(ctx, key, 1000)
				require.NoError(t, err)
				require.LessOrEqual(t, got.Taken, int64(10), key)
				terms := peek(t, rdb, key).Terms
				require.True(t, terms.Fence.Own(), key)
				require.EqualValues(t, 10, terms.Capacity, key)
				require.Equal(t, policy.PerSecond(10), terms.Rate().InUnits(), key)
			}
			require.NoError(t, r.Reload(parse(t, server.URL(), 3, oneBucket+template), "test"))
			for _, key := range []string{"user:used", "user:unused"} {
				eventually(t, "the template's bucket has the override", func() bool {
					got, err := consumer(t, rdb).TakeUpTo(ctx, key, 1000)
					require.NoError(t, err)
					require.LessOrEqual(t, got.Taken, int64(10), key)
					return got.Limit == 10 && got.Taken > 0
				})
			}
		})
	}
}
