package languages

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

const (
	burstCalls       = 10_000
	burstConnections = 1000
)

// burst is a way to make the calls of a burst.
type burst struct {
	name   string
	atOnce int // number of calls at the same time
	open   func(t *testing.T, d doors) func(i int) (passed bool, err error)
}

var bursts = []burst{
	{"GET check", burstConnections, func(t *testing.T, d doors) func(int) (bool, error) {
		return pages(t, d.url+"/v1/check?limit=api&key=client")
	}},
	{"nginx", burstConnections, behind(proxies[0])},
	{"Caddy", burstConnections, behind(proxies[1])},
	{"Envoy", burstCalls, func(t *testing.T, d doors) func(int) (bool, error) {
		clients := make([]rls.RateLimitServiceClient, 8)
		for i, conn := range d.dial(t, len(clients)) {
			clients[i] = rls.NewRateLimitServiceClient(conn)
		}
		return func(i int) (bool, error) {
			res, err := clients[i%len(clients)].ShouldRateLimit(context.Background(), descriptors("remote_address"))
			return res.GetOverallCode() == rls.RateLimitResponse_OK, err
		}
	}},
}

// chosenBursts returns all bursts with -measure, and otherwise only the bursts through a proxy.
func chosenBursts() []burst {
	if *measure {
		return bursts
	}
	return slices.DeleteFunc(slices.Clone(bursts), func(b burst) bool { return b.name != "nginx" && b.name != "Caddy" })
}

// behind returns a function that opens the way through a proxy. Without -measure, the timeouts of the proxy are long
// enough for a busy machine.
func behind(p proxy) func(t *testing.T, d doors) func(int) (bool, error) {
	return func(t *testing.T, d doors) func(int) (bool, error) {
		var patient []string
		if !*measure {
			patient = []string{"timeout 1s", "timeout 60s", "timeout 3s", "timeout 60s"}
		}
		return pages(t, p.start(t, d.url, patient...))
	}
}

// TestBursts makes 10,000 calls at once, with a window limit of 500. All calls must be answered, and 500 admitted.
// Without -measure the sidecar has longer timeouts than by default, and only the bursts through a proxy are run:
// package sidecar tests the others.
func TestBursts(t *testing.T) {
	for _, b := range chosenBursts() {
		t.Run(b.name, func(t *testing.T) {
			var args []string
			if !*measure {
				args = []string{"--deadline", "10s", "--queue-wait", "1m"}
			}
			d := openDoors(t, testenv.Redis(t).URL(), args...)
			call := b.open(t, d)
			var admitted, failed atomic.Int64
			var calling sync.WaitGroup
			began := time.Now()
			for i := range b.atOnce {
				calling.Go(func() {
					for range burstCalls / b.atOnce {
						passed, err := call(i)
						if err != nil && failed.Add(1) == 1 {
							t.Errorf("the first error: %v", err)
						}
						if passed {
							admitted.Add(1)
						}
					}
				})
			}
			calling.Wait()
			memory, most := peakMemory(t, d.process.Pid()), chartMemory(t)
			t.Logf("%d calls, %d at once, in %.1f s; errors: want 0, got %d; admitted: want %d, got %d; "+
				"memory: want at most %d MiB, got %d MiB", burstCalls, b.atOnce, time.Since(began).Seconds(), failed.Load(),
				windowLimit, admitted.Load(), most.limit, memory)
			assert.EqualValues(t, windowLimit, admitted.Load())
			assert.LessOrEqual(t, memory, most.limit)
		})
	}
}

// pages returns calls for a page, over many connections.
func pages(t *testing.T, url string) func(int) (bool, error) {
	t.Helper()
	client := manyConnections(t, burstConnections)
	return func(int) (bool, error) {
		res, err := client.Get(url)
		if err != nil {
			return false, err
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		if err == nil && res.StatusCode != http.StatusOK && res.StatusCode != http.StatusTooManyRequests {
			err = fmt.Errorf("status %s: %s", res.Status, text)
		}
		return res.StatusCode == http.StatusOK, err
	}
}

func manyConnections(t testing.TB, n int) *http.Client {
	t.Helper()
	transport := &http.Transport{MaxConnsPerHost: n, MaxIdleConnsPerHost: n}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// memory has the memory limits of a sidecar in the Helm chart.
type memory struct {
	limit   int    // limit of the container, in MiB
	goLimit string // GOMEMLIMIT
}

func chartMemory(t testing.TB) memory {
	t.Helper()
	text, err := os.ReadFile("../../deploy/helm/refiller/values.yaml")
	require.NoError(t, err)
	var values struct {
		Sidecar struct {
			Resources   struct{ Limits struct{ Memory string } }
			MemoryLimit string `yaml:"memoryLimit"`
		}
	}
	require.NoError(t, yaml.Unmarshal(text, &values))
	mib, found := strings.CutSuffix(values.Sidecar.Resources.Limits.Memory, "Mi")
	require.True(t, found)
	limit, err := strconv.Atoi(mib)
	require.NoError(t, err)
	return memory{limit, values.Sidecar.MemoryLimit}
}

// peakMemory returns the largest resident memory that a process has had, in MiB. It is 0 on systems without /proc.
func peakMemory(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if os.IsNotExist(err) {
		return 0
	}
	require.NoError(t, err)
	m := regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(t, m)
	kib, err := strconv.Atoi(string(m[1]))
	require.NoError(t, err)
	return kib / 1024
}
