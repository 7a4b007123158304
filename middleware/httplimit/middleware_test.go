package httplimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

var hello = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })

// minutely admits n requests a minute.
func minutely(t testing.TB, n int64) *window.Limiter {
	t.Helper()
	now := time.Unix(1_800_000_000, 0)
	l, err := window.NewLocal(window.Config{Limit: n, Window: time.Minute}, func() time.Time { return now })
	require.NoError(t, err)
	return l
}

func middleware(t testing.TB, cfg Config) *Middleware {
	t.Helper()
	if cfg.Key == nil {
		cfg.Key = ByIP()
	}
	m, err := New(cfg)
	require.NoError(t, err)
	m.now = func() time.Time { return time.Unix(1_800_000_000, 0) }
	return m
}

type edit func(*http.Request)

func from(addr string) edit { return func(r *http.Request) { r.RemoteAddr = addr } }
func header(name, value string) edit {
	return func(r *http.Request) { r.Header.Add(name, value) }
}

func get(h http.Handler, path string, edits ...edit) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodGet, path, nil)
	for _, e := range edits {
		e(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func TestADeniedRequestGetsTheDraftsHeadersAndProblem(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: minutely(t, 2), Name: `a "b"`, XHeaders: true,
		Message: "slow down, please"}).Wrap(hello)
	w := get(h, "/")
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, `"a \"b\"";q=2;w=60`, w.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"a \"b\"";r=1;t=60`, w.Header().Get("RateLimit"))
	require.Equal(t, []string{"2", "1", "1800000060"},
		[]string{w.Header().Get("X-RateLimit-Limit"), w.Header().Get("X-RateLimit-Remaining"),
			w.Header().Get("X-RateLimit-Reset")})
	require.Empty(t, w.Header().Get("Retry-After"))
	get(h, "/")
	w = get(h, "/")
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, `"a \"b\"";r=0;t=60`, w.Header().Get("RateLimit"))
	require.Equal(t, "60", w.Header().Get("Retry-After"))
	require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"))
	var p map[string]any
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &p))
	require.Equal(t, map[string]any{"type": quotaExceeded,
		"title":  "Request cannot be satisfied as assigned quota has been exceeded",
		"status": 429.0, "detail": "slow down, please", "violated-policies": []any{`a "b"`}}, p)
}

// In the header, t is the time until more tokens are available, as the draft requires, and not the time until all are.
func TestAnAdmittedRequestGetsTheTimeOfMoreTokens(t *testing.T) {
	t.Parallel()
	clock := func() time.Time { return time.UnixMilli(1_800_000_000_500) }
	perSecond, err := lazy.NewLocal(lazy.Config{Capacity: 60, Rate: policy.PerSecond(1)}, clock)
	require.NoError(t, err)
	sliding, err := window.NewLocal(window.Config{Kind: window.Sliding, Limit: 60, Window: time.Minute}, clock)
	require.NoError(t, err)
	bucket, err := fetch.New(testenv.Redis(t).Client(), fetch.WithTimeout(20*time.Second), fetch.WithTemplates(
		policy.Template{
			Prefix: "ip:", Enforce: policy.EnforceLazy, Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(1)},
		}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, bucket.Close(context.Background())) })
	for name, c := range map[string]struct {
		limiter limit.Limiter
		want    string
	}{
		"lazy":    {perSecond, `"default";r=0;t=1`},
		"sliding": {sliding, `"default";r=0;t=66`}, // its slot of six seconds has just begun, and contains all takes
		"bucket":  {bucket, `"default";r=0;t=1`},
	} {
		h := middleware(t, Config{Limiter: c.limiter, Weight: func(*http.Request) int64 { return 60 }}).Wrap(hello)
		w := get(h, "/")
		require.Equal(t, http.StatusOK, w.Code, name)
		require.Equal(t, c.want, w.Header().Get("RateLimit"), name)
	}
}

func TestRetryAfterIsNeverEarlierThanTheWindowsEndAndJitters(t *testing.T) {
	t.Parallel()
	m := middleware(t, Config{Limiter: minutely(t, 1), Jitter: 10 * time.Second})
	h := m.Wrap(hello)
	get(h, "/")
	for draw, want := range map[int64]string{0: "60", 10: "70"} {
		m.random = func(n int64) int64 {
			require.EqualValues(t, 11, n)
			return draw
		}
		require.Equal(t, want, get(h, "/").Header().Get("Retry-After"))
	}
}

func TestManyLimitsShowAllAndNameWhoSaidNo(t *testing.T) {
	t.Parallel()
	many, err := limit.NewMany(testenv.Redis(t).Client(),
		lazy.Config{Name: "burst", Capacity: 2, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
		window.Config{Name: "daily", Limit: 100, Window: 24 * time.Hour})
	require.NoError(t, err)
	type wrapped struct{ *limit.Many } // a program may add methods to a Many in this way
	h := middleware(t, Config{Limiter: wrapped{many}, Timeout: 20 * time.Second}).Wrap(hello)
	for range 2 {
		require.Equal(t, http.StatusOK, get(h, "/").Code)
	}
	w := get(middleware(t, Config{Limiter: many, Timeout: 20 * time.Second}).Wrap(hello), "/")
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, get(h, "/").Header().Get("RateLimit-Policy"), w.Header().Get("RateLimit-Policy"))
	require.Equal(t, `"burst";q=2;w=7200, "daily";q=100;w=86400`, w.Header().Get("RateLimit-Policy"))
	require.Regexp(t, `^"burst";r=0;t=3600, "daily";r=98;t=86\d\d\d$`, w.Header().Get("RateLimit"))
	require.Contains(t, w.Body.String(), `"violated-policies":["burst"]`)
}

func TestASpoofedForwardedForIsNoWayAroundALimit(t *testing.T) {
	t.Parallel()
	trusted := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	for name, c := range map[string]struct {
		peer    string
		headers []string
		want    string
	}{
		"no proxy":                       {"203.0.113.7:1", nil, "203.0.113.7"},
		"an untrusted client":            {"203.0.113.7:1", []string{"1.2.3.4"}, "203.0.113.7"},
		"a proxy":                        {"10.0.0.1:1", []string{"203.0.113.7"}, "203.0.113.7"},
		"a proxy behind another":         {"10.0.0.1:1", []string{"203.0.113.7, 10.0.0.2"}, "203.0.113.7"},
		"an invented hop":                {"10.0.0.1:1", []string{"1.2.3.4, 203.0.113.7"}, "203.0.113.7"},
		"an invented hop and header":     {"10.0.0.1:1", []string{"1.2.3.4", "203.0.113.7, 10.0.0.2"}, "203.0.113.7"},
		"an invented proxy":              {"10.0.0.1:1", []string{"1.2.3.4, 10.9.9.9, 203.0.113.7"}, "203.0.113.7"},
		"rubbish before the client":      {"10.0.0.1:1", []string{"rubbish, 203.0.113.7"}, "203.0.113.7"},
		"rubbish in place of the client": {"10.0.0.1:1", []string{"1.2.3.4, rubbish"}, "10.0.0.1"},
		"a proxy without the header":     {"10.0.0.1:1", nil, "10.0.0.1"},
		"only proxies":                   {"10.0.0.1:1", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		"an ipv4 address in ipv6":        {"[::ffff:10.0.0.1]:1", []string{"::ffff:203.0.113.7"}, "203.0.113.7"},
		"an ipv6 proxy and client":       {"[fd00::1]:1", []string{"[2001:db8::7]:99"}, "2001:db8::7"},
		"a zone":                         {"[2001:db8::7%eth0]:1", nil, "2001:db8::7"},
		"a hop with a port":              {"10.0.0.1:1", []string{"203.0.113.7:555"}, "203.0.113.7"},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = c.peer
		for _, v := range c.headers {
			r.Header.Add("X-Forwarded-For", v)
		}
		require.Equal(t, c.want, clientIP(r, trusted).String(), name)
	}

	h := middleware(t, Config{Limiter: minutely(t, 1), TrustedProxies: trusted}).Wrap(hello)
	require.Equal(t, http.StatusOK, get(h, "/", from("203.0.113.7:1")).Code)
	for i := range 20 {
		spoof := fmt.Sprintf("1.2.3.%d", i)
		require.Equal(t, http.StatusTooManyRequests,
			get(h, "/", from("203.0.113.7:1"), header("X-Forwarded-For", spoof)).Code)
		require.Equal(t, http.StatusTooManyRequests,
			get(h, "/", from("10.0.0.1:1"), header("X-Forwarded-For", spoof+", 203.0.113.7")).Code)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	type ctxUser struct{}
	user := ByUser(func(r *http.Request) string {
		s, _ := r.Context().Value(ctxUser{}).(string)
		return s
	})
	key := func(f KeyFunc, ip string, edits ...edit) (string, error) {
		r := httptest.NewRequest(http.MethodGet, "/a/b", nil)
		for _, e := range edits {
			e(r)
		}
		addr, _ := netip.ParseAddr(ip)
		return f(Request{r, addr})
	}
	as := func(name string) edit {
		return func(r *http.Request) { *r = *r.WithContext(context.WithValue(r.Context(), ctxUser{}, name)) }
	}
	pattern := func(r *http.Request) { r.Pattern = "GET /a/{id}" }
	for _, c := range []struct {
		f     KeyFunc
		ip    string
		edits []edit
		want  string
	}{
		{ByIP(), "203.0.113.7", nil, "ip:203.0.113.7"},
		{ByIP(), "2001:db8::7", nil, "ip:2001:db8::/64"},
		{ByIP(), "2001:db8::ffff:7", nil, "ip:2001:db8::/64"},
		{ByHeader("X-Key"), "", []edit{header("X-Key", "a|b}")}, "header:x-key:a%7Cb%7D"},
		{ByHeader("X-User"), "", []edit{header("X-User", "42")}, "header:x-user:42"},
		{user, "", []edit{as("eve")}, "user:eve"},
		{ByRoute(), "", nil, "route:"},
		{ByRoute(), "", []edit{pattern}, "route:GET+%2Fa%2F%7Bid%7D"},
		{Join(user, ByRoute()), "", []edit{as("eve"), pattern}, "user:eve|route:GET+%2Fa%2F%7Bid%7D"},
		{FirstOf(user, ByIP()), "203.0.113.7", nil, "ip:203.0.113.7"},
		{FirstOf(user, ByIP()), "203.0.113.7", []edit{as("eve")}, "user:eve"},
	} {
		got, err := key(c.f, c.ip, c.edits...)
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	for _, f := range []KeyFunc{ByIP(), ByHeader("X-Key"), user, Join(ByRoute(), user), FirstOf(user, ByIP()), FirstOf()} {
		_, err := key(f, "")
		require.ErrorIs(t, err, ErrNoKey)
	}
}

func TestARequestWithoutAKeyIsRefused(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: minutely(t, 1), Key: ByHeader("X-Key"), FailOpen: true}).Wrap(hello)
	require.Equal(t, http.StatusBadRequest, get(h, "/").Code)
	require.Equal(t, http.StatusOK, get(h, "/", header("X-Key", strings.Repeat("k}", 5000))).Code, "a huge key is hashed")
	require.Equal(t, http.StatusTooManyRequests, get(h, "/", header("X-Key", strings.Repeat("k}", 5000))).Code)
}

// A key that is too long for a bucket's name keeps its beginning, so that its template still matches. Otherwise the
// bucket would be unknown, and the request would pass with FailOpen.
func TestALongKeyIsStillItsTemplates(t *testing.T) {
	t.Parallel()
	c, err := fetch.New(testenv.Redis(t).Client(), fetch.WithTimeout(20*time.Second), fetch.WithTemplates(policy.Template{
		Prefix: "header:", Enforce: policy.EnforceLazy,
		Policy: policy.Policy{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
	}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
	h := middleware(t, Config{Limiter: c, Key: ByHeader("X-Key"), FailOpen: true, Timeout: time.Minute}).Wrap(hello)
	long := header("X-Key", strings.Repeat("k", 5000))
	require.Equal(t, http.StatusOK, get(h, "/", long).Code)
	require.Equal(t, http.StatusTooManyRequests, get(h, "/", long).Code)
}

func TestAllowedNetworksTakeNoTokens(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: minutely(t, 1),
		Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}).Wrap(hello)
	for range 5 {
		require.Equal(t, http.StatusOK, get(h, "/", from("192.0.2.9:1")).Code)
	}
	require.Equal(t, http.StatusOK, get(h, "/", from("203.0.113.7:1")).Code)
	require.Equal(t, http.StatusTooManyRequests,
		get(h, "/", from("203.0.113.7:1"), header("X-Forwarded-For", "192.0.2.9")).Code)
}

func TestWeightsAndTheResultInTheContext(t *testing.T) {
	t.Parallel()
	weight := int64(3)
	var seen []Decision
	h := middleware(t, Config{Limiter: minutely(t, 5),
		Weight: func(*http.Request) int64 { return weight }}).Wrap(http.HandlerFunc(func(_ http.ResponseWriter,
		r *http.Request) {
		d, _ := FromContext(r.Context())
		seen = append(seen, d)
	}))
	require.Equal(t, http.StatusOK, get(h, "/").Code)
	require.Equal(t, http.StatusTooManyRequests, get(h, "/").Code)
	weight = 2
	require.Equal(t, http.StatusOK, get(h, "/").Code)
	weight = 0
	require.Equal(t, http.StatusOK, get(h, "/").Code, "a request with weight 0 passes")
	weight = -1
	require.Equal(t, http.StatusBadRequest, get(h, "/").Code)
	weight = 6
	require.Equal(t, http.StatusUnprocessableEntity, get(h, "/").Code, "the weight exceeds the limit")
	require.Len(t, seen, 3)
	require.EqualValues(t, 2, seen[0].Remaining)
	require.EqualValues(t, 3, seen[0].Weight)
	require.Equal(t, "ip:192.0.2.1", seen[0].Key)
	require.EqualValues(t, 0, seen[1].Remaining)
	require.Zero(t, seen[2])
}

func TestSlowDownGrowsWithEachRequestAndEndsWithTheClient(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := middleware(t, Config{Limiter: minutely(t, 10),
			SlowDown: SlowDown{After: 2, Step: 100 * time.Millisecond, Max: 250 * time.Millisecond}}).Wrap(hello)
		for _, want := range []time.Duration{0, 0, 100, 200, 250, 250} {
			start := time.Now()
			require.Equal(t, http.StatusOK, get(h, "/").Code)
			require.Equal(t, want*time.Millisecond, time.Since(start))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		start := time.Now()
		w := get(h, "/", func(r *http.Request) { *r = *r.WithContext(ctx) })
		require.Equal(t, time.Millisecond, time.Since(start))
		require.Equal(t, http.StatusServiceUnavailable, w.Code, "the handler doesn't run")
		require.Contains(t, get(h, "/").Header().Get("RateLimit"), "r=3", "the token is back")
	})
}

// A limit of pacing, alone or in a Many, spaces requests out. A request may wait for its place for longer than the
// Timeout.
func TestARequestWaitsForItsPlace(t *testing.T) {
	t.Parallel()
	spaced := pacing.Config{Name: "spaced", Rate: policy.PerSecond(2), MaxWait: time.Second}
	for name, limiter := range map[string]func() (limit.Limiter, error){
		"many": func() (limit.Limiter, error) {
			return limit.NewManyLocal(time.Now, window.Config{Name: "hourly", Limit: 100, Window: time.Hour}, spaced)
		},
		"alone": func() (limit.Limiter, error) { return pacing.NewLocal(spaced, time.Now) },
	} {
		synctest.Test(t, func(t *testing.T) {
			l, err := limiter()
			require.NoError(t, err)
			h := middleware(t, Config{Limiter: l}).Wrap(hello)
			start := time.Now()
			var together sync.WaitGroup
			var denied atomic.Int64
			for range 4 {
				together.Go(func() {
					if get(h, "/").Code == http.StatusTooManyRequests {
						denied.Add(1)
					}
				})
			}
			together.Wait()
			require.Equal(t, time.Second, time.Since(start), name)
			require.EqualValues(t, 1, denied.Load(), "%s: the fourth request would wait for too long", name)

			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			w := get(h, "/", func(r *http.Request) { *r = *r.WithContext(ctx) })
			require.Equal(t, http.StatusServiceUnavailable, w.Code, "%s: the handler doesn't run", name)
		})
	}
}

func TestFailedRequestsGiveTheirTokensBack(t *testing.T) {
	t.Parallel()
	var handler http.HandlerFunc
	h := middleware(t, Config{Limiter: minutely(t, 1),
		SkipFailed: true}).Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { handler(w, r) }))
	for _, status := range []int{400, 404, 500} {
		handler = func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(status)
		}
		require.NotEqual(t, http.StatusTooManyRequests, get(h, "/").Code)
	}
	handler = func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	require.PanicsWithValue(t, http.ErrAbortHandler, func() { get(h, "/") })
	handler = func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		require.NoError(t, http.NewResponseController(w).Flush())
		_, _ = io.WriteString(w, "ok")
		w.WriteHeader(http.StatusInternalServerError) // ignored, since the status was sent before
	}
	require.Equal(t, http.StatusOK, get(h, "/").Code)
	require.Equal(t, http.StatusTooManyRequests, get(h, "/").Code, "a success counts")
	require.Equal(t, http.StatusTooManyRequests, get(h, "/").Code, "a denial returns no tokens")
}

func TestShadowModeDeniesNothingAndReports(t *testing.T) {
	t.Parallel()
	var denied []Decision
	h := middleware(t, Config{Limiter: minutely(t, 1), Shadow: true,
		OnLimit: func(_ Request, d Decision) { denied = append(denied, d) }}).Wrap(hello)
	for range 3 {
		w := get(h, "/")
		require.Equal(t, http.StatusOK, w.Code)
		require.Empty(t, w.Header().Get("RateLimit"))
	}
	require.Len(t, denied, 2)
	require.False(t, denied[0].OK)
	require.True(t, denied[0].Shadow)
}

func TestACustomHandlerAnswersDenials(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: minutely(t, 1), NoHeaders: true,
		Denied: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			d, ok := FromContext(r.Context())
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = fmt.Fprint(w, ok, d.DeniedBy)
		})}).Wrap(hello)
	require.Empty(t, get(h, "/").Header().Get("RateLimit"))
	w := get(h, "/")
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
	require.Equal(t, "true [default]", w.Body.String())
	require.Equal(t, "60", w.Header().Get("Retry-After"))
}

type broken struct{ err error }

func (b broken) Take(ctx context.Context, _ string, _ int64, _ ...fetch.CallOption) (fetch.Result, error) {
	if b.err == nil { // hangs
		<-ctx.Done()
		return fetch.Result{}, ctx.Err()
	}
	return fetch.Result{}, b.err
}

func TestALimiterThatCannotAnswerFailsClosedOrOpen(t *testing.T) {
	t.Parallel()
	for _, b := range []broken{{fmt.Errorf("%w: gone", fetch.ErrUnavailable)}, {errors.New("bug")}, {}} {
		var reported error
		cfg := Config{Limiter: b, Timeout: time.Millisecond, OnError: func(_ Request, err error) { reported = err }}
		require.Equal(t, http.StatusServiceUnavailable, get(middleware(t, cfg).Wrap(hello), "/").Code)
		require.Error(t, reported)
		cfg.FailOpen = true
		require.Equal(t, http.StatusOK, get(middleware(t, cfg).Wrap(hello), "/").Code)
	}
}

func TestTheAbuseLogKeepsTheLatestDenials(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	log, err := NewAbuseLog(rdb, "abuse", 1000)
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	h := middleware(t, Config{Limiter: minutely(t, 1), OnLimit: log.Record}).Wrap(hello)
	for i := range 4 {
		get(h, fmt.Sprint("/", i))
	}
	stop()
	require.NoError(t, log.Run(ctx), "Run writes all records before it ends")
	abuses, err := log.Latest(t.Context(), 2)
	require.NoError(t, err)
	require.Len(t, abuses, 2)
	require.WithinDuration(t, time.Now(), abuses[0].At, time.Minute)
	abuses[0].At = time.Time{}
	require.Equal(t, Abuse{Key: "ip:192.0.2.1", IP: "192.0.2.1", Method: "GET", Path: "/3", DeniedBy: []string{"default"}},
		abuses[0])

	for range abuseQueue + 7 { // Run isn't called, so the queue becomes full, but Record doesn't block
		get(h, "/")
	}
	require.EqualValues(t, 7, log.Dropped())
	server.Kill()
	_, err = log.Latest(t.Context(), 1)
	require.Error(t, err)
	for field, f := range map[string]func() (*AbuseLog, error){
		"client":              func() (*AbuseLog, error) { return NewAbuseLog(nil, "a", 1) },
		"redis client is nil": func() (*AbuseLog, error) { return NewAbuseLog((*redis.Client)(nil), "a", 1) },
		"stream":              func() (*AbuseLog, error) { return NewAbuseLog(rdb, "", 1) },
		"most":                func() (*AbuseLog, error) { return NewAbuseLog(rdb, "a", 0) },
	} {
		_, err := f()
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, field)
	}
}

func TestBadConfigIsRefused(t *testing.T) {
	t.Parallel()
	l := minutely(t, 1)
	for field, cfg := range map[string]Config{
		"limiter":          {Key: ByIP()},
		"key":              {Limiter: l},
		"name: it has":     {Limiter: l, Key: ByIP(), Name: strings.Repeat("n", 65)},
		"name: \"ü\"":      {Limiter: l, Key: ByIP(), Name: "ü"},
		"window":           {Limiter: l, Key: ByIP(), Window: -1},
		"timeout":          {Limiter: l, Key: ByIP(), Timeout: -1},
		"jitter":           {Limiter: l, Key: ByIP(), Jitter: -1},
		"slow down: after": {Limiter: l, Key: ByIP(), SlowDown: SlowDown{After: -1}},
		"slow down: max":   {Limiter: l, Key: ByIP(), SlowDown: SlowDown{Step: 1}},
		"skip failed":      {Limiter: broken{}, Key: ByIP(), SkipFailed: true},
		"allow[0]":         {Limiter: l, Key: ByIP(), Allow: []netip.Prefix{{}}},
		"trusted proxies": {Limiter: l, Key: ByIP(),
			TrustedProxies: []netip.Prefix{netip.MustParsePrefix("::ffff:10.0.0.0/104")}},
	} {
		_, err := New(cfg)
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, field)
	}
}

// scripted is a limiter that returns a fixed result, and remembers the result that is undone.
type scripted struct{ result, undone fetch.Result }

func (s *scripted) Take(context.Context, string, int64, ...fetch.CallOption) (fetch.Result, error) {
	return s.result, nil
}

func (s *scripted) Undo(_ context.Context, _ string, r fetch.Result) error {
	s.undone = r
	return nil
}

// The result determines which tokens go back, and to which era of a bucket. So it must reach Undo unchanged.
func TestTheResultOfAFailedRequestIsUndone(t *testing.T) {
	t.Parallel()
	limiter := &scripted{result: fetch.Result{OK: true, Taken: 1, Limit: 10, Shadow: true, Era: 7}}
	h := middleware(t, Config{Limiter: limiter, SkipFailed: true}).Wrap(http.NotFoundHandler())
	require.Equal(t, http.StatusNotFound, get(h, "/").Code)
	require.Equal(t, limiter.result, limiter.undone)
}

// distant is a limiter that measures how far away its server is, as a fetch.Client does.
type distant struct {
	fixed
	deadline bool // the call's context had one
	opts     int
}

func (d *distant) Timeout(string) time.Duration { return 700 * time.Millisecond }

func (d *distant) Take(ctx context.Context, _ string, _ int64, opts ...fetch.CallOption) (fetch.Result, error) {
	_, d.deadline = ctx.Deadline()
	d.opts = len(opts)
	return d.result, nil
}

func TestAMeasuredDistanceSetsTheTimeout(t *testing.T) {
	t.Parallel()
	for timeout, bounded := range map[time.Duration]bool{0: false, time.Minute: true} {
		l := &distant{fixed: fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}}
		h := middleware(t, Config{Limiter: l, Timeout: timeout}).Wrap(hello)
		require.Equal(t, http.StatusOK, get(h, "/").Code)
		require.Equal(t, bounded, l.deadline, "%s: the middleware sets a deadline", timeout)
		require.Equal(t, !bounded, l.opts == 1, "%s: the middleware passes the limiter's own timeout", timeout)
	}
}
