package httplimit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

// fixed is a limiter with a fixed answer. It counts the tokens that are given back.
type fixed struct {
	result fetch.Result
	err    error
	undo   error
	undone atomic.Int64
}

func (s *fixed) Take(context.Context, string, int64, ...fetch.CallOption) (fetch.Result, error) {
	return s.result, s.err
}

func (s *fixed) Undo(context.Context, string, fetch.Result) error {
	s.undone.Add(1)
	return s.undo
}

func TestOnErrorIsCalledIfTokensCannotBeGivenBack(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}, undo: errors.New("redis is unavailable")}
	var path string
	h := middleware(t, Config{Limiter: l, SkipFailed: true, OnError: func(r Request, _ error) { path = r.URL.Path }})
	require.Equal(t, http.StatusTeapot, get(h.Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
	})), "/failed").Code)
	require.Equal(t, "/failed", path)
	require.EqualValues(t, 1, l.undone.Load())
}

func TestInventedMethodsAndPathsFindNoFreshTokens(t *testing.T) {
	t.Parallel()
	limited := middleware(t, Config{Limiter: minutely(t, 2), Key: ByRoute()})
	mux := http.NewServeMux()
	mux.Handle("/items/{id}", limited.Wrap(hello))
	passed := 0
	for i := range 50 {
		r := httptest.NewRequest("METHOD"+strings.Repeat("X", i), "/items/7", nil)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		if w.Code == http.StatusOK {
			passed++
		}
	}
	require.Equal(t, 2, passed)

	around := middleware(t, Config{Limiter: minutely(t, 2), Key: ByRoute()}).Wrap(mux)
	passed = 0
	for i := range 50 {
		if get(around, "/nowhere/"+strings.Repeat("x", i)).Code != http.StatusTooManyRequests {
			passed++
		}
	}
	require.Equal(t, 2, passed)
}

// A handler behind SkipFailed can take over the connection, for example for a WebSocket. Its token stays taken.
func TestAConnectionCanBeTakenOverBehindSkipFailed(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}
	server := httptest.NewServer(middleware(t, Config{Limiter: l,
		SkipFailed: true}).Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		hijacker, ok := w.(http.Hijacker)
		if !ok {
			http.Error(w, "no hijacker", http.StatusInternalServerError)
			return
		}
		conn, _, err := hijacker.Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nUpgrade: echo\r\nConnection: Upgrade\r\n\r\nhello"))
		_ = conn.Close()
	})))
	defer server.Close()
	conn, err := net.Dial("tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"))
	require.NoError(t, err)
	reader := bufio.NewReader(conn)
	res, err := http.ReadResponse(reader, nil)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	rest, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "hello", string(rest))
	require.Zero(t, l.undone.Load())
}

func TestSkipFailedHidesNothingThatAWriterCanDo(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}
	server := httptest.NewServer(middleware(t, Config{Limiter: l,
		SkipFailed: true}).Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, flusher := w.(http.Flusher)
		_, readerFrom := w.(io.ReaderFrom)
		_, pusher := w.(http.Pusher)
		if !flusher || !readerFrom || pusher {
			t.Errorf("flusher %v, readerFrom %v, pusher %v", flusher, readerFrom, pusher)
		}
		if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Error(err)
		}
		_, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader("hello"))
	})))
	defer server.Close()
	res, err := http.Get(server.URL)
	require.NoError(t, err)
	defer res.Body.Close()
	require.Equal(t, http.StatusOK, res.StatusCode)
	require.Zero(t, l.undone.Load(), "a body without a status is a success")
}

func TestFailingOpenTurnsNoLimitOff(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]int{
		fetch.ErrTooManyBuckets: http.StatusTooManyRequests, fetch.ErrExceedsCapacity: http.StatusUnprocessableEntity,
		fetch.ErrInvalidAmount: http.StatusBadRequest, fetch.ErrUnavailable: http.StatusOK,
		fetch.ErrUnknownBucket: http.StatusOK,
	} {
		h := middleware(t, Config{Limiter: &fixed{err: err}, FailOpen: true}).Wrap(hello)
		require.Equal(t, want, get(h, "/").Code, err)
	}
	closed := middleware(t, Config{Limiter: &fixed{err: fetch.ErrUnknownBucket}}).Wrap(hello)
	require.Equal(t, http.StatusServiceUnavailable, get(closed, "/").Code, "an unknown bucket is not a missing page")
}

func TestABucketWithoutAPolicyHasNoNumbersInHeaders(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: &fixed{result: fetch.Result{OK: true, Taken: 1}}, XHeaders: true}).Wrap(hello)
	headers := get(h, "/").Header()
	for _, name := range []string{"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining"} {
		require.Empty(t, headers.Values(name), name)
	}
}

// The middleware works with every limiter of package limit, and sends its headers. All of them except pacing take back
// the tokens of failed requests.
func TestTheMiddlewareWorksWithEachLimiter(t *testing.T) {
	t.Parallel()
	now := func() time.Time { return time.Unix(1_800_000_000, 0) }
	burst := lazy.Config{Name: "lazy", Capacity: 2, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
	bucket, err := lazy.NewLocal(burst, now)
	require.NoError(t, err)
	sliding, err := window.NewLocal(window.Config{Kind: window.Sliding, Limit: 2, Window: time.Hour}, now)
	require.NoError(t, err)
	fixed, err := window.NewLocal(window.Config{Limit: 2, Window: time.Hour}, now)
	require.NoError(t, err)
	days := schedule.Config{Windows: []schedule.Window{{Limit: 2, Per: calendar.Day}, {Limit: 3, Length: time.Hour}}}
	daily, err := schedule.NewLocal(days, now)
	require.NoError(t, err)
	many, err := limit.NewManyLocal(now, burst, window.Config{Name: "daily", Limit: 3, Window: 24 * time.Hour})
	require.NoError(t, err)
	for name, l := range map[string]limit.Limiter{"lazy": bucket, "fixed": fixed, "sliding": sliding, "schedule": daily,
		"many": many} {
		m := middleware(t, Config{Limiter: l, SkipFailed: true})
		failing := m.Wrap(http.NotFoundHandler())
		for range 5 {
			require.Equal(t, http.StatusNotFound, get(failing, "/").Code, name)
		}
		h := m.Wrap(hello)
		for _, want := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests} {
			w := get(h, "/")
			require.Equal(t, want, w.Code, name)
			require.NotEmpty(t, w.Header().Get("RateLimit-Policy"), name)
			require.Contains(t, w.Header().Get("RateLimit-Policy"), ";q=2", name)
			require.Equal(t, want != http.StatusOK, w.Header().Get("Retry-After") != "", name)
		}
	}
	queue, err := pacing.NewLocal(pacing.Config{Rate: policy.PerSecond(1)}, now)
	require.NoError(t, err)
	h := middleware(t, Config{Limiter: queue}).Wrap(hello)
	require.Equal(t, http.StatusOK, get(h, "/").Code)
	require.Equal(t, http.StatusTooManyRequests, get(h, "/").Code)
}

// A client may reset its streams at once, so that its requests take no tokens. Such requests don't pass, even with
// FailOpen.
func TestAClientThatLeftDoesNotPassWhereItFailsOpen(t *testing.T) {
	t.Parallel()
	limiter, err := lazy.NewLocal(lazy.Config{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}, time.Now)
	require.NoError(t, err)
	served := 0
	h := middleware(t, Config{Limiter: limiter, FailOpen: true}).Wrap(http.HandlerFunc(
		func(http.ResponseWriter, *http.Request) { served++ }))
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 50 {
		get(h, "/", func(r *http.Request) { *r = *r.WithContext(gone) })
	}
	require.Zero(t, served)
	get(h, "/")
	require.Equal(t, 1, served)
}

// With SkipFailed, a client that disconnects does not get its token back. Otherwise it could have all the work done
// without using a token.
func TestHangingUpGivesNoTokenBack(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	for _, end := range []func(http.ResponseWriter){
		func(w http.ResponseWriter) { w.WriteHeader(http.StatusBadGateway) }, // the answer of httputil.ReverseProxy
		func(http.ResponseWriter) { panic(http.ErrAbortHandler) },
	} {
		h := middleware(t, Config{Limiter: l, SkipFailed: true}).Wrap(http.HandlerFunc(
			func(w http.ResponseWriter, _ *http.Request) {
				leave()
				end(w)
			}))
		func() {
			defer func() { _ = recover() }()
			get(h, "/", func(r *http.Request) { *r = *r.WithContext(ctx) })
		}()
	}
	require.Zero(t, l.undone.Load())
}

func TestAHeaderThatIsThereTwiceIsNoKey(t *testing.T) {
	t.Parallel()
	h := middleware(
		t,
		Config{Limiter: minutely(t, 5), Key: FirstOf(ByHeader("X-Team"), ByIP()), FailOpen: true},
	).Wrap(hello)
	require.Equal(t, http.StatusOK, get(h, "/", header("X-Team", "red")).Code)
	require.Equal(t, http.StatusBadRequest, get(h, "/", header("X-Team", "mine"), header("X-Team", "red")).Code)
	require.Equal(t, http.StatusOK, get(h, "/").Code)
}

func TestLimitsAroundEachOtherSendAllHeaders(t *testing.T) {
	t.Parallel()
	inner := middleware(t, Config{Limiter: minutely(t, 9), Name: "inner"}).Wrap(hello)
	w := get(middleware(t, Config{Limiter: minutely(t, 2), Name: "outer"}).Wrap(inner), "/")
	require.Equal(t, []string{`"outer";q=2;w=60`, `"inner";q=9;w=60`}, w.Header().Values("RateLimit-Policy"))
	require.Equal(t, []string{`"outer";r=1;t=60`, `"inner";r=8;t=60`}, w.Header().Values("RateLimit"))
}

// Clients get the usual length of a day, 24 hours, although days of up to 49 hours are possible.
func TestTheHeaderOfADayOfTheCalendarSays24Hours(t *testing.T) {
	t.Parallel()
	daily, err := schedule.NewLocal(schedule.Config{Windows: []schedule.Window{{Limit: 2, Per: calendar.Day}}}, time.Now)
	require.NoError(t, err)
	monthly, err := window.NewLocal(window.Config{Limit: 2, Per: calendar.Month}, time.Now)
	require.NoError(t, err)
	for want, l := range map[string]limit.Limiter{`"default";q=2;w=86400`: daily, `"default";q=2;w=2592000`: monthly} {
		require.Equal(t, want, get(middleware(t, Config{Limiter: l}).Wrap(hello), "/").Header().Get("RateLimit-Policy"))
	}
}

// The log keeps only the beginning of texts that a client chooses.
func TestTheAbuseLogKeepsLittleOfAHugeRequest(t *testing.T) {
	t.Parallel()
	log, err := NewAbuseLog(testenv.Redis(t).Client(), "abuse", 10)
	require.NoError(t, err)
	r := httptest.NewRequest(strings.Repeat("M", 100_000), "/"+strings.Repeat("p", 100_000), nil)
	log.Record(Request{Request: r}, Decision{})
	ctx, stop := context.WithCancel(t.Context())
	stop()
	require.NoError(t, log.Run(ctx))
	abuses, err := log.Latest(t.Context(), 1)
	require.NoError(t, err)
	require.Equal(t, []int{32, 512}, []int{len(abuses[0].Method), len(abuses[0].Path)})
}

// silent is a hook of a Redis client whose server never replies.
type silent struct{}

func (silent) DialHook(next redis.DialHook) redis.DialHook { return next }

func (silent) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, _ redis.Cmder) error {
		<-ctx.Done()
		return ctx.Err()
	}
}

func (silent) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// The denials that are left after a shutdown share one timeout.
func TestTheAbuseLogEndsWithoutItsRedis(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{})
	t.Cleanup(func() { require.NoError(t, rdb.Close()) })
	rdb.AddHook(silent{})
	synctest.Test(t, func(t *testing.T) {
		log, err := NewAbuseLog(rdb, "abuse", 10)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range abuseQueue {
			log.Record(NewRequest(httptest.NewRequest(http.MethodGet, "/", nil), nil), Decision{})
		}
		began := time.Now()
		require.NoError(t, log.Run(ctx))
		require.Equal(t, abuseTimeout, time.Since(began))
		require.EqualValues(t, abuseQueue, log.Dropped())
	})
}
