package main

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestDeleteRemovesABucketAndNothingElse(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(1)}.Terms(policy.Fence{})
	for _, key := range []string{"old", "kept"} {
		_, err := lua.Refill(t.Context(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
		_, err = lua.Reset(t.Context(), rdb, key, 40)
		require.NoError(t, err)
		held, err := lua.Reserve(t.Context(), rdb, key, lua.ReserveCall{ID: "r", N: 3, TTL: time.Hour})
		require.NoError(t, err)
		require.True(t, held.OK)
		_, err = lua.Heartbeat(t.Context(), rdb, key, "c", time.Hour)
		require.NoError(t, err)
		plan := policy.Plan{Version: policy.Version{Era: 1}, Whole: true, Lasts: time.Hour.Microseconds()}
		require.NoError(t, lua.PlanBatch(t.Context(), rdb, []lua.PlanCall{{Key: key, Plan: plan}})[0].Err)
	}
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\nbuckets: [{key: kept, capacity: 100, rate: 1/s}]\n"+
		"templates: [{prefix: \"user:\", capacity: 9, rate: 1/s}]\n")

	code, _, stderr := runWith(t, nil, "delete", "kept", "-c", path)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "remove it from the file first")
	code, _, stderr = runWith(t, nil, "delete", "user:doctor", "-c", path)
	require.Equal(t, 1, code)
	require.NotContains(t, stderr, "remove it from the file first", "only doctor makes this key of a template")
	code, stdout, stderr := runWith(t, nil, "delete", "old", "-c", path, "-o", "json", "--reason", "it was renamed")
	require.Zero(t, code, stderr)
	require.Contains(t, stderr, "operator action")
	require.Contains(t, stderr, `reason="it was renamed"`)
	var d deleted
	require.NoError(t, json.Unmarshal([]byte(stdout), &d))
	require.Equal(t, deleted{Key: "old", Keys: 8, Tokens: 37}, d)

	left, err := rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"kept", "{kept}", "{kept}:ctl", "{kept}:outstanding", "{kept}:due", "{kept}:live",
		"{kept}:flows", "{kept}:use"}, left)
	code, _, stderr = runWith(t, nil, "delete", "old", "-c", path)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "unknown bucket")
}

// A key of another program is not a bucket, so it is not deleted.
func TestDeleteLeavesOtherProgramsKeysAlone(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	require.NoError(t, server.Client().RPush(t.Context(), "list", "a").Err())
	require.NoError(t, server.Client().Set(t.Context(), "visits", 7, 0).Err())
	for _, key := range []string{"list", "visits"} {
		code, _, stderr := runWith(t, nil, "delete", key, "--redis", server.URL())
		require.Equal(t, 1, code, stderr)
		require.Equal(t, int64(1), server.Client().Exists(t.Context(), key).Val())
	}
}
