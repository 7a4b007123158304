package scale

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Flags, after -args.
var (
	templates = flag.String(
		"templates", "", "how many buckets of a template, separated by commas; none without this and -configured")
	configured = flag.String("configured", "", "how many configured buckets")
	percents   = flag.String("active", "1,10,100", "how many percent of a template's buckets are active")
	stores     = flag.String("stores", "single", "single, cluster, or both with a comma")
	replicas   = flag.String("replicas", "1", "how many replicas")
	window     = flag.Duration("window", 10*time.Second, "how long each part of a measurement takes")
	out        = flag.String("json", "", "file to write the figures to; those of other scenarios that it holds stay")
)

// numbers reads a list of numbers.
func numbers(t *testing.T, name, text string) (list []int) {
	t.Helper()
	for part := range strings.SplitSeq(text, ",") {
		if part == "" {
			continue
		}
		n, err := strconv.Atoi(strings.ReplaceAll(part, "_", ""))
		require.NoError(t, err, "-%s: want whole numbers with commas between them", name)
		require.GreaterOrEqual(t, n, 0, "-%s", name)
		list = append(list, n)
	}
	return list
}

// TestScale measures the scenarios that the flags name. It tests only that there are refills.
// Without flags it measures a few small scenarios, each for a moment.
func TestScale(t *testing.T) {
	var kinds []bool
	for store := range strings.SplitSeq(*stores, ",") {
		require.Contains(t, []string{"single", "cluster"}, store, "-stores")
		kinds = append(kinds, store == "cluster")
	}
	list := scenarios(numbers(t, "configured", *configured), numbers(t, "templates", *templates),
		numbers(t, "active", *percents),
		kinds, numbers(t, "replicas", *replicas))
	if len(list) == 0 {
		const interval = 200 * time.Millisecond
		*window = interval
		list = []scenario{
			{Keys: 300, Active: 30, Replicas: 2, Interval: interval},
			{Keys: 100, Active: 50, Cluster: true, Replicas: 1, Interval: interval},
			{Keys: 100, Active: 100, Configured: true, Replicas: 1, Interval: interval},
		}
	}
	var measured []figures
	for _, sc := range list {
		ok := t.Run(sc.String(), func(t *testing.T) {
			f := measure(t, sc, *window)
			if sc.Active > 0 {
				require.Positive(t, f.RefillsPerSecond)
			}
			require.Positive(t, f.BytesPerBucket)
			measured = append(measured, f)
		})
		require.True(t, ok)
		var b strings.Builder
		require.NoError(t, writeTable(&b, measured))
		fmt.Print("\n" + b.String()) // t.Log would come at the end only
	}
	if *out != "" {
		require.NoError(t, writeJSON(*out, merged(t, *out, measured)))
	}
}

// merged returns the figures of a file together with the measured ones, which replace figures of the same scenarios.
func merged(t *testing.T, path string, measured []figures) []figures {
	t.Helper()
	var list []figures
	b, err := os.ReadFile(filepath.Clean(path))
	if err == nil {
		require.NoError(t, json.Unmarshal(b, &list), "%s has no list of figures", path)
	} else {
		require.ErrorIs(t, err, os.ErrNotExist)
	}
	for _, f := range measured {
		at := -1
		for i := range list {
			if list[i].scenario == f.scenario {
				at = i
			}
		}
		if at >= 0 {
			list[at] = f
		} else {
			list = append(list, f)
		}
	}
	return list
}

func TestQuantilesAreReadFromWhatWasAddedToAHistogram(t *testing.T) {
	t.Parallel()
	before := map[float64]float64{0.1: 1000, 0.2: 1000, 1: 1000}
	after := map[float64]float64{0.1: 1050, 0.2: 1090, 1: 1100}
	require.InDelta(t, 0.1, quantile(before, after, 0.5), 1e-9)
	require.InDelta(t, 0.15, quantile(before, after, 0.7), 1e-9)
	require.InDelta(t, 0.2, quantile(before, after, 0.99), 1e-9, "the result is at most the last bound but one")
	require.Zero(t, quantile(nil, nil, 0.5))
}
