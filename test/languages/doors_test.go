package languages

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var (
	measure = flag.Bool("measure", false, "measure all bursts, with the sidecar's defaults")
	rounds  = flag.Int("rounds", 3, "how often each latency is measured")
)

// windowLimit is how many calls of a burst the window admits.
const windowLimit = 500

// doors is a sidecar, which serves HTTP and gRPC.
type doors struct {
	process *testenv.Process
	url     string // URL of the HTTP server
	grpc    string // address of the gRPC server
}

// openDoors starts a sidecar. It has a window limit "api" for proxies. For Envoy it has a window limit for each
// remote_address, and sixteen descriptors that are never over their limits.
func openDoors(t testing.TB, redisURL string, args ...string) doors {
	t.Helper()
	dir := t.TempDir()
	named, domain := filepath.Join(dir, "limits.yaml"), filepath.Join(dir, "edge.yaml")
	require.NoError(t, os.WriteFile(named,
		fmt.Appendf(nil, "limits: [{name: api, window: {limit: %d, length: 1h}}]\n", windowLimit), 0o600))
	text := fmt.Sprintf("domain: edge\ndescriptors:\n"+
		"  - {key: remote_address, rate_limit: {unit: hour, requests_per_unit: %d}}\n", windowLimit)
	for i := range manyDescriptors {
		text += fmt.Sprintf("  - {key: plenty%d, rate_limit: {unit: hour, requests_per_unit: 1000000000}}\n", i)
	}
	require.NoError(t, os.WriteFile(domain, []byte(text), 0o600))
	args = append([]string{"serve", "--redis", redisURL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
		"--limits", named, "--envoy", domain}, args...)
	d := doors{process: testenv.StartCommand(t, testenv.Command{Path: testenv.Build(t, "./cmd/consumer"), Args: args,
		Env: []string{"GOMEMLIMIT=" + chartMemory(t).goLimit}})}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	address := func(protocol string) string {
		m, err := d.process.WaitLog(ctx, regexp.MustCompile(`protocol=`+protocol+` network=tcp address=(\S+)`))
		require.NoError(t, err)
		return m[1]
	}
	d.url, d.grpc = "http://"+address("http"), address("grpc")
	return d
}

// dial opens n connections over gRPC.
func (d doors) dial(t testing.TB, n int) []*grpc.ClientConn {
	t.Helper()
	conns := make([]*grpc.ClientConn, n)
	for i := range conns {
		conn, err := grpc.NewClient("passthrough:///"+d.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		conn.Connect()
		conns[i] = conn
	}
	return conns
}

// descriptors returns a request of Envoy with one descriptor for each key.
func descriptors(keys ...string) *rls.RateLimitRequest {
	req := &rls.RateLimitRequest{Domain: "edge"}
	for _, key := range keys {
		req.Descriptors = append(req.Descriptors, &descriptorpb.RateLimitDescriptor{
			Entries: []*descriptorpb.RateLimitDescriptor_Entry{{Key: key, Value: "192.0.2.1"}},
		})
	}
	return req
}

var errDenied = errors.New("denied")

// unless returns err or, if the call was not admitted, errDenied.
func unless(admitted bool, err error) error {
	if err == nil && !admitted {
		return errDenied
	}
	return err
}

func takeOverHTTP(client *http.Client, url string) error {
	res, err := client.Post(url+"/v1/take", "application/json", strings.NewReader(`{"key":"plenty"}`))
	if err != nil {
		return err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return unless(strings.Contains(string(text), `"ok":true`), err)
}

// perSecond is the rate at which latencies are measured.
const perSecond = 1000

// atRate makes calls at the rate perSecond for a span. It doesn't wait for one call to end before it makes the next. It
// returns the sorted durations of the calls, and the number of calls that failed.
func atRate(span time.Duration, call func() error) (times []time.Duration, failed int) {
	total := int(span.Seconds() * perSecond)
	var mu sync.Mutex
	var calling sync.WaitGroup
	began := time.Now()
	for i := range total {
		time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / perSecond)))
		sent := time.Now()
		calling.Go(func() {
			err := call()
			took := time.Since(sent)
			mu.Lock()
			defer mu.Unlock()
			times = append(times, took)
			if err != nil {
				failed++
			}
		})
	}
	calling.Wait()
	slices.Sort(times)
	return times, failed
}

// quantile returns the q quantile of sorted times, in milliseconds.
func quantile(times []time.Duration, q float64) float64 {
	return times[int(q*float64(len(times)-1))].Seconds() * 1000
}

func median(of []float64) float64 {
	of = slices.Sorted(slices.Values(of))
	return of[len(of)/2]
}

// way is a way to take one token.
type way struct {
	name string
	call func() error
}

// ways returns the ways to take a token through a sidecar, and one with the SDK instead.
func ways(t testing.TB, redis *testenv.RedisServer) []way {
	t.Helper()
	createPlenty(t, redis.Client())
	d := openDoors(t, redis.URL())
	conn := d.dial(t, 1)[0]
	buckets, edge := refillerv1.NewBucketsClient(conn), rls.NewRateLimitServiceClient(conn)
	sdk, err := fetch.New(redis.Client())
	require.NoError(t, err)
	t.Cleanup(func() { _ = sdk.Close(context.Background()) })
	ctx := context.Background()
	client := manyConnections(t, 256)
	return []way{
		{"HTTP", func() error { return takeOverHTTP(client, d.url) }},
		{"gRPC", func() error {
			res, err := buckets.Take(ctx, &refillerv1.TakeRequest{Key: "plenty"})
			return unless(res.GetOk(), err)
		}},
		{"Envoy", func() error {
			res, err := edge.ShouldRateLimit(ctx, descriptors("plenty0"))
			return unless(res.GetOverallCode() == rls.RateLimitResponse_OK, err)
		}},
		{"SDK", func() error {
			res, err := sdk.Take(ctx, "plenty", 1)
			return unless(res.OK, err)
		}},
	}
}

func createPlenty(t testing.TB, rdb lua.Client) {
	t.Helper()
	terms := policy.Policy{Capacity: 1_000_000_000, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "plenty", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
}

// BenchmarkLatencyAtAThousandCallsPerSecond prints the latency of a call over each protocol of the sidecar, and with
// the SDK instead. The figures are medians of the rounds. They don't depend on the number of iterations.
func BenchmarkLatencyAtAThousandCallsPerSecond(t *testing.B) {
	all := ways(t, testenv.Redis(t))
	p50, p99 := make([][]float64, len(all)), make([][]float64, len(all))
	failed := make([]int, len(all))
	for range *rounds {
		for i, way := range all {
			_, _ = atRate(time.Second, way.call) // opens connections
			times, errs := atRate(10*time.Second, way.call)
			p50[i] = append(p50[i], quantile(times, .5))
			p99[i] = append(p99[i], quantile(times, .99))
			failed[i] += errs
		}
	}
	for i, way := range all {
		t.Logf("%-5s p50 %.2f ms, p99 %.2f ms (rounds: %.2f and %.2f); errors: want 0, got %d", way.name, median(p50[i]),
			median(p99[i]), p50[i], p99[i], failed[i])
		assert.Zero(t, failed[i], way.name)
	}
}

// manyDescriptors is the number of descriptors in one of Envoy's requests.
const manyDescriptors = 16

// BenchmarkLatencyOfManyDescriptors prints the latency of an Envoy request with sixteen descriptors. The round trip to
// Redis is 2 ms. The figures don't depend on the number of iterations.
func BenchmarkLatencyOfManyDescriptors(t *testing.B) {
	redis := testenv.Redis(t)
	far := testenv.Proxy(t, redis.Addr(), 1)
	require.NoError(t, far.Distance(2*time.Millisecond, 0))
	d := openDoors(t, "redis://"+far.Addr())
	edge := rls.NewRateLimitServiceClient(d.dial(t, 1)[0])
	keys := make([]string, manyDescriptors)
	for i := range keys {
		keys[i] = fmt.Sprintf("plenty%d", i)
	}
	var p50, p99 []float64
	for range *rounds {
		var times []time.Duration
		for range 1000 {
			began := time.Now()
			res, err := edge.ShouldRateLimit(t.Context(), descriptors(keys...))
			require.NoError(t, err)
			require.Equal(t, rls.RateLimitResponse_OK, res.GetOverallCode())
			times = append(times, time.Since(began))
		}
		slices.Sort(times)
		p50 = append(p50, quantile(times, .5))
		p99 = append(p99, quantile(times, .99))
	}
	t.Logf("%d descriptors, Redis 2 ms away: p50: want at most 6 ms, got %.2f ms; p99 %.2f ms (rounds: %.2f and %.2f)",
		manyDescriptors, median(p50), median(p99), p50, p99)
	assert.LessOrEqual(t, median(p50), 6.)
}
