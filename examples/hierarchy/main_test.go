package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// A team has 100 tokens, and each of its users has 60. The rates are so low that no tokens are added during the test.
// Batch work leaves a fifth of each bucket.
func TestARequestIsChargedToUserTeamAndPoolOrToNone(t *testing.T) {
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	text, err := os.ReadFile("hierarchy.yaml")
	require.NoError(t, err)
	file := strings.NewReplacer("rate: 10/s", "rate: 1/h", "rate: 2/s", "rate: 1/h",
		"redis://127.0.0.1:6379", server.URL(), "127.0.0.1:2379", etcd.Endpoints()[0],
	).Replace(string(text)) + "listen: 127.0.0.1:0\n"
	path := filepath.Join(t.TempDir(), "hierarchy.yaml")
	require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
	testenv.StartCommand(t, testenv.Command{
		Name: "refiller", Path: testenv.Build(t, "./cmd/refiller"), Args: []string{"run", "--config", path},
	})
	client, err := fetch.New(server.Client(), fetch.WithTimeout(10*time.Second))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close(context.Background())) })
	left := func(key string) int64 {
		r, err := client.Peek(t.Context(), key)
		require.NoError(t, err)
		return r.Remaining
	}
	require.Eventually(t, func() bool { // the region's bucket is full, and the templates are published
		api, err := client.Peek(t.Context(), "api")
		_, unknown := client.Peek(t.Context(), "user:red/ann")
		return err == nil && unknown == nil && api.Remaining == 2000
	}, 30*time.Second, 20*time.Millisecond)

	ask := func(user string, batch bool) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		req.Header.Set("X-Team", "red")
		req.Header.Set("X-User", user)
		if batch {
			req.Header.Set("X-Batch", "1")
		}
		w := httptest.NewRecorder()
		handler(client).ServeHTTP(w, req)
		return w
	}
	for range 48 {
		require.Equal(t, http.StatusOK, ask("ann", true).Code)
	}
	w := ask("ann", true)
	require.Equal(t, http.StatusTooManyRequests, w.Code)
	require.Equal(t, "user:red/ann has too few tokens\n", w.Body.String(), "12 of 60 tokens are left for interactive work")
	require.NotEmpty(t, w.Header().Get("Retry-After"))
	for range 12 {
		require.Equal(t, http.StatusOK, ask("ann", false).Code)
	}
	require.Equal(t, http.StatusTooManyRequests, ask("ann", false).Code)
	require.EqualValues(t, 40, left("team:red"))

	for range 20 {
		require.Equal(t, http.StatusOK, ask("bob", true).Code)
	}
	require.Equal(t, "team:red has too few tokens\n", ask("bob", true).Body.String())
	require.EqualValues(t, 20, left("team:red"))
	require.EqualValues(t, 40, left("user:red/bob"), "a denied request charges no bucket")
}
