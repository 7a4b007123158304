package sidecar

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// patience is the longest time that a test waits for an event.
const patience = 20 * time.Second

// bench has a Server and everything that it needs, including a separate Redis.
type bench struct {
	t      *testing.T
	redis  *testenv.RedisServer
	rdb    *redis.Client
	client *fetch.Client
	server *Server
	stop   func() error // ends Run and waits for it; once
}

// start runs a Server on loopback. change may modify its options.
func start(t *testing.T, change func(*Options, *bench)) *bench {
	t.Helper()
	b := &bench{t: t, redis: testenv.Redis(t)}
	b.rdb = b.redis.Client()
	client, err := fetch.New(b.rdb, fetch.WithTimeout(patience))
	require.NoError(t, err)
	b.client = client
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, client.Close(ctx))
	})
	opts := Options{
		Client: client, HTTP: []string{"127.0.0.1:0"}, GRPC: []string{"127.0.0.1:0"},
		Limits: DefaultLimits(), Drain: Drain{Timeout: patience},
	}
	if change != nil {
		change(&opts, b)
	}
	b.server, err = Listen(opts)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.server.Run(ctx) }()
	stopped := false
	b.stop = func() error {
		cancel()
		stopped = true
		return <-ended
	}
	t.Cleanup(func() {
		if !stopped {
			require.NoError(t, b.stop())
		}
	})
	return b
}

// hourly returns a policy with this capacity. A bucket gains one token an hour, so none during a test.
func hourly(capacity int64) policy.Policy {
	return policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
}

func createBucket(t testing.TB, rdb lua.Client, key string, p policy.Policy) {
	t.Helper()
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{})
	_, err := lua.Refill(context.Background(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
}

func (b *bench) bucket(key string, capacity int64) {
	b.t.Helper()
	createBucket(b.t, b.rdb, key, hourly(capacity))
}

// empty creates a bucket without tokens that gains one token in every per. Callers that wait form a queue, so the token
// of the nth caller is due after n times per. A wait that may not last that long ends at once.
func (b *bench) empty(key string, per time.Duration) {
	b.t.Helper()
	p := hourly(10)
	p.Rate.Per = per
	createBucket(b.t, b.rdb, key, p)
	_, err := lua.Reset(context.Background(), b.rdb, key, 0)
	require.NoError(b.t, err)
}

func (b *bench) tokens(key string) int64 {
	b.t.Helper()
	n, err := b.rdb.Get(context.Background(), key).Int64()
	require.NoError(b.t, err)
	return n
}

// tries returns Redis' line about the command of takes.
func (b *bench) tries() string {
	b.t.Helper()
	info, err := b.rdb.InfoMap(context.Background(), "commandstats").Result()
	require.NoError(b.t, err)
	return info["Commandstats"]["cmdstat_evalsha"]
}

// scriptCalls returns the number of calls in Redis' line about a command.
func scriptCalls(t testing.TB, line string) int {
	t.Helper()
	m := regexp.MustCompile(`calls=(\d+)`).FindStringSubmatch(line)
	require.NotNil(t, m, line)
	n, err := strconv.Atoi(m[1])
	require.NoError(t, err)
	return n
}

func (b *bench) url(path string) string { return "http://" + b.server.HTTPAddrs()[0].String() + path }

// reply is a reply over HTTP.
type reply struct {
	status int
	header http.Header
	body   []byte
	close  bool // the server closes the connection
}

// media returns the media type of the body. For a reply that a test has made, it is the type of most replies.
func (r reply) media() string {
	if r.header == nil {
		return "application/json"
	}
	return r.header.Get("Content-Type")
}

func (r reply) json(t testing.TB) map[string]any {
	t.Helper()
	var v map[string]any
	require.NoError(t, json.Unmarshal(r.body, &v), string(r.body))
	return v
}

// do sends a request on a connection of its own.
func (b *bench) do(method, path, body string, header ...string) reply {
	b.t.Helper()
	return send(b.t, http.DefaultClient, method, b.url(path), body, header...)
}

func send(t testing.TB, client *http.Client, method, url, body string, header ...string) reply {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, bytes.NewBufferString(body))
	require.NoError(t, err)
	if method == http.MethodPost {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := client.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return reply{res.StatusCode, res.Header, data, res.Close}
}

func (b *bench) post(path, body string) reply {
	b.t.Helper()
	return b.do(http.MethodPost, path, body)
}

// dial connects over gRPC; the connection is closed when the test ends.
func (b *bench) dial(opts ...grpc.DialOption) *grpc.ClientConn {
	b.t.Helper()
	if len(opts) == 0 {
		opts = append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))
	}
	return dialTo(b.t, b.server.GRPCAddrs()[0], opts...)
}

func dialTo(t testing.TB, addr net.Addr, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	target := "passthrough:///" + addr.String()
	if addr.Network() == "unix" {
		target = "unix:" + addr.String()
	}
	conn, err := grpc.NewClient(target, opts...)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// eventually waits until ok holds.
func eventually(t testing.TB, ok func() bool, what string) {
	t.Helper()
	require.Eventually(t, ok, patience, time.Millisecond, what)
}

// underWay waits until n calls are under way.
func (b *bench) underWay(n int) {
	b.t.Helper()
	eventually(b.t, func() bool {
		_, calls := b.server.turns.calls.Load()
		_, waits := b.server.turns.tokenWaits.Load()
		return calls+waits == n
	}, "calls under way")
}

// occupy runs a call until leave is called. No other call may run at the same time.
func (b *bench) occupy() (leave func()) {
	b.t.Helper()
	require.NoError(b.t, b.server.turns.calls.Enter(b.t.Context(), "another client", 1, 0))
	return func() { b.server.turns.calls.Leave("another client") }
}

// uncounted returns refusals that no registry exports.
func uncounted() *refusals { return newRefusals(metrics.New(nil), hclog.NewNullLogger()) }

// syncBuffer is a log that is written and read concurrently.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// counted returns the value of a registry's metric that has these labels. labels has names and values in turn.
func counted(t testing.TB, registry *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	var sum float64
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			has := make(map[string]string)
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			fits := true
			for i := 0; i+1 < len(labels); i += 2 {
				fits = fits && has[labels[i]] == labels[i+1]
			}
			if fits {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

func jsonBody(s string) io.Reader { return bytes.NewBufferString(s) }

const contextDeadline = deadlineError("the call's time is over")

// deadlineError is a context's error in the form that a call returns.
type deadlineError string

func (e deadlineError) Error() string { return string(e) }

func (e deadlineError) Is(target error) bool { return target == context.DeadlineExceeded }

// sendHalf sends half a request and returns the body of the reply. On a busy machine, even this half may come too late.
// Then the server closes the connection, and sendHalf tries again.
func sendHalf(t *testing.T, b *bench, path string) []byte {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		c, err := net.Dial("tcp", b.server.HTTPAddrs()[0].String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_, _ = io.WriteString(
			c, "POST "+path+" HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{\"key\":")
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil && time.Now().Before(end) {
			continue
		}
		require.NoError(t, err)
		defer res.Body.Close()
		require.Equal(t, http.StatusRequestTimeout, res.StatusCode)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return body
	}
}

// onPath sends a request about the bucket checkout to a path. If it settles or cancels a reservation, the id is
// "settled" or "cancelled".
func onPath(b *bench, path string) reply {
	b.t.Helper()
	if path == "/v1/check" {
		return b.do(http.MethodGet, path+"?limit=api&key=onpath", "")
	}
	if strings.HasSuffix(path, "/peek") {
		return b.do(http.MethodGet, real(path)+"?key=checkout", "")
	}
	body := `{"key":"checkout"}`
	switch path {
	case "/v1/limits/{limit}/undo":
		body = `{"key":"checkout","undo":"1-0"}`
	case "/v1/limits/{limit}/reserve":
		body = `{"key":"checkout","id":"a","at":"` + time.Now().Add(time.Hour).Format(time.RFC3339) + `"}`
	case "/v1/limits/{limit}/cancel":
		body = `{"key":"checkout","id":"b"}`
	case "/v1/take-all":
		body = `{"requests":[{"key":"checkout"}]}`
	case "/v1/reserve":
		body = `{"key":"checkout","ttl_ms":60000}`
	case "/v1/settle":
		body = `{"key":"checkout","id":"settled","used":1}`
	case "/v1/cancel":
		body = `{"key":"checkout","id":"cancelled"}`
	}
	return b.post(real(path), body)
}

// failing returns the reply to a call that fails with err.
func failing(t *testing.T, err error) reply {
	t.Helper()
	w := httptest.NewRecorder()
	httpapi.Fail(w, err, hclog.NewNullLogger())
	return reply{status: w.Code, header: w.Header(), body: w.Body.Bytes()}
}

// always returns a deadline that does not change.
func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// apiOf returns a handler that serves only HTTP, with the client.
func apiOf(client *fetch.Client) *httpapi.Handler {
	l := DefaultLimits()
	none := limits.Access{InForce: func() *limits.Set { return nil }, Deadline: always(patience)}
	return httpapi.New(httpapi.Config{
		Client: client, Limits: none, Body: l.Body, Wait: l.Wait, Patience: l.Patience, Logger: hclog.NewNullLogger(),
	})
}
