package scale

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
)

var (
	junk   = flag.Int("junk", 300, "how many buckets TestUnusedBucketsExpireAfterTheirLives makes")
	expire = flag.Bool("expire", false, "it waits until they have expired, for a minute or two")
)

// A client that invents keys of a template gets a bucket for each key. The buckets expire when their lives are over.
// Then they are removed from the active set and are no longer counted, whether or not a replica refills them.
func TestUnusedBucketsExpireAfterTheirLives(t *testing.T) {
	t.Parallel()
	t.Run("Refilled", func(t *testing.T) {
		t.Parallel()
		expireUnused(t, 1)
	})
	t.Run("NoReplica", func(t *testing.T) {
		t.Parallel()
		expireUnused(t, 0)
	})
}

func expireUnused(t *testing.T, replicas int) {
	const (
		capacity = 10 // with a rate of 1/s, a bucket lives for a minute
		life     = time.Minute
		workers  = 64
	)
	ctx, s := t.Context(), startStore(t, false)
	config := fmt.Sprintf("redis: {url: %q}\nversion: 1\nrefill_interval: 1s\nlisten: 127.0.0.1:0\ntemplates:\n  - {prefix: %q, capacity: %d, rate: 1/s, max_keys: %d}\n", s.url, prefix, capacity, 2**junk)
	r := startReplica(t, "publisher", config) // publishes the template, and refills if it isn't killed
	rdb := s.nodes[0]
	require.Eventually(t, func() bool { return rdb.Exists(ctx, lua.TemplatesKey).Val() == 1 }, patience,
		10*time.Millisecond)
	if replicas == 0 {
		r.Kill()
	}
	client, err := fetch.New(s.rdb, fetch.WithTimeout(patience))
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close(context.WithoutCancel(ctx)) })
	require.Eventually(t, func() bool {
		_, err := client.Peek(ctx, prefix) // works once the client knows the template
		return err == nil
	}, patience, 10*time.Millisecond)

	// alive returns the number of buckets that are counted, and active the number in the active set.
	alive := func() int64 {
		return s.rdb.ZCount(ctx, lua.AliveKey(prefix), "("+strconv.FormatInt(time.Now().Unix(), 10), "+inf").Val()
	}
	active := func() int64 {
		n, _ := s.active(t)
		return n
	}
	var peak, peakActive int64
	var made atomic.Int64
	begin, empty := time.Now(), s.usage(t).memory
	most := empty
	poll := func() {
		peak = max(peak, rdb.DBSize(ctx).Val())
		peakActive = max(peakActive, active())
		most = max(most, s.usage(t).memory)
	}
	g, making := errgroup.WithContext(ctx)
	for range workers {
		g.Go(func() error {
			for made.Add(1) <= int64(*junk) {
				if _, err := client.Take(making, fmt.Sprintf("%s%016x", prefix, rand.Uint64()),
					1+rand.Int64N(capacity)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	done := make(chan error, 1)
	go func() { done <- g.Wait() }()
	for end := false; !end; poll() {
		select {
		case err := <-done:
			require.NoError(t, err)
			end = true
		case <-time.After(time.Second):
		}
	}
	took := time.Since(begin)
	require.LessOrEqual(t, alive(), int64(*junk))
	if took < life {
		require.EqualValues(t, *junk, alive())
	}
	// No key of the template lives longer than a life, rounded up by an eighth, plus a second.
	for range 100 {
		if key := rdb.RandomKey(ctx).Val(); strings.Contains(key, prefix) {
			ttl := rdb.TTL(ctx, key).Val()
			require.LessOrEqual(t, ttl, life*9/8+time.Second, key)
			require.NotEqual(t, time.Duration(-1), ttl, "%s does not expire", key)
		}
	}
	t.Logf("%d buckets in %s: at most %d keys, %d names in the active set, %.0f MB", *junk, took.Round(time.Second), peak,
		peakActive, (most-empty)/1e6)
	if !*expire {
		return
	}
	begin = time.Now()
	require.Eventually(t, func() bool {
		return alive() == 0 && active() == 0 && !slices.ContainsFunc(rdb.Keys(ctx, "*").Val(),
			func(key string) bool { return strings.Contains(key, prefix) })
	}, patience, time.Second)
	t.Logf("%s later no bucket is left, in the active set or counted; Redis holds the keys %v",
		time.Since(begin).Round(time.Second), rdb.Keys(ctx, "*").Val())
}
