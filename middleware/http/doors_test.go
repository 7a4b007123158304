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
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
)

// fixed is a limiter that answers as told, and counts what is given back.
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

func TestOnErrorHearsOfTheRequestWhoseTokensCouldNotBeGivenBack(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}, undo: errors.New("redis is away")}
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

// A handler behind SkipFailed takes the connection over, as for a WebSocket, and its token stays taken.
func TestAConnectionCanBeTakenOverBehindSkipFailed(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}
	server := httptest.NewServer(middleware(t, Config{Limiter: l, SkipFailed: true}).Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
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
	require.Equal(t, http.StatusSwitchingProtocols, res.StatusCode)
	rest, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "hello", string(rest))
	require.Zero(t, l.undone.Load())
}

func TestSkipFailedHidesNothingThatAWriterCanDo(t *testing.T) {
	t.Parallel()
	l := &fixed{result: fetch.Result{OK: true, Taken: 1, Limit: 5}}
	server := httptest.NewServer(middleware(t, Config{Limiter: l, SkipFailed: true}).Wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
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
		fetch.ErrInvalidAmount: http.StatusBadRequest, fetch.ErrUnavailable: http.StatusOK, fetch.ErrUnknownBucket: http.StatusOK,
	} {
		h := middleware(t, Config{Limiter: &fixed{err: err}, FailOpen: true}).Wrap(hello)
		require.Equal(t, want, get(h, "/").Code, err)
	}
	closed := middleware(t, Config{Limiter: &fixed{err: fetch.ErrUnknownBucket}}).Wrap(hello)
	require.Equal(t, http.StatusServiceUnavailable, get(closed, "/").Code, "it isn't the page that isn't there")
}

func TestABucketWithoutAPolicyHasNoNumbersInHeaders(t *testing.T) {
	t.Parallel()
	h := middleware(t, Config{Limiter: &fixed{result: fetch.Result{OK: true, Taken: 1}}, XHeaders: true}).Wrap(hello)
	headers := get(h, "/").Header()
	for _, name := range []string{"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining"} {
		require.Empty(t, headers.Values(name), name)
	}
}
