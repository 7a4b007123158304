package httplimit

import (
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/limit/window"
)

// These are the test cases of koa2-ratelimit 1.1.3, test/RateLimit.js, with their names. The cases of units of time are
// left out, since Go has such units. The case max: 0 is left out, too: there it means no limit. Here a limit of 0 is
// refused, and Weight 0 lets a request pass.
func TestCasesOfKoa2Ratelimit(t *testing.T) {
	t.Parallel()
	behind := func(t *testing.T, limit int64, cfg Config) http.Handler {
		t.Helper()
		l, err := window.NewLocal(window.Config{Limit: limit, Window: time.Minute}, time.Now)
		require.NoError(t, err)
		cfg.Limiter = l
		return middleware(t, cfg).Wrap(hello)
	}
	took := func(h http.Handler) time.Duration {
		began := time.Now()
		get(h, "/")
		return time.Since(began)
	}
	user := func(r *http.Request) { r.SetBasicAuth("1", "") }
	byUser := ByUser(func(r *http.Request) string {
		name, _, _ := r.BasicAuth()
		return name
	})
	for name, test := range map[string]func(t *testing.T){
		"should apply a small delay to the second request": func(t *testing.T) {
			h := behind(t, 5, Config{SlowDown: SlowDown{After: 1, Step: 500 * time.Millisecond, Max: time.Minute}})
			require.Zero(t, took(h))
			require.Equal(t, 500*time.Millisecond, took(h))
		},
		"should apply a larger delay to the subsequent request": func(t *testing.T) {
			h := behind(t, 5, Config{SlowDown: SlowDown{After: 1, Step: 100 * time.Millisecond, Max: time.Minute}})
			for i := range 4 {
				require.Equal(t, time.Duration(i)*100*time.Millisecond, took(h))
			}
		},
		"should allow delayAfter to be disabled entirely": func(t *testing.T) {
			h := behind(t, 5, Config{SlowDown: SlowDown{}})
			require.Zero(t, took(h)+took(h)+took(h))
		},
		"should refuse additional connections once IP has reached the max": func(t *testing.T) {
			h := behind(t, 1, Config{})
			require.Equal(t, []int{200, 429, 429}, []int{get(h, "/").Code, get(h, "/").Code, get(h, "/").Code})
		},
		"should show the provided message instead of the default message": func(t *testing.T) {
			h := behind(t, 1, Config{Message: "my msg", MessageKey: "message"})
			get(h, "/")
			require.JSONEq(t, `{"message":"my msg"}`, get(h, "/").Body.String())
		},
		"should (eventually) accept new connections from a blocked IP": func(t *testing.T) {
			h := behind(t, 1, Config{})
			get(h, "/")
			require.Equal(t, 429, get(h, "/").Code)
			time.Sleep(time.Minute)
			require.Equal(t, 200, get(h, "/").Code)
		},
		"should allow the error statusCode to be customized": func(t *testing.T) {
			h := behind(t, 1, Config{Status: 456})
			get(h, "/")
			require.Equal(t, 456, get(h, "/").Code)
		},
		"should use the custom handler when specified": func(t *testing.T) {
			h := behind(t, 1, Config{Denied: http.NotFoundHandler()})
			get(h, "/")
			require.Equal(t, 404, get(h, "/").Code)
		},
		"should allow custom skip function, and custom weight function": func(t *testing.T) {
			h := behind(t, 5, Config{Weight: func(r *http.Request) int64 { return int64(len(r.URL.Path) - 1) }})
			require.Equal(t, []int{200, 200, 429}, []int{get(h, "/").Code, get(h, "/12345").Code, get(h, "/1").Code})
		},
		"should set X-RateLimit-Reset with the correct value": func(t *testing.T) {
			h := behind(t, 5, Config{XHeaders: true})
			w := get(h, "/")
			require.Equal(t, strconv.Itoa(1_800_000_060), w.Header().Get("X-RateLimit-Reset"))
			require.Equal(t, "4", w.Header().Get("X-RateLimit-Remaining"))
		},
		"should skip ratelimit if userId is whitelisted": func(t *testing.T) {
			h := behind(t, 1, Config{Key: byUser, AllowKey: func(key string) bool { return key == "user:1" }})
			for range 3 {
				require.Equal(t, 200, get(h, "/", user).Code)
			}
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
	}
	_, err := New(Config{Key: ByIP()})
	require.ErrorIs(t, err, ErrConfig, "should not allow to use of a store that is not valid")
}
