package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEveryContenderRunsEveryWorkload makes a few takes of each contender in each workload. All
// takes are granted, or denied if the workload says so.
func TestEveryContenderRunsEveryWorkload(t *testing.T) {
	ctx := t.Context()
	s, err := startServer(ctx)
	require.NoError(t, err)
	t.Cleanup(s.stop)
	for _, w := range workloads {
		w.keys = min(w.keys, 10)
		for _, c := range contenders() {
			if c.skip != nil && c.skip(w) {
				continue
			}
			t.Run(w.name+"/"+c.name, func(t *testing.T) {
				session, err := c.open(ctx, s, w, c.keys(w))
				require.NoError(t, err)
				defer func() { require.NoError(t, session.close()) }()
				got := 0
				for range 2 { // the second pass counts, because a limiter that can't start empty grants the first take
					got = 0
					for key := range w.keys {
						ok, err := session.take(ctx, key)
						require.NoError(t, err)
						if ok {
							got++
						}
					}
				}
				if w.denied {
					require.Zero(t, got)
				} else {
					require.Equal(t, w.keys, got)
				}
			})
		}
	}
}

func TestRunReportsEverything(t *testing.T) {
	dir := t.TempDir()
	figures, chart := filepath.Join(dir, "bench.json"), filepath.Join(dir, "bench.svg")
	var out bytes.Buffer
	args := []string{"-rounds", "1", "-time", "20ms", "-goroutines", "64", "-workload", "hot,denied", "-only",
		"fetch|EVALSHA", "-json", figures, "-chart", chart}
	require.NoError(t, run(t.Context(), args, &out, &out))
	require.Contains(t, out.String(), "hot key, goroutines: 64")
	require.Contains(t, out.String(), "takes/s, fetch, coalesced to redis_rate")

	text, err := os.ReadFile(figures)
	require.NoError(t, err)
	var r report
	require.NoError(t, json.Unmarshal(text, &r))
	require.Len(t, r.Cells, 2)
	for _, c := range r.Cells {
		for _, f := range c.Contenders {
			require.Len(t, f.Samples, 1, f.Name)
		}
		baselineFigures := c.get(baseline)
		require.NotNil(t, baselineFigures)
		require.Positive(t, baselineFigures.Median.PerSecond)
		require.Positive(t, baselineFigures.Median.RedisCPU)
		require.Positive(t, baselineFigures.BytesPerKey)
		require.InDelta(t, 1, baselineFigures.Ratio, 1e-9)
	}
	svg, err := os.ReadFile(chart)
	require.NoError(t, err)
	require.Contains(t, string(svg), "denied hot key, 64 goroutines")
}

func TestRatiosAreMediansOfRounds(t *testing.T) {
	c := cell{Contenders: []figures{
		{Name: "a", Samples: []sample{{PerSecond: 10}, {PerSecond: 40}, {PerSecond: 90}}},
		{Name: baseline, Samples: []sample{{PerSecond: 10}, {PerSecond: 20}, {PerSecond: 30}}},
	}}
	c.summarise()
	require.InDelta(t, 2, c.get("a").Ratio, 1e-9)
	require.InDelta(t, 40, c.get("a").Median.PerSecond, 1e-9)
	require.InDelta(t, 20, c.get(baseline).Median.PerSecond, 1e-9)
	_, ok := c.ratio("a", "none", perSecond)
	require.False(t, ok)
}

func TestWalkMeetsEveryKey(t *testing.T) {
	for _, w := range workloads {
		walk, met := w.walk(3), make(map[int]bool)
		for range w.keys {
			met[walk.next()] = true
		}
		require.Len(t, met, w.keys, w.name)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	for _, args := range [][]string{
		{"-rounds", "0"}, {"-time", "1us"}, {"-workload", "cold"}, {"-goroutines", "0"}, {"-only", "("}, {"extra"},
	} {
		var out bytes.Buffer
		_, err := parse(args, &out)
		require.Error(t, err, args)
	}
}
