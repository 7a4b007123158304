package sidecar

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
)

// leaveSocket closes a listener but leaves its socket, as a killed process does.
func leaveSocket(t *testing.T, ln net.Listener) {
	t.Helper()
	inner, ok := ln.(*listener).Listener.(*net.UnixListener)
	require.True(t, ok)
	inner.SetUnlinkOnClose(false)
	require.NoError(t, inner.Close())
}

func unixClient(t testing.TB, path string) *http.Client {
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// from returns a client at another loopback address, which is another client to the server.
func from(t testing.TB, ip string) *http.Client {
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(ip)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// waitFor waits for a token that does not come, until ctx ends.
func waitFor(ctx context.Context, t *testing.T, client *http.Client, url, key string) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(`{"key":"`+key+`"}`))
	if err != nil {
		t.Error(err)
		return
	}
	req.Header.Set("Content-Type", "application/json")
	if res, err := client.Do(req); err == nil {
		_ = res.Body.Close()
	}
}

func TestAClientWithTooManyWaitsIsRefusedMoreOfThemAndNothingElse(t *testing.T) {
	t.Parallel()
	const most = 4 // of one client
	b := start(t, func(o *Options, _ *bench) { o.Limits.TokenWaits, o.Limits.Wait = 2*most, time.Hour })
	b.empty("empty", 10*time.Minute) // with four waiters, the last one waits for 40 minutes
	b.bucket("checkout", 10)

	ctx, cancel := context.WithCancel(t.Context())
	greedy := from(t, "127.0.0.2")
	var waiting sync.WaitGroup
	for range most {
		waiting.Go(func() { waitFor(ctx, t, greedy, b.url("/v1/wait"), "empty") })
	}
	b.underWay(most)

	r := send(t, greedy, http.MethodPost, b.url("/v1/wait"), `{"key":"empty"}`)
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "busy", r.json(t)["code"])
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, send(t, greedy, http.MethodGet, b.url("/readyz"), "").status)
	require.Equal(t, http.StatusOK, send(t, greedy, http.MethodPost, b.url("/v1/take"), `{"key":"checkout"}`).status)

	other := from(t, "127.0.0.3")
	require.Equal(t, http.StatusOK, send(t, other, http.MethodPost, b.url("/v1/wait"), `{"key":"checkout"}`).status)
	_, err := refillerv1.NewBucketsClient(b.dial()).Wait(t.Context(), &refillerv1.WaitRequest{Key: "checkout"})
	require.NoError(t, err)
	require.EqualValues(t, 7, b.tokens("checkout"))

	cancel()
	waiting.Wait()
	b.underWay(0)
	require.Equal(t, http.StatusOK, send(t, greedy, http.MethodPost, b.url("/v1/wait"), `{"key":"checkout"}`).status)
}

// The address of the last hop is often that of one proxy for all users, so it doesn't name a client.
func TestEachKeyOfAProxysChecksIsAClient(t *testing.T) {
	t.Parallel()
	var set *limits.Set
	start(t, func(_ *Options, b *bench) {
		set = b.named(`limits:
  - {name: queue, pacing: {rate: 1/h, max_wait: 10h}}
  - {name: teams, bucket: {prefix: "team:"}}
`)
	})
	h := httpapi.New(httpapi.Config{
		Limits: limits.Access{InForce: func() *limits.Set { return set }}, Logger: hclog.NewNullLogger(),
	})
	asked := func(query, user string) (got call.Asks) {
		turn := func(_ context.Context, a call.Asks) error {
			got = a
			return call.ErrBusy
		}
		r := httptest.NewRequestWithContext(call.WithTurn(t.Context(), turn), http.MethodGet, "/v1/check?"+query, nil)
		r.Header.Set("X-User", user)
		r.Header.Set("X-Forwarded-For", "203.0.113."+user+", 10.0.0.1")
		h.ServeHTTP(httptest.NewRecorder(), r)
		return got
	}
	for _, query := range []string{
		"limit=queue&by=header:X-User", "limit=queue&by=ip&trusted=10.0.0.0/8", "limit=teams&key=all&flow_by=header:X-User",
	} {
		one := asked(query, "1")
		require.Equal(t, strings.HasPrefix(query, "limit=queue"), one.MayWait, query)
		require.Equal(t, clientOf(localOrigin, one), clientOf(localOrigin, asked(query, "1")), query)
		require.NotEqual(t, clientOf(localOrigin, one), clientOf(localOrigin, asked(query, "2")), query)
	}
	require.NotEqual(t, asked("limit=queue&key=a", "1"), asked("limit=teams&key=a", "1"))
	require.Equal(t, asked("limit=queue&key=a", "1").Key, asked("key=a&limit=queue", "2").Key)
}

func TestWaitsOverGRPCAndHTTPCountTogetherAndHealthIsExempt(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) { o.Limits.TokenWaits, o.Limits.Wait = 1, time.Hour })
	b.empty("empty", 10*time.Minute)
	buckets := refillerv1.NewBucketsClient(b.dial())
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := buckets.Wait(ctx, &refillerv1.WaitRequest{Key: "empty"})
		ended <- err
	}()
	b.underWay(1)
	require.Equal(t, http.StatusServiceUnavailable, b.post("/v1/wait", `{"key":"empty"}`).status)
	_, err := buckets.Wait(t.Context(), &refillerv1.WaitRequest{Key: "empty"})
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	cancel()
	require.Equal(t, codes.Canceled, status.Code(<-ended))
	b.underWay(0)
}

func TestHealthWatchesLeaveCallsTheirTurn(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) { o.Limits.Calls, o.Limits.ClientCalls = 1, 1 })
	b.bucket("checkout", 10)
	conn := b.dial()
	health := healthpb.NewHealthClient(conn)
	for range 100 {
		watch, err := health.Watch(t.Context(), &healthpb.HealthCheckRequest{})
		require.NoError(t, err)
		_, err = watch.Recv()
		require.NoError(t, err)
	}
	_, err := refillerv1.NewBucketsClient(conn).Take(t.Context(), &refillerv1.TakeRequest{Key: "checkout"})
	require.NoError(t, err)

	leave := b.occupy()
	res, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err, "a busy server is healthy")
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, res.Status)
	leave()
}

func TestACallQueuesForItsTurnUntilItsDeadlineOrTheQueuesWait(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	var log syncBuffer
	b := start(t, func(o *Options, _ *bench) {
		o.Limits.Calls, o.Limits.ClientCalls = 1, 1
		o.Limits.QueueWait = 50 * time.Millisecond
		o.Registry = registry
		o.Logger = hclog.New(&hclog.LoggerOptions{Output: &log})
	})
	b.bucket("checkout", 10)
	buckets := refillerv1.NewBucketsClient(b.dial())
	leave := b.occupy()
	for range 2 {
		r := b.post("/v1/take", `{"key":"checkout"}`)
		require.Equal(t, http.StatusServiceUnavailable, r.status)
		require.Equal(t, "busy", r.json(t)["code"])
	}
	_, err := buckets.Take(t.Context(), &refillerv1.TakeRequest{Key: "checkout"})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Equal(t, 3.0, counted(t, registry, "refiller_sidecar_refused_total", "reason", "queue_wait"))
	require.Equal(t, 1, strings.Count(log.String(), "beyond the sidecar's bounds"), "refusals are logged once")

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = buckets.Take(ctx, &refillerv1.TakeRequest{Key: "checkout"})
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	b.underWay(1) // the server detects it a little later

	within, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := buckets.Take(within, &refillerv1.TakeRequest{Key: "checkout"})
		ended <- err
	}()
	eventually(t, func() bool {
		_, calls := b.server.turns.calls.Load()
		return calls == 2
	}, "the call is in the queue")
	leave()
	require.NoError(t, <-ended, "the call waits in the queue until its own deadline")
	require.EqualValues(t, 9, b.tokens("checkout"), "a refused call does nothing")
}

func TestAClientWithTooManyConnectionsIsRefusedAndOthersAreNot(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) { o.Limits.Connections = 3 })
	b.bucket("checkout", 3)
	address := b.server.HTTPAddrs()[0].String()
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.2")}}
	var held []net.Conn
	for range 3 {
		c, err := dialer.Dial("tcp", address)
		require.NoError(t, err)
		defer c.Close()
		held = append(held, c)
	}
	for _, c := range held {
		require.Equal(t, http.StatusOK, rawProbe(t, c), "the first three connections are served")
	}
	extra, err := dialer.Dial("tcp", address)
	require.NoError(t, err)
	defer extra.Close()
	require.NoError(t, extra.SetReadDeadline(time.Now().Add(patience)))
	_, err = extra.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF, "a fourth connection is closed")
	require.Equal(t, http.StatusOK, b.post("/v1/take", `{"key":"checkout"}`).status, "other clients can connect")

	require.NoError(t, held[0].Close())
	eventually(t, func() bool {
		c, err := dialer.Dial("tcp", address)
		if err != nil {
			return false
		}
		defer c.Close()
		_, err = fmt.Fprint(c, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
		if err != nil {
			return false
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		line, err := bufio.NewReader(c).ReadString('\n')
		return err == nil && strings.Contains(line, "200")
	}, "a closed connection makes room")
}

// rawProbe requests /livez on a connection and leaves the connection open.
func rawProbe(t *testing.T, c net.Conn) int {
	t.Helper()
	_, err := fmt.Fprint(c, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
	require.NoError(t, err)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	require.NoError(t, err)
	return res.StatusCode
}

func TestASlowClientIsCutOff(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) {
		o.Limits.Patience = 300 * time.Millisecond
		o.Limits.Wait = time.Millisecond
	})
	b.bucket("checkout", 3)
	for name, sent := range map[string]string{
		"nothing":       "",
		"half a header": "POST /v1/take HTTP/1.1\r\nHost: localhost\r\nContent-",
	} {
		c, err := net.Dial("tcp", b.server.HTTPAddrs()[0].String())
		require.NoError(t, err)
		defer c.Close()
		_, err = io.WriteString(c, sent)
		require.NoError(t, err)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		_, err = io.ReadAll(c)
		require.NoError(t, err, "%s: the server closes the connection", name)
	}
	require.Contains(t, string(sendHalf(t, b, "/v1/take")), "slow_request")
	require.EqualValues(t, 3, b.tokens("checkout"))
	b.underWay(0)
}

func TestAGRPCCallWhoseRequestNeverArrivesEnds(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) {
		o.Limits.Patience = time.Second
		o.Limits.Wait = time.Millisecond
	})
	c, err := net.Dial("tcp", b.server.GRPCAddrs()[0].String())
	require.NoError(t, err)
	defer c.Close()
	_, err = io.WriteString(c, http2.ClientPreface)
	require.NoError(t, err)
	framer := http2.NewFramer(c, c)
	require.NoError(t, framer.WriteSettings())
	var block strings.Builder
	enc := hpack.NewEncoder(&block)
	for _, f := range [][2]string{
		{":method", "POST"}, {":scheme", "http"}, {":path", "/refiller.v1.Buckets/Take"}, {":authority", "x"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
	} {
		require.NoError(t, enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
	}
	require.NoError(t, framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte(block.String()),
		EndHeaders: true}))
	require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
	for {
		f, err := framer.ReadFrame()
		require.NoError(t, err)
		if f.Header().StreamID == 1 {
			break // the server answers on the stream by itself
		}
	}
}

func TestOnlyCallsWithoutAnEndOfTheirOwnAreUnbounded(t *testing.T) {
	t.Parallel()
	g := &gate{longest: time.Minute}
	for method, bound := range map[string]bool{
		"/refiller.v1.Buckets/Take": true, "/refiller.v1.Buckets/Wait": true,
		"/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit": true,
		"/grpc.health.v1.Health/Watch":                                 false,
		"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo":    false,
	} {
		ctx, err := g.tap(t.Context(), &tap.Info{FullMethodName: method})
		require.NoError(t, err)
		_, has := ctx.Deadline()
		require.Equal(t, bound, has, method)
	}
}
