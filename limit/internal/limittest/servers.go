package limittest

import (
	"math/rand/v2"
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
	o.ReadTimeout = patience
	o.WriteTimeout = patience
	o.PoolTimeout = patience
	o.DialTimeout = patience
	rdb := redis.NewClient(o)
	t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

// Stepping starts a server and returns a client of it and the function tick. Half of the calls of tick set the server's
// clock to a random time, at most a day before or after the true time. It suits only windows of a minute and more:
// Redis reads the clock again to expire a key, a little later than a script did.
func Stepping(t testing.TB, rng *rand.Rand) (rdb *redis.Client, tick func()) {
	server := testenv.Redis(t, testenv.WithClock())
	return server.Client(), func() {
		if rng.IntN(2) == 0 {
			far := []time.Duration{time.Minute, time.Hour, 24 * time.Hour}[rng.IntN(3)]
			server.StepClock(time.Duration(rng.Int64N(2*int64(far))) - far)
		}
	}
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
