package replica_test

import (
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// metrics returns the text of a replica's metrics.
func metrics(t *testing.T, r *replica.Replica) string {
	t.Helper()
	res, err := http.Get("http://" + r.Addr().String() + "/metrics")
	require.NoError(t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return string(body)
}

// A policy is tried in shadow mode, its denials are a metric, and a reload
// enforces it.
func TestAPolicyIsTriedInShadowMode(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb, url := server.Client(), "redis://"+server.Addr()
	r := running(t, parse(t, url, 1, "  - {key: trial, capacity: 10, rate: 1/h, shadow: true}\n"), replica.Options{})
	eventually(t, "the bucket exists", func() bool { return rdb.Exists(t.Context(), "{trial}:ctl").Val() == 1 })
	client, err := fetch.New(rdb, fetch.WithTimeout(20*time.Second))
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close(t.Context())) }()
	for range 6 {
		result, err := client.Take(t.Context(), "trial", 5)
		require.NoError(t, err)
		require.True(t, result.OK)
	}
	require.Contains(t, metrics(t, r), `refiller_shadow_denied_tokens_total{bucket="trial",region=""} 20`)

	require.NoError(t, r.Reload(parse(t, url, 2, "  - {key: trial, capacity: 10, rate: 1/h}\n"), "test"))
	eventually(t, "the policy is enforced", func() bool {
		result, err := client.Take(t.Context(), "trial", 5)
		require.NoError(t, err)
		return !result.OK
	})
	require.Equal(t, "0", rdb.Get(t.Context(), "trial").Val())
}
