package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestLoadCountsWhatTheBucketGave(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	o := consumer(t.Context(), server.URL(), "load", "checkout", "-c", "8", "-n", "3", "--duration", "300ms", "-o", "json")
	require.Equal(t, exitOK, o.code, o.stderr)
	require.Empty(t, o.stderr, "no progress where there is no terminal")
	r := o.json(t)
	require.Equal(t, 99.0, r["admitted"])
	require.Equal(t, 33.0, r["admitted_takes"])
	require.Equal(t, 0.0, r["errors"])
	require.Equal(t, r["takes"], 33+r["denied"].(float64))
	require.Equal(t, 101.0, r["bound"], "the capacity and a started token")
	require.Equal(t, true, r["within_bound"])
	require.Equal(t, false, r["interrupted"])
	latency := r["latency_ms"].(map[string]any)
	require.LessOrEqual(t, latency["p50"], latency["p99.9"])
	require.LessOrEqual(t, latency["p99.9"], latency["max"])
	left, err := rdb.Get(t.Context(), "checkout").Int64()
	require.NoError(t, err)
	require.EqualValues(t, 1, left)
}

func TestLoadReportsABucketThatGivesMoreThanItsPolicy(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	require.NoError(t, rdb.Set(t.Context(), "checkout", 500, 0).Err())
	o := consumer(t.Context(), server.URL(), "load", "checkout", "--duration", "500ms")
	require.Equal(t, exitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "EXCEEDED by 399")
}

func TestLoadKeepsToItsRate(t *testing.T) {
	server, _ := newBucket(t, hourly(100))
	o := consumer(t.Context(), server.URL(), "load", "checkout", "-c", "4", "--rate", "40/s", "--duration", "500ms", "-o", "json")
	require.Equal(t, exitOK, o.code, o.stderr)
	takes := o.json(t)["takes"].(float64)
	require.LessOrEqual(t, takes, 21.0, "20 fall due in half a second, and one at its start")
	require.Positive(t, takes)
}

func TestAnInterruptedLoadReports(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var progress lockedBuffer
	var stdout bytes.Buffer
	code := make(chan int, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		args := []string{"load", "checkout", "--duration", "1h", "--progress", "--redis", server.URL()}
		code <- run(ctx, args, nil, strings.NewReader(""), &stdout, &progress)
	})
	require.Eventually(t, func() bool { return strings.Contains(progress.String(), "takes/s") }, 20*time.Second, time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-code)
	wg.Wait()
	require.Contains(t, stdout.String(), "interrupted")
	require.Contains(t, stdout.String(), "100 admitted")
	require.Contains(t, stdout.String(), "bound      101, kept")
	left, err := rdb.Get(t.Context(), "checkout").Int64()
	require.NoError(t, err)
	require.Zero(t, left)
}

func TestLoadWithoutAPolicyHasNoBound(t *testing.T) {
	server, rdb := newBucket(t, hourly(100))
	_, err := lua.Add(t.Context(), rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	o := consumer(t.Context(), server.URL(), "load", "foreign", "--duration", "100ms")
	require.Equal(t, exitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "3 admitted")
	require.Contains(t, o.stdout, "not known: the bucket has no policy")
}

func TestTheBoundOfASchedule(t *testing.T) {
	terms := policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 40}.Terms(policy.Fence{})
	p := lua.PeekReply{Terms: &terms, Step: 0, Next: 3_600_000_000}
	p.Now = 3_000_000_000 // ten minutes before the next step
	for elapsed, want := range map[time.Duration]int64{
		0: 100, 9 * time.Minute: 100, 10 * time.Minute: 140, 69 * time.Minute: 140, 70 * time.Minute: 180,
	} {
		tokens, _, unknown := bound(p, elapsed)
		require.Empty(t, unknown)
		require.Equal(t, want, tokens, elapsed)
	}
	p.Next = 0
	_, _, unknown := bound(p, time.Hour)
	require.NotEmpty(t, unknown)
}

func TestTheBoundOfARateCountsAGrant(t *testing.T) {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(100), Interval: 100 * time.Millisecond}.Terms(policy.Fence{})
	tokens, _, _ := bound(lua.PeekReply{Terms: &terms}, 10*time.Second)
	require.EqualValues(t, 1000+1001+10, tokens)
	terms.GrantTokens = 3 * terms.Tokens
	tokens, _, _ = bound(lua.PeekReply{Terms: &terms}, 10*time.Second)
	require.EqualValues(t, 1000+3001+30, tokens)
}

// lockedBuffer is read while the program writes it.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
