package config_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
)

func loadShared(t *testing.T, shared string) (config.Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(good), 0o600))
	return config.Load(config.Source{Path: path,
		Shared: config.Shared{Source: "etcd:/refiller/config", Data: []byte(shared)}})
}

func TestASharedPartWithAHigherVersionReplacesTheFiles(t *testing.T) {
	t.Parallel()
	const other = "buckets: [{key: mail, capacity: 10, rate: 1/s}]\n"
	for name, tc := range map[string]struct {
		shared  string
		version int64
		key     string
	}{
		"nothing":         {"", 7, "checkout"},
		"higher":          {"version: 8\n" + other, 8, "mail"},
		"the same":        {"version: 7\n" + other, 7, "checkout"},
		"lower":           {"version: 6\n" + other, 7, "checkout"},
		"no more buckets": {"version: 8\nrefill_interval: 200ms\n", 8, "checkout"},
	} {
		c, err := loadShared(t, tc.shared)
		require.NoError(t, err, name)
		require.Equal(t, tc.version, c.Version, name)
		require.Len(t, c.Buckets, 1, name)
		require.Equal(t, tc.key, c.Buckets[0].Key, name)
		require.Equal(t, "eu-west-1", c.Region, name)
	}
	c, err := loadShared(t, "version: 8\nrefill_interval: 200ms\n")
	require.NoError(t, err)
	require.Equal(t, 200*time.Millisecond, c.RefillInterval)
	require.Equal(t, 200*time.Millisecond, c.Buckets[0].Policy.Interval)
}

func TestProblemsOfWhatIsSharedNameItsPlace(t *testing.T) {
	t.Parallel()
	for shared, says := range map[string]string{
		"version: 8\nredis: {url: x}\n":                               "etcd:/refiller/config:2:1: redis: unknown field: allowed are version",
		"version: 8\nbuckets: [{key: a, capacity: 1, rate: never}]\n": "etcd:/refiller/config:2:",
		"buckets: []\n":            "etcd:/refiller/config:1:1: version: it is required",
		"version: x\n":             "etcd:/refiller/config:1:10: version: ",
		"version: 8\nversion: 9\n": "etcd:/refiller/config:2:1: version: given twice: the first is on line 1",
		"[":                        "etcd:/refiller/config:1:1: not YAML",
		"version: 6\nbukets: []\n": "etcd:/refiller/config:2:1: bukets: unknown field: did you mean buckets?",
		"version: 8\nbuckets:\n- {key: a, capacity: 1, rate: 1/s}\n- {key: a, capacity: 1, rate: 1/s}\n": "of etcd:/refiller/config",
	} {
		_, err := loadShared(t, shared)
		require.ErrorContains(t, err, says, shared)
		var problems config.Problems
		require.ErrorAs(t, err, &problems)
	}
}
