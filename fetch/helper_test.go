package fetch

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// patience is how long a test waits for an event that must happen.
const patience = 20 * time.Second

// TestMain fails if a Client's goroutine outlives the tests, which all close
// their clients.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := noWorkers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// noWorkers waits until no goroutine of any Client lives.
func noWorkers() error {
	buf := make([]byte, 1<<20)
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		stacks := string(buf[:runtime.Stack(buf, true)])
		if !strings.Contains(stacks, "internal/engine.(*Queue") && !strings.Contains(stacks, "refiller/fetch.(*") {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("fetch: goroutines outlive their client:\n%s", stacks)
		}
	}
}

// newClient makes a Client that is closed when the test ends.
func newClient(t testing.TB, rdb redis.UniversalClient, opts ...Option) *Client {
	t.Helper()
	c, err := New(rdb, opts...)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, c.Close(ctx))
	})
	return c
}

// slow is a timeout so long that it ends a call only if a test hangs.
func slow() SharedOption { return WithTimeout(patience) }

// hourly is the policy of a bucket that holds capacity tokens and gains one token an hour, so none during a test.
func hourly(capacity int64) policy.Policy {
	return policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
}

func createBucket(t testing.TB, rdb lua.Client, key string, p policy.Policy) {
	t.Helper()
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{})
	out, err := lua.Refill(context.Background(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	require.Equal(t, policy.StatusInitialised, out.Status)
}

// createUnder creates nothing: it puts a policy in force in a bucket that exists, under a later version.
func createUnder(t testing.TB, rdb lua.Client, key string, p policy.Policy, version int64) {
	t.Helper()
	terms := p.Terms(policy.Fence{Epoch: version})
	_, err := lua.Refill(context.Background(), rdb, key, policy.Call{Terms: &terms})
	require.NoError(t, err)
}

func tokens(t testing.TB, rdb redis.Cmdable, key string) int64 {
	t.Helper()
	n, err := rdb.Get(context.Background(), key).Int64()
	require.NoError(t, err)
	return n
}

// eventually waits until ok holds.
func eventually(t testing.TB, ok func() bool, what string) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		require.True(t, time.Now().Before(end), what)
	}
}

// refillUntil refills a bucket once an interval until ctx ends.
func refillUntil(ctx context.Context, t testing.TB, rdb lua.Client, key string, p policy.Policy) {
	ticker := time.NewTicker(p.Interval)
	defer ticker.Stop()
	var version policy.Version
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			out, err := lua.Refill(context.WithoutCancel(ctx), rdb, key, policy.Call{Version: version})
			if err != nil {
				t.Error(err)
				return
			}
			version = out.Version
		}
	}
}

// timeless returns a result without its era.
func timeless(r Result) Result {
	r.Era = 0
	return r
}

// seeded returns a random source with the seed REFILLER_SEED, or with a new seed. The seed is printed, so that a run
// can be repeated.
func seeded(t *testing.T) *rand.Rand {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		seed = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// errOf returns the error of a call whose Result doesn't matter.
func errOf(_ Result, err error) error { return err }

// known returns what a Client knows of a bucket.
func known(c *Client, key string) *info { return c.buckets.find(key).known.Load() }

// forgetUnused uses so many other buckets that the Client forgets all buckets that are not in use.
func forgetUnused(c *Client) {
	for i := 0; i < 4*len(c.buckets.shards)*c.buckets.shards[0].half; i++ {
		c.buckets.obtain("another " + strconv.Itoa(i))
	}
}

// held returns the number of buckets that the shards hold. A bucket in both the young and the old half counts twice.
func (bs *buckets) held() (n int) {
	for i := range bs.shards {
		n += len(bs.shards[i].young) + len(bs.shards[i].old)
	}
	return n
}

// lineIs reports whether the condition holds for the bucket's line of callers that name neither a flow nor a leave. It
// returns false if there is no such line.
func lineIs(c *Client, key string, condition func(*line) bool) bool {
	ls := c.buckets.find(key).lines.Load()
	if ls == nil {
		return false
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	l := ls.find("", policy.Leave{})
	return l != nil && condition(l)
}
