package refill

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// A first call opens a connection, reads the slots and loads the script. So it needs several more round trips than a
// later call.
func TestServersFarAwayAreReachedAtTheStartAndAfterAnOutage(t *testing.T) {
	t.Parallel()
	const trip = 190 * time.Millisecond
	for name, start := range map[string]func(t *testing.T) (rdb redis.UniversalClient, proxies []*faultproxy.Proxy){
		"single": func(t *testing.T) (redis.UniversalClient, []*faultproxy.Proxy) {
			server := testenv.Redis(t)
			proxy := testenv.Proxy(t, server.Addr(), 0)
			o := server.ClientOptions()
			o.Addr = proxy.Addr()
			rdb := redis.NewClient(o)
			t.Cleanup(func() { _ = rdb.Close() })
			return rdb, []*faultproxy.Proxy{proxy}
		},
		"cluster": func(t *testing.T) (redis.UniversalClient, []*faultproxy.Proxy) {
			cluster := testenv.Cluster(t, testenv.WithProxies())
			var proxies []*faultproxy.Proxy
			for _, s := range cluster.Servers() {
				proxies = append(proxies, s.Proxy())
			}
			return cluster.Client(), proxies
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb, proxies := start(t)
			for _, p := range proxies {
				require.NoError(t, p.Distance(trip, 0))
			}
			buckets := []Bucket{checkout(1000)}
			w := newWatch()
			running(t, rdb, w, false, buckets)
			w.until(t, "a refill", appliedTo(buckets))
			for _, p := range proxies {
				p.Reset()
			}
			w.forget()
			w.until(t, "a refill on new connections", appliedTo(buckets))
		})
	}
}
