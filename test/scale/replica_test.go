package scale

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is how long a test waits for a condition. On a machine that isn't busy it comes within moments.
const patience = 5 * time.Minute

// replica is a refiller process.
type replica struct {
	*testenv.Process
	admin   string        // URL of its admin server
	started time.Duration // time from its start until it was ready
}

var adminAddr = regexp.MustCompile(`replica starts: .*admin=(\S+)`)

// startReplica starts a refiller and waits until it is ready.
func startReplica(t *testing.T, name, config string) *replica {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(config), 0o600))
	binary := testenv.Build(t, "./cmd/refiller")
	begin := time.Now()
	r := &replica{Process: testenv.StartCommand(t, testenv.Command{
		Name: name, Path: binary, Args: []string{"run", "--config", path, "--identity", name},
	})}
	found, err := r.WaitLog(ctx, adminAddr)
	require.NoError(t, err)
	r.admin = "http://" + found[1]
	for ready := false; !ready; ready, _ = r.get(ctx, t, "/readyz") {
		time.Sleep(10 * time.Millisecond)
	}
	r.started = time.Since(begin)
	return r
}

// get makes a request to the admin server. ok reports whether the status is 200.
func (r *replica) get(ctx context.Context, t *testing.T, path string) (ok bool, body []byte) {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.admin+path, nil)
	require.NoError(t, err)
	res, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	body, err = io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode == http.StatusOK, body
}

// counts has metrics of a replica.
type counts struct {
	applied float64             // refills that were applied
	lag     map[float64]float64 // number of refills that were at most so many seconds late
	cpu     float64             // processor time in seconds
	memory  float64             // resident memory in bytes
	active  float64             // buckets of templates in the replica's shards
	shards  float64             // shards of the active sets that the replica refills
}

var bound = regexp.MustCompile(`le="([^"]+)"`)

// scrape reads a replica's metrics.
func (r *replica) scrape(t *testing.T) counts {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := counts{lag: map[float64]float64{}}
	ok, body := r.get(ctx, t, "/metrics")
	require.True(t, ok)
	lines := bufio.NewScanner(bytes.NewReader(body))
	for lines.Scan() {
		series, number, _ := strings.Cut(lines.Text(), " ")
		if i := strings.LastIndex(lines.Text(), "} "); i >= 0 {
			series, number = lines.Text()[:i], lines.Text()[i+2:]
		}
		if strings.HasPrefix(series, "#") {
			continue
		}
		value, err := strconv.ParseFloat(number, 64)
		require.NoError(t, err, "%s", lines.Text())
		name, labels, _ := strings.Cut(series, "{")
		switch name {
		case "refiller_refill_calls_total", "refiller_template_refill_calls_total":
			if strings.Contains(labels, `status="applied"`) {
				c.applied += value
			}
		case "refiller_refill_lag_seconds_bucket", "refiller_template_refill_lag_seconds_bucket":
			le, err := strconv.ParseFloat(bound.FindStringSubmatch(labels)[1], 64)
			require.NoError(t, err)
			c.lag[le] += value
		case "process_cpu_seconds_total":
			c.cpu += value
		case "process_resident_memory_bytes":
			c.memory += value
		case "refiller_template_active_buckets":
			c.active += value
		case "refiller_template_shards":
			c.shards += value
		}
	}
	require.NoError(t, lines.Err())
	return c
}
