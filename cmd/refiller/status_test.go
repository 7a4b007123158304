package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// someStatus has a value in every field of a status.
func someStatus() admin.Status {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return admin.Status{
		Identity: "refiller-7f9c6d5b8-x2x9z", Region: "eu", Mode: "etcd", Config: 20261122,
		Redis:   "rediss://redis.quota.svc:6379",
		Started: now, Now: now, Leader: &admin.Leader{Identity: "refiller-7f9c6d5b8-x2x9z", Epoch: 1234567}, Racing: true,
		Replicas: []admin.Replica{{Identity: "refiller-7f9c6d5b8-x2x9z", Role: "leads"},
			{Identity: "refiller-7f9c6d5b8-abcde", Late: true}},
		Reload: admin.Reload{Result: "refused", At: now.Add(-time.Minute),
			Problems: []string{"refiller.yaml:7: buckets[0].key: want a name"}},
		Buckets: []admin.Bucket{
			{Key: "payments:provider:charges:europe", Tokens: 1234567, Capacity: 9876543, Outstanding: 424242, Rate: "123456/s",
				Index: 998877, Age: 52,
				Policy: 20261122, Conflict: true, Differs: []config.Difference{{Field: "rate", InForce: "123456/s", File: "5/s"}}},
			{Key: "a\x1b[31mb", Tokens: 3321, Capacity: 5000, Rate: "5/s", Age: 3},
			{Key: "digest", Tokens: 1, Capacity: 2, Schedule: "1000, @daily Europe/Berlin", Age: 9},
			{Key: "daily", Error: "malformed: its key holds a list where the index should be"},
		},
		Found: 6, Total: 7, Conflicts: admin.Mismatch{Total: 1},
		Templates: []admin.Template{{Prefix: "user:", Shards: 6, Active: 123456, Refills: 7654321}},
		Pools: &admin.Pools{Coordinator: &admin.Leader{Identity: "eu/refiller-0", Epoch: 9}, Cut: "context deadline exceeded",
			Shares: []admin.Share{
				{Pool: "payments", Limit: 1000, Rate: 612.5, Floor: 100, Demand: 5000, Tokens: 1234, Capacity: 3000, Age: 4.5,
					Remaining: 7.5}}},
	}
}

func TestStatusFitsEightyColumnsWithoutCuttingANumber(t *testing.T) {
	t.Parallel()
	for _, width := range []int{60, 80, 132} {
		var out bytes.Buffer
		require.NoError(t, writeStatus(&out, width, someStatus()))
		for _, line := range strings.Split(out.String(), "\n") {
			require.LessOrEqual(t, utf8.RuneCountInString(line), width, line)
		}
		for _, whole := range []string{"1234567", "9876543", "3321", "5000", "123456", "612.5/s", "1000/s", "ends in 8 s"} {
			require.Contains(t, out.String(), whole, "at %d columns", width)
		}
		if width >= 80 {
			require.Contains(t, out.String(), "  1000, @daily Europe/Berlin",
				"the policy comes before columns that may be left out")
			require.Contains(t, out.String(), "payments:provider:charges:eu")
		}
	}
}

func TestStatusElsewhereIsWholeAndShowsNoControlCharacters(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, writeStatus(&out, 0, someStatus()))
	require.NotContains(t, out.String(), "\x1b")
	require.NotContains(t, out.String(), "…\n", "no line is cut")
	for _, want := range []string{
		`"a\x1b[31mb"`, "payments:provider:charges:europe", "20261122 CONFLICT", "424242", "998877", "52 ms ago",
		"… and 2 more",
		"payments:provider:charges:europe: rate is 123456/s in force, and 5/s in the file",
		"daily                             malformed: its key holds a list where the index should be",
	} {
		require.Contains(t, out.String(), want)
	}
}

func TestWatchingElsewhereThanOnATerminalWritesNoEscapeSequences(t *testing.T) {
	t.Parallel()
	cmd, d := &cobra.Command{}, display{}
	d.flags(cmd)
	require.NoError(t, cmd.ParseFlags([]string{"--watch=100ms"}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	rounds := 0
	require.NoError(t, d.show(ctx, env{Stdout: &out}, func(_ context.Context, w io.Writer, width int) error {
		require.Zero(t, width)
		rounds++
		switch rounds {
		case 1:
			return line(w, "first")
		case 2:
			return errors.New("no answer")
		}
		cancel()
		return line(w, "third")
	}))
	require.Equal(t, "first\n\nno answer\n\nthird\n", out.String())
}

// replicaOf runs a replica with this configuration and returns the address of its admin server.
func replicaOf(t *testing.T, text string) (addr string) {
	t.Helper()
	cfg, err := config.Load(config.Source{Path: writeConfig(t, text)})
	require.NoError(t, err)
	return runReplica(t, cfg, "one").Addr().String()
}

// runReplica runs a replica until the test ends.
func runReplica(t *testing.T, cfg config.Config, identity string) *replica.Replica {
	t.Helper()
	r, err := replica.New(cfg, replica.Options{Identity: identity, Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return r
}

// asked returns the status of a replica as text within 80 columns, and as JSON.
func asked(t *testing.T, addr string) (text string, s admin.Status) {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, statusOf{output: "text"}.show(t.Context(), &out, 80, "http://"+addr))
	for _, line := range strings.Split(out.String(), "\n") {
		require.LessOrEqual(t, utf8.RuneCountInString(line), 80, line)
	}
	code, stdout, stderr := runWith(t, nil, "status", "--addr", addr, "-o", "json")
	require.Zero(t, code, stderr)
	require.NotContains(t, stdout, "null", "a list without elements is an empty list")
	require.NoError(t, json.Unmarshal([]byte(stdout), &s))
	return out.String(), s
}

func TestStatusOfPoolsAloneShowsNoTableOfBuckets(t *testing.T) {
	t.Parallel()
	_, addr := pooledRegion(t)
	var text string
	var s admin.Status
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		text, s = asked(t, addr)
		require.Regexp(c, `(?m)^payments +\d+ +2250 +100/s +1000/s +100/s +\S+/s +renewed \d\.\d s ago$`, text)
	}, 30*time.Second, 50*time.Millisecond)
	require.NotContains(t, text, "BUCKET")
	require.NotContains(t, text, "more")
	require.Empty(t, s.Buckets)
	require.Zero(t, s.Found)
	require.Equal(t, 1, s.Total, "the pool's bucket is counted")
	require.Len(t, s.Pools.Shares, 1)
	require.EqualValues(t, 100, s.Pools.Shares[0].Rate)
	require.InDelta(t, 12, s.Pools.Shares[0].Age+s.Pools.Shares[0].Remaining, 0.1)
	page, err := get(t.Context(), "http://"+addr+"/")
	require.NoError(t, err)
	require.Contains(t, string(page), "No bucket has a policy of its own.")
	require.Contains(t, string(page), "<p>1 pool; as read at the start</p>")
	require.NotContains(t, string(page), "0 to 0 of")
}

func TestStatusOfAnEmptyRedisSaysThatTheBucketsAreMissing(t *testing.T) {
	t.Parallel()
	// A server that accepts no write stays empty.
	server := testenv.Redis(t, testenv.WithArgs("--min-replicas-to-write", "1"))
	addr := replicaOf(t, fmt.Sprintf(`redis: {url: %q}
listen: 127.0.0.1:0
buckets:
  - {key: checkout, capacity: 100, rate: 10/s}
  - {key: daily, capacity: 60, every: 1h, tokens: 10}
templates:
  - {prefix: "user:", capacity: 60, rate: 1/s}
`, server.URL()))
	var text string
	var s admin.Status
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		text, s = asked(t, addr)
		require.Regexp(c, `(?s)PAUSED +refills are paused: .*NOREPLICAS`, text)
	}, 10*time.Second, 50*time.Millisecond)
	require.NotContains(t, text, "FAULT", "the buckets have no fault")
	for i, key := range []string{"checkout", "daily"} {
		require.Equal(t, key, s.Buckets[i].Key)
		require.Equal(t, "not in Redis: created once missing for two refill intervals", s.Buckets[i].Error)
		require.Regexp(t, `(?m)^`+key+` +not in Redis: created once missing for two refill intervals$`, text)
	}
	require.Regexp(t, `(?m)^"user:" +0 of 16 +0 +0 +\d+`, text)

	require.NoError(t, server.Client().ConfigSet(t.Context(), "min-replicas-to-write", "0").Err())
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		text, s = asked(t, addr)
		require.Regexp(c, `(?m)^checkout +100 +100 .* 10/s .* ms ago +0$`, text)
		require.Empty(c, s.Away)
	}, 10*time.Second, 50*time.Millisecond)
}
