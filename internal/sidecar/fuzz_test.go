package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// fuzzed is a database with one bucket, "checkout", which has plenty of tokens.
type fuzzed struct {
	rdb    *redis.Client
	client *fetch.Client
}

const plenty = 1 << 30

func newFuzzed(f *testing.F) *fuzzed {
	f.Helper()
	z := &fuzzed{rdb: testenv.Redis(f).Client()}
	z.connect(f)
	f.Cleanup(func() { _ = z.client.Close(context.Background()) })
	createBucket(f, z.rdb, "checkout", hourly(plenty))
	return z
}

func (z *fuzzed) connect(t testing.TB) {
	t.Helper()
	client, err := fetch.New(z.rdb, fetch.WithTimeout(patience))
	require.NoError(t, err)
	z.client = client
}

// settle waits until tokens that were taken for callers that left have been returned.
func (z *fuzzed) settle(t testing.TB) {
	t.Helper()
	require.NoError(t, z.client.Close(t.Context()))
	z.connect(t)
}

// reset sets the bucket to half of its tokens.
func (z *fuzzed) reset(t *testing.T) {
	t.Helper()
	require.NoError(t, z.rdb.Set(t.Context(), "checkout", plenty/2, 0).Err())
}

// restart creates the bucket again. Its only reservation is "job", of 9 tokens.
func (z *fuzzed) restart(t testing.TB) {
	t.Helper()
	require.NoError(t, z.rdb.FlushDB(t.Context()).Err())
	createBucket(t, z.rdb, "checkout", hourly(plenty))
	_, err := lua.Reserve(t.Context(), z.rdb, "checkout", lua.ReserveCall{ID: "job", N: 9, TTL: time.Hour})
	require.NoError(t, err)
}

func (z *fuzzed) requireTokens(t *testing.T, want int64) {
	t.Helper()
	n, err := z.rdb.Get(t.Context(), "checkout").Int64()
	require.NoError(t, err)
	require.Equal(t, want, n)
	keys, err := z.rdb.DBSize(t.Context()).Result()
	require.NoError(t, err)
	require.EqualValues(t, 5, keys, "no key is created")
}

// A body is either a valid request, which has its effect, or it changes nothing.
func FuzzHTTP(f *testing.F) {
	z := newFuzzed(f)
	paths := []string{
		"/v1/take", "/v1/return", "/v1/wait", "/v1/peek", "/v1/other", "/v1/take-all", "/v1/reserve", "/v1/settle",
		"/v1/cancel",
	}
	for i, body := range []string{
		`{"key":"checkout"}`, `{"key":"checkout","tokens":7}`, `{"key":"checkout","tokens":1,"timeout_ms":5}`, `key=checkout`,
		``,
		`{"key":"checkout","tokens":1e3}`, `{"key":"checkout","tokens":-1}`, `{"key":null}`, `{"key":"}"}`,
		`{"key":"a","key":"checkout"}`,
		`{"KEY":"checkout"}`, `[]`, `{`, "{\"key\":\"\xff\"}", `{"key":"\ud800"}`, `{"key":"checkout"} {}`, `key=%zz&key=a`,
		strings.Repeat(`[`, 500), `{"key":"checkout","tokens":99999999999999999999}`,
	} {
		f.Add(uint8(i), []byte(body))
		f.Add(uint8(0), []byte(body))
	}
	for _, body := range []string{
		`{"requests":[{"key":"checkout"},{"key":"checkout","tokens":7}]}`, `{"requests":[{"key":"checkout"},{"key":"typo"}]}`,
		`{"requests":[]}`,
		`{"requests":[[[]]]}`, `{"requests":[{"requests":[{"key":"checkout"}]}]}`, `{"requests":[{"key":"checkout"},]}`,
		`{"requests":[null]}`,
	} {
		f.Add(uint8(5), []byte(body))
	}
	for _, body := range []string{
		`{"key":"checkout","ttl_ms":1000}`, `{"key":"checkout","tokens":7,"ttl_ms":3600000,"id":"a","overrun":"debt"}`,
		`{"key":"checkout","tokens":9,"ttl_ms":5,"id":"job"}`,
		`{"key":"checkout","tokens":8,"ttl_ms":5,"id":"job"}`, `{"key":"checkout","ttl_ms":1e300}`,
		`{"key":"checkout","ttl_ms":1,"id":""}`,
	} {
		f.Add(uint8(6), []byte(body))
	}
	for _, body := range []string{`{"key":"checkout","id":"job","used":4}`, `{"key":"checkout","id":"job","used":11}`,
		`{"key":"checkout","id":"job"}`, `{"key":"checkout","id":"job","used":-0}`} {
		f.Add(uint8(7), []byte(body))
		f.Add(uint8(8), []byte(body))
	}
	z.restart(f)
	h := apiOf(z.client)
	f.Fuzz(func(t *testing.T, which uint8, body []byte) {
		z.reset(t)
		path := paths[int(which)%len(paths)]
		r := httptest.NewRequest(http.MethodPost, path, bytes.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		if path == "/v1/peek" {
			r = httptest.NewRequest(http.MethodGet, path, nil)
			r.URL.RawQuery = string(body)
		}
		w := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
		h.ServeHTTP(w, r)
		var answer struct {
			OK                               bool
			Key, Code                        string
			Taken, Tokens, Returned, Charged int64
			Results                          []struct {
				Key   string
				Taken int64
			}
		}
		require.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer), w.Body.String())
		if w.Code != http.StatusOK {
			require.GreaterOrEqual(t, w.Code, 400)
			require.Less(t, w.Code, 500, w.Body.String())
			require.NotEmpty(t, answer.Code)
			z.requireTokens(t, plenty/2)
			return
		}
		if path == "/v1/wait" && !answer.OK { // the wait's time ended during a call of Redis
			z.settle(t)
			h = apiOf(z.client)
			z.requireTokens(t, plenty/2)
			return
		}
		switch path {
		case "/v1/take-all":
			for _, r := range answer.Results {
				require.Equal(t, "checkout", r.Key)
				answer.Taken += r.Taken
			}
		case "/v1/reserve":
			defer z.restart(t)
			if strings.Contains(w.Body.String(), `"id":"job"`) { // it was reserved before
				answer.Taken = 0
			}
		case "/v1/settle", "/v1/cancel":
			defer z.restart(t)
			fallthrough
		default:
			require.Equal(t, "checkout", answer.Key)
		}
		z.requireTokens(t, plenty/2-answer.Taken+answer.Tokens+answer.Returned-answer.Charged)
	})
}

// deadlineRecorder is a recorder whose write deadline a handler may set.
type deadlineRecorder struct{ *httptest.ResponseRecorder }

func (*deadlineRecorder) SetWriteDeadline(time.Time) error { return nil }

// FuzzShouldRateLimit sends every request that can be decoded to Envoy's service.
func FuzzShouldRateLimit(f *testing.F) {
	z := newFuzzed(f)
	limits, err := envoy.Parse(map[string][]byte{"f": []byte(`
domain: edge
descriptors:
  - {key: generic_key, value: checkout, rate_limit: {bucket: checkout}}
  - {key: user, rate_limit: {bucket: "user:{value}"}, descriptors: [{key: route, rate_limit: {bucket: "{descriptor}"}}]}
  - {key: free, rate_limit: {unlimited: true}}
  - {key: try, shadow_mode: true, rate_limit: {bucket: checkout}}
`)}, envoy.NewWindows(z.rdb, always(patience), envoy.WindowOptions{}))
	require.NoError(f, err)
	s := envoy.NewServer(limits, z.client, nil, hclog.NewNullLogger())
	for _, req := range []*rls.RateLimitRequest{
		request(0, of("generic_key", "checkout")), request(7, of("try", "x"), of("free", "")), request(1, of("user", "}{")),
		request(1, of("user", "x", "route", "y")), request(1), {Domain: "other"}, request(1, of()),
		request(1, hits(1<<63, of("free", "x"))),
	} {
		data, err := proto.Marshal(req)
		require.NoError(f, err)
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		req := new(rls.RateLimitRequest)
		if proto.Unmarshal(data, req) != nil {
			return // gRPC refuses it earlier
		}
		for _, d := range req.GetDescriptors() {
			d.Limit = nil // a limit in the request would make a window
			d.IsNegativeHits = false
		}
		z.reset(t)
		res, err := s.ShouldRateLimit(t.Context(), req)
		if err != nil {
			require.Contains(t, []codes.Code{codes.InvalidArgument, codes.NotFound}, status.Code(err), err.Error())
			n, err := z.rdb.Get(t.Context(), "checkout").Int64()
			require.NoError(t, err)
			require.LessOrEqual(t, n, int64(plenty/2))
			return
		}
		require.Len(t, res.GetStatuses(), len(req.GetDescriptors()))
		require.NotEqual(t, rls.RateLimitResponse_UNKNOWN, res.GetOverallCode())
		keys, err := z.rdb.DBSize(t.Context()).Result()
		require.NoError(t, err)
		require.EqualValues(t, 3, keys, "no key is created")
	})
}
