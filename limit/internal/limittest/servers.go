package limittest

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is how long the clients wait: on a busy machine a call may take
// seconds, which is no fault of the limiter.
const patience = time.Minute

// Redis starts a server and returns a client of it.
func Redis(t testing.TB) *redis.Client {
	o := testenv.Redis(t).ClientOptions()
	o.ReadTimeout, o.WriteTimeout, o.PoolTimeout, o.DialTimeout = patience, patience, patience, patience
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// Cluster starts a Redis Cluster and returns a client of it.
func Cluster(t testing.TB) *redis.ClusterClient {
	rdb := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs: testenv.Cluster(t).Addrs(), DialerRetries: 1, ContextTimeoutEnabled: true,
		ReadTimeout: patience, WriteTimeout: patience, PoolTimeout: patience, DialTimeout: patience,
	})
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}
