package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFiguresBecomeAChart(t *testing.T) {
	dir := t.TempDir()
	in, out := filepath.Join(dir, "scale.json"), filepath.Join(dir, "scale.svg")
	require.NoError(t, os.WriteFile(in, []byte(`[
		{"keys": 1000, "active_buckets": 10, "replicas": 1, "interval_ns": 1000000000, "redis_cores": 0.01, "refiller_cores": 0.02},
		{"keys": 1000, "active_buckets": 1000, "replicas": 1, "interval_ns": 1000000000, "redis_cores": 0.3, "refiller_cores": 0.2}]`), 0o600))
	require.NoError(t, run([]string{in, out}))
	svg, err := os.ReadFile(out)
	require.NoError(t, err)
	require.Contains(t, string(svg), "refiller, single server, 1,000 buckets")

	require.ErrorContains(t, run([]string{in}), "two arguments")
	require.NoError(t, os.WriteFile(in, []byte(`[{"configured": true}]`), 0o600))
	require.ErrorContains(t, run([]string{in, out}), "no figures")
}
