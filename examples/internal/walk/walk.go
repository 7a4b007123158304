// Package walk has a test that all examples of web frameworks share. It uses real HTTP and a real Redis.
package walk

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// Through tests a router that admits three requests.
func Through(t *testing.T, newRouter func(redis.UniversalClient) (http.Handler, error)) {
	t.Helper()
	router, err := newRouter(testenv.Redis(t).Client())
	require.NoError(t, err)
	server := httptest.NewServer(router)
	t.Cleanup(server.Close)
	get := func(path string) (*http.Response, string) {
		res, err := server.Client().Get(server.URL + path)
		require.NoError(t, err)
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return res, string(body)
	}

	for range 5 { // more requests than there are tokens
		res, _ := get("/broken")
		require.Equal(t, http.StatusInternalServerError, res.StatusCode, "a request that failed costs nothing")
	}
	for _, left := range []string{"2", "1", "0"} {
		res, body := get("/orders/7")
		require.Equal(t, http.StatusOK, res.StatusCode)
		require.Equal(t, "order 7, "+left+" requests left\n", body, "the handler sees what was decided")
		require.Contains(t, res.Header.Get("RateLimit"), "r="+left)
	}
	res, body := get("/orders/7")
	require.Equal(t, http.StatusTooManyRequests, res.StatusCode)
	require.NotContains(t, body, "order", "the handler isn't called")
	require.Equal(t, "application/problem+json", res.Header.Get("Content-Type"))
	require.NotEmpty(t, res.Header.Get("Retry-After"))
}
