package sidecar

import (
	"context"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

const (
	burstCalls = 10_000
	burstLimit = 500 // of the window
)

// burst makes many calls concurrently. It requires that none fails, and that exactly as many pass as the window allows.
func burst(t *testing.T, atOnce, each int, call func(i int) (passed bool, err error)) {
	t.Helper()
	var admitted, denied, failed atomic.Int64
	var first atomic.Pointer[error]
	var calling sync.WaitGroup
	began := time.Now()
	for i := range atOnce {
		calling.Go(func() {
			for range each {
				passed, err := call(i)
				switch {
				case err != nil:
					failed.Add(1)
					first.CompareAndSwap(nil, &err)
				case passed:
					admitted.Add(1)
				default:
					denied.Add(1)
				}
			}
		})
	}
	calling.Wait()
	t.Logf("%d calls, %d at once: %d admitted, %d denied, %d failed in %s", atOnce*each, atOnce, admitted.Load(),
		denied.Load(), failed.Load(), time.Since(began).Round(time.Millisecond))
	if err := first.Load(); err != nil {
		require.NoError(t, *err)
	}
	require.EqualValues(t, burstLimit, admitted.Load())
	require.EqualValues(t, atOnce*each-burstLimit, denied.Load())
}

// A proxy sends the calls of all its clients over many connections from one address.
func TestAProxysBurstIsServedWithoutAnErrorAndWithinTheWindow(t *testing.T) {
	b := start(t, func(o *Options, b *bench) {
		o.Named = b.named("limits: [{name: burst, window: {limit: 500, length: 1h}}]")
		o.Deadline = patience
		o.Limits.QueueWait = o.Limits.Patience
	})
	const connections = 1000
	transport := &http.Transport{MaxConnsPerHost: connections, MaxIdleConnsPerHost: connections}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}
	burst(t, connections, burstCalls/connections, func(int) (bool, error) {
		status, err := get(client, b.url("/v1/check?limit=burst&by=ip"), "192.0.2.1")
		if err == nil && status != http.StatusOK && status != http.StatusTooManyRequests {
			err = &unexpectedStatus{status}
		}
		return status == http.StatusOK, err
	})
}

type unexpectedStatus struct{ status int }

func (e *unexpectedStatus) Error() string { return "status " + http.StatusText(e.status) }

// get requests a URL as a proxy does for a client with the address.
func get(client *http.Client, url, address string) (int, error) {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("X-Forwarded-For", address)
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

func TestEnvoysBurstIsServedWithoutAnErrorAndWithinTheWindow(t *testing.T) {
	const file = "domain: edge\n" +
		"descriptors: [{key: remote_address, rate_limit: {unit: hour, requests_per_unit: 500}}]\n"
	b := start(t, func(o *Options, b *bench) {
		var err error
		o.Envoy, err = envoy.Parse(map[string][]byte{"burst.yaml": []byte(file)},
			envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions()))
		require.NoError(t, err)
		o.Limits.QueueWait = o.Limits.Patience
	})
	clients := make([]rls.RateLimitServiceClient, 8)
	for i := range clients {
		clients[i] = rls.NewRateLimitServiceClient(b.dial())
	}
	burst(t, burstCalls, 1, func(i int) (bool, error) {
		res, err := clients[i%len(clients)].ShouldRateLimit(context.Background(),
			request(0, of("remote_address", "192.0.2.1")))
		return res.GetOverallCode() == codeOK, err
	})
}
