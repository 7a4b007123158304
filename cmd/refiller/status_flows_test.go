package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// dividedReplica runs a replica that divides the bucket acme, and takes from it for a loud flow and a quiet one.
func dividedReplica(t *testing.T) (addr string) {
	t.Helper()
	server := testenv.Redis(t)
	addr = replicaOf(t, fmt.Sprintf(`redis: {url: %q}
listen: 127.0.0.1:0
buckets:
  - {key: acme, capacity: 100, rate: 100/s, flows: {}}
  - {key: plain, capacity: 100, rate: 100/s}
`, server.URL()))
	c, err := fetch.New(server.Client(), fetch.WithDenyCache(false), fetch.WithTimeout(10*time.Second))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var takes sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		takes.Wait()
		require.NoError(t, c.Close(context.Background()))
	})
	for flow, every := range map[string]time.Duration{"loud": 2 * time.Millisecond, "quiet": 100 * time.Millisecond} {
		takes.Go(func() {
			ticks := time.NewTicker(every)
			defer ticks.Stop()
			for ctx.Err() == nil {
				_, _ = c.Take(ctx, "acme", 1, fetch.WithFlow(flow)) // the bucket may not exist yet
				<-ticks.C
			}
		})
	}
	return addr
}

func TestStatusListsTheFlowsOfABucket(t *testing.T) {
	t.Parallel()
	addr := dividedReplica(t)
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		code, stdout, stderr := runWith(t, nil, "status", "acme", "--flows", "--addr", addr)
		require.Zero(c, code, stderr)
		require.Regexp(c, `(?m)^bucket +acme, \d+ of 100 tokens, 100/s$`, stdout)
		require.Regexp(c, `(?m)^flows +2 seen, 1 listed in the plan; a flow of weight 1 may have \d\S+/s$`, stdout)
		require.Regexp(c, `(?m)^loud +[1-9]\S*/s +[1-9]\S+/s +[1-9]\S*/s +yes$`, stdout)
		require.Regexp(c, `(?m)^quiet +[1-9]\S*/s +[1-9]\S*/s +0/s +no$`, stdout)
	}, 30*time.Second, 100*time.Millisecond)

	code, stdout, stderr := runWith(t, nil, "status", "acme", "--flows=1", "--addr", addr, "-o", "json")
	require.Zero(t, code, stderr)
	var s admin.Status
	require.NoError(t, json.Unmarshal([]byte(stdout), &s))
	require.Len(t, s.Buckets, 1)
	require.Equal(t, "loud", s.Buckets[0].Flows.List[0].Name)
	require.Len(t, s.Buckets[0].Flows.List, 1)
	require.Positive(t, s.Buckets[0].Flows.Others.Got)

	page, err := get(t.Context(), "http://"+addr+"/?key=acme")
	require.NoError(t, err)
	require.Contains(t, string(page), "<td>loud</td>")
	metrics, err := get(t.Context(), "http://"+addr+"/metrics")
	require.NoError(t, err)
	require.Regexp(t, `(?m)^refiller_flows_seen{bucket="acme",region=""} 2$`, string(metrics))
	require.Regexp(t, `(?m)^refiller_flows_denied_tokens_total{bucket="acme",flows="listed",region=""} [1-9]`,
		string(metrics))

	code, stdout, stderr = runWith(t, nil, "status", "plain", "--addr", addr)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "plain")
	require.NotContains(t, stdout, "acme")
	code, _, stderr = runWith(t, nil, "status", "plain", "--flows", "--addr", addr)
	require.NotZero(t, code)
	require.Contains(t, stderr, `has read no flows of "plain"`)
	code, _, stderr = runWith(t, nil, "status", "typo", "--flows", "--addr", addr)
	require.NotZero(t, code)
	require.Contains(t, stderr, `has no bucket "typo"`)
}

func TestFlowsOfNoBucketAreAUsageError(t *testing.T) {
	t.Parallel()
	code, _, stderr := runWith(t, nil, "status", "--flows")
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, "--flows: want the KEY of a bucket")
	code, _, stderr = runWith(t, nil, "status", "acme", "--flows=1001")
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, "want a whole number from 1 to 1000")
}
