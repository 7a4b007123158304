package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/admin"
	"github.com/tokenrefill/refiller/internal/config"
)

// someStatus has everything that a status can tell of.
func someStatus() admin.Status {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	return admin.Status{
		Identity: "refiller-7f9c6d5b8-x2x9z", Region: "eu", Mode: "etcd", Config: 20261122, Redis: "rediss://redis.quota.svc:6379",
		Started: now, Now: now, Leader: &admin.Leader{Identity: "refiller-7f9c6d5b8-x2x9z", Epoch: 1234567}, Racing: true,
		Replicas: []admin.Replica{{Identity: "refiller-7f9c6d5b8-x2x9z", Role: "leads"}, {Identity: "refiller-7f9c6d5b8-abcde", Late: true}},
		Reload:   admin.Reload{Result: "refused", At: now.Add(-time.Minute), Problems: []string{"refiller.yaml:7: buckets[0].key: want a name"}},
		Buckets: []admin.Bucket{
			{Key: "payments:provider:charges:europe", Tokens: 1234567, Capacity: 9876543, Outstanding: 424242, Rate: "123456/s", Index: 998877, Age: 52,
				Policy: 20261122, Conflict: true, Differs: []config.Difference{{Field: "rate", InForce: "123456/s", File: "5/s"}}},
			{Key: "a\x1b[31mb", Tokens: 3321, Capacity: 5000, Rate: "5/s", Age: 3},
			{Key: "daily", Error: "malformed: its key holds a list where the index should be"},
		},
		Total: 5, Conflicts: admin.Conflicts{Total: 1},
		Templates: []admin.Template{{Prefix: "user:", Shards: 6, Active: 123456, Refills: 7654321}},
		Pools: &admin.Pools{Coordinator: &admin.Leader{Identity: "eu/refiller-0", Epoch: 9}, Cut: "context deadline exceeded", Shares: []admin.Share{
			{Pool: "payments", Limit: 1000, Rate: 612.5, Floor: 100, Demand: 5000, Tokens: 1234, Capacity: 3000, Remaining: 7.5}}},
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
		for _, whole := range []string{"1234567", "9876543", "3321", "5000", "123456", "612.5/s", "1000/s", "7.5 s"} {
			require.Contains(t, out.String(), whole, "at %d columns", width)
		}
	}
}

func TestStatusElsewhereIsWholeAndShowsNoControlCharacters(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	require.NoError(t, writeStatus(&out, 0, someStatus()))
	require.NotContains(t, out.String(), "\x1b")
	require.NotContains(t, out.String(), "…\n", "nothing is cut")
	for _, want := range []string{
		`"a\x1b[31mb"`, "payments:provider:charges:europe", "20261122 CONFLICT", "424242", "998877", "52 ms ago", "… and 2 more",
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
	require.NoError(t, d.show(ctx, env{stdout: &out}, func(_ context.Context, w io.Writer, width int) error {
		require.Zero(t, width)
		switch rounds++; rounds {
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
