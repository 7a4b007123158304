//go:build !production

package devserver_test

import (
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tokenrefill/refiller/internal/dev/devserver"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestTheStoreRunsTheScripts(t *testing.T) {
	t.Parallel()
	s, err := devserver.StartRedis(0)
	require.NoError(t, err)
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr()})
	_, err = lua.Peek(t.Context(), rdb, "none", 1)
	require.ErrorIs(t, err, lua.ErrUnknownBucket)
	index, err := lua.Add(t.Context(), rdb, "k", 3, 10, 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, index)
	reply, err := lua.Take(t.Context(), rdb, "k", 2, false)
	require.NoError(t, err)
	require.EqualValues(t, 1, reply.Remaining)
	require.NoError(t, rdb.Close())
	s.Close()
	requireFree(t, s.Addr())
}

// The store removes keys when they expire. All keys of the limiters of package limit expire, so the limiters work on
// the store as on Redis.
func TestTheStoreExpiresTheKeysOfLimiters(t *testing.T) {
	t.Parallel()
	s, err := devserver.StartRedis(0)
	require.NoError(t, err)
	defer s.Close()
	rdb := redis.NewClient(&redis.Options{Addr: s.Addr()})
	defer rdb.Close()
	rate := policy.Rate{Tokens: 3, Per: time.Second}
	buckets, err := lazy.New(rdb, lazy.Config{Capacity: 3, Rate: rate})
	require.NoError(t, err)
	fixed, err := window.New(rdb, window.Config{Limit: 3, Window: time.Second})
	require.NoError(t, err)
	sliding, err := window.New(rdb, window.Config{Kind: window.Sliding, Limit: 3, Window: time.Second})
	require.NoError(t, err)
	queue, err := pacing.New(rdb, pacing.Config{Rate: rate, MaxWait: time.Second})
	require.NoError(t, err)
	for name, l := range map[string]limit.Limiter{"lazy": buckets, "fixed": fixed, "sliding": sliding, "pacing": queue} {
		for range 2 {
			r, err := l.Take(t.Context(), "K", 3)
			require.NoError(t, err, name)
			require.True(t, r.OK, name)
			require.Eventually(t, func() bool { return rdb.DBSize(t.Context()).Val() == 0 }, 20*time.Second, time.Millisecond,
				name)
		}
	}
}

func TestEtcdServesAndLeavesItsPortWhenClosed(t *testing.T) {
	t.Parallel()
	s, err := devserver.StartEtcd(t.Context(), 0, t.TempDir())
	require.NoError(t, err)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"http://" + s.Addr()}, Logger: zap.NewNop()})
	require.NoError(t, err)
	lease, err := client.Grant(t.Context(), 1)
	require.NoError(t, err)
	require.EqualValues(t, 1, lease.TTL, "short leases are granted as asked")
	_, err = client.Put(t.Context(), "a", "b", clientv3.WithLease(lease.ID))
	require.NoError(t, err)
	require.NoError(t, client.Close())
	s.Close()
	requireFree(t, s.Addr())
}

func TestATakenPortIsReplacedByAFreeOne(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	s, err := devserver.StartRedis(ln.Addr().(*net.TCPAddr).Port)
	require.NoError(t, err)
	defer s.Close()
	require.NotEqual(t, ln.Addr().String(), s.Addr())
}

func requireFree(t *testing.T, addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	require.NoError(t, err)
	require.NoError(t, ln.Close())
}
