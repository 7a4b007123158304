package lua_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/buckettest"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func isScript(request []byte) bool { return bytes.Contains(request, []byte("eval")) }

const always = 1 << 30

// The connection breaks after the script ran and before its reply. The client has the default MaxRetries of go-redis. A
// script that go-redis sends in its own way runs once for each attempt, which shows that the fault has an effect. Our
// scripts run once.
func TestAScriptWhoseReplyIsLostRunsOnce(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	direct, p := server.Client(), testenv.Proxy(t, server.Addr(), 0)
	retrying := redis.NewClient(&redis.Options{Addr: p.Addr()})
	t.Cleanup(func() { _ = retrying.Close() })
	require.Equal(t, 3, retrying.Options().MaxRetries, "three retries are the default")
	require.NoError(t, lua.Load(ctx, direct))

	plain := redis.NewScript(`return redis.call('DECRBY', KEYS[1], ARGV[1])`)
	require.NoError(t, plain.Load(ctx, direct).Err())
	require.NoError(t, direct.Set(ctx, "plain", 100, 0).Err())
	require.NoError(t, p.CutAfterReply(always, isScript))
	require.Error(t, plain.EvalSha(ctx, retrying, []string{"plain"}, 5).Err())
	require.Equal(t, "80", direct.Get(ctx, "plain").Val(), "a plain EVALSHA runs for each of four attempts")

	terms := buckettest.Terms()
	want := map[string]struct{ tokens, index int64 }{
		"Take": {95, buckettest.Index}, "TakeWithTerms": {95, buckettest.Index}, "TakeOnce": {95, buckettest.Index},
		"TakeAll": {95, buckettest.Index}, "TakeUpTo": {95, buckettest.Index}, "Return": {105, buckettest.Index},
		"Grant": {105, buckettest.Index + 1}, "Reset": {5, buckettest.Index + 1}, "Add": {105, buckettest.Index + 1},
		"Refill":  {-1, buckettest.Index + 1},
		"Reserve": {95, buckettest.Index}, "Lease": {95, buckettest.Index},
	}
	for name, w := range want {
		for _, source := range []bool{false, true} {
			where := fmt.Sprintf("%s, with its source: %t", name, source)
			storeCase(ctx, t, direct, name, 100)
			if source { // NOSCRIPT is answered, and the reply to the source is lost
				require.NoError(t, direct.ScriptFlush(ctx).Err())
				require.NoError(t, p.CutAfterReply(always,
					func(r []byte) bool { return bytes.Contains(r, []byte("\r\neval\r\n")) }))
			}
			lost := p.LostReplies()
			require.Error(t, operations[name](ctx, retrying, name), where)
			require.Equal(t, 1, p.LostReplies()-lost, "%s: one attempt", where)
			b := loadHeld(ctx, t, direct, name)
			require.Equal(t, w.index, *b.Index, where)
			if w.tokens >= 0 {
				require.Equal(t, w.tokens, *b.Tokens, where)
			}
			require.NoError(t, p.CutAfterReply(always, isScript))
			require.NoError(t, lua.Load(ctx, direct))
		}
	}

	// The caller of a refill whose reply was lost sends it again with the state that it last read. Then the reply shows
	// that the refill was made already.
	out, err := lua.Refill(ctx, direct, "Refill",
		policy.Call{Version: policy.Version{Era: buckettest.Era, Index: buckettest.Index}, Terms: &terms})
	require.NoError(t, err)
	require.Equal(t, policy.StatusStale, out.Status)
}

func TestABatchWhoseReplyIsLostRunsOnce(t *testing.T) {
	t.Parallel()
	ctx, server := t.Context(), testenv.Redis(t)
	direct, p := server.Client(), testenv.Proxy(t, server.Addr(), 0)
	retrying := redis.NewClient(&redis.Options{Addr: p.Addr()})
	t.Cleanup(func() { _ = retrying.Close() })

	plain := redis.NewScript(`return redis.call('INCR', KEYS[1])`)
	require.NoError(t, plain.Load(ctx, direct).Err())
	require.NoError(t, lua.Load(ctx, direct))
	require.NoError(t, p.CutAfterReply(always, isScript))
	_, err := retrying.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i := range 3 {
			plain.EvalSha(ctx, pipe, []string{fmt.Sprintf("plain%d", i)})
		}
		return nil
	})
	require.Error(t, err)
	require.Equal(t, []any{"4", "4", "4"}, direct.MGet(ctx, "plain0", "plain1", "plain2").Val(),
		"a plain pipeline runs for each of four attempts")

	for _, perCall := range []int{1, 4} {
		checkLostBatch(ctx, t, direct, retrying, perCall, p)
	}
}

func TestABatchWhoseReplyIsLostRunsOnceOnACluster(t *testing.T) {
	t.Parallel()
	ctx, c := t.Context(), testenv.Cluster(t)
	direct := c.Client()
	proxies := map[string]*faultproxy.Proxy{}
	for _, addr := range c.Addrs() {
		proxies[addr] = testenv.Proxy(t, addr, 0)
	}
	retrying := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: c.Addrs(),
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, proxies[addr].Addr())
		},
	})
	t.Cleanup(func() { _ = retrying.Close() })

	plain := redis.NewScript(`return redis.call('INCR', KEYS[1])`)
	require.NoError(t, plain.Load(ctx, direct).Err())
	require.NoError(t, lua.Load(ctx, direct))
	require.NoError(t, retrying.Ping(ctx).Err())
	for _, p := range proxies {
		require.NoError(t, p.CutAfterReply(always, isScript))
	}
	require.Error(t, plain.EvalSha(ctx, retrying, []string{"plain"}).Err())
	n, err := direct.Get(ctx, "plain").Int()
	require.NoError(t, err)
	require.Greater(t, n, 1, "a plain EVALSHA runs for each attempt")
	checkLostBatch(ctx, t, direct, retrying, 1, slices.Collect(maps.Values(proxies))...)

	storeCase(ctx, t, direct, "single", 100)
	require.Error(t, operations["Take"](ctx, retrying, "single"))
	require.EqualValues(t, 95, *load(ctx, t, direct, "single").Tokens)
}

// checkLostBatch refills through a client whose replies are lost.
func checkLostBatch(ctx context.Context, t *testing.T, direct, retrying redis.UniversalClient, perCall int,
	proxies ...*faultproxy.Proxy) {
	t.Helper()
	calls := batch(8, nil)
	for i := range calls {
		storeCase(ctx, t, direct, calls[i].Key, 100)
		calls[i].Version = policy.Version{Era: buckettest.Era, Index: buckettest.Index}
	}
	before := make([]int, len(proxies))
	for i, p := range proxies {
		before[i] = p.LostReplies()
	}
	for _, r := range lua.RefillBatch(ctx, retrying, calls, perCall) {
		require.Error(t, r.Err)
		require.ErrorContains(t, r.Err, "refiller: refill: ")
	}
	for i, p := range proxies {
		require.LessOrEqual(t, p.LostReplies()-before[i], 1, "the call was sent once")
	}
	for _, c := range calls {
		b := load(ctx, t, direct, c.Key)
		require.EqualValues(t, buckettest.Index+1, *b.Index, "the script ran once")
		require.GreaterOrEqual(t, *b.Tokens, int64(150), "the refill added its tokens")
	}
}
