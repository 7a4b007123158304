package operate

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

const patience = 30 * time.Second

// eventually waits until the condition is true. It calls the condition in the test's goroutine, so that the condition
// may fail the test.
func eventually(t *testing.T, condition func() bool, within, pause time.Duration, what ...any) {
	t.Helper()
	for began := time.Now(); !condition(); rest(t, pause) {
		require.Less(t, time.Since(began), within, what...)
	}
}

// node is a refiller process and its mounted ConfigMap.
type node struct {
	*testenv.Process
	t     *testing.T
	mount string
	addr  string // address of the admin server
	swaps int    // how often the file was written
}

// startNode starts a refiller. The configuration file is mounted as Kubernetes mounts a ConfigMap.
func startNode(t *testing.T, name, config string, args ...string) *node {
	t.Helper()
	n := &node{t: t, mount: t.TempDir()}
	n.configure(config)
	require.NoError(t, os.Symlink(filepath.Join("..data", "config.yaml"), filepath.Join(n.mount, "config.yaml")))
	n.Process = testenv.StartCommand(t, testenv.Command{
		Name: name, Path: testenv.Build(t, "./cmd/refiller"),
		Args: append([]string{"run", "--config", filepath.Join(n.mount, "config.yaml"), "--identity", name, "--listen",
			"127.0.0.1:0"}, args...),
	})
	n.findAddr(1)
	return n
}

var adminAddr = regexp.MustCompile(`replica starts: .*admin=(\S+)`)

// findAddr reads the address of the admin server from the log. run is the number of the process's run, from 1.
func (n *node) findAddr(run int) {
	n.t.Helper()
	eventually(n.t, func() bool {
		found := adminAddr.FindAllStringSubmatch(n.Log(), -1)
		if len(found) < run {
			return false
		}
		n.addr = found[run-1][1]
		return true
	}, patience, 5*time.Millisecond, "the replica starts")
}

// logs waits until the log has the text. The log may have it a moment after the effect is visible in Redis.
func (n *node) logs(text string) {
	n.t.Helper()
	eventually(n.t, func() bool { return strings.Contains(n.Log(), text) }, patience, 5*time.Millisecond,
		"the log has %q", text)
}

// configure swaps the mounted file as kubelet does.
func (n *node) configure(text string) {
	n.t.Helper()
	n.swaps++
	dir := fmt.Sprintf("..2026_%d", n.swaps)
	require.NoError(n.t, os.Mkdir(filepath.Join(n.mount, dir), 0o700))
	require.NoError(n.t, os.WriteFile(filepath.Join(n.mount, dir, "config.yaml"), []byte(text), 0o600))
	require.NoError(n.t, os.Symlink(dir, filepath.Join(n.mount, "..data_tmp")))
	require.NoError(n.t, os.Rename(filepath.Join(n.mount, "..data_tmp"), filepath.Join(n.mount, "..data")))
}

// get reads a page of the admin server.
func (n *node) get(path string) (string, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.addr+path, nil)
	if err != nil {
		return "", err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", res.Status, body)
	}
	return string(body), err
}

func (n *node) status() admin.Status {
	n.t.Helper()
	body, err := n.get("/status")
	require.NoError(n.t, err)
	var s admin.Status
	require.NoError(n.t, json.Unmarshal([]byte(body), &s))
	return s
}

// metric returns the sum of the samples of a metric whose lines contain all of the
// labels, and the number of these samples.
func (n *node) metric(name string, labels ...string) (sum float64, samples int) {
	n.t.Helper()
	body, err := n.get("/metrics")
	require.NoError(n.t, err)
lines:
	for line := range strings.Lines(body) {
		rest, found := strings.CutPrefix(line, name)
		if !found || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(rest, l) {
				continue lines
			}
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
		require.NoError(n.t, err)
		sum += v
		samples++
	}
	return sum, samples
}

// ready waits until the readiness probe succeeds.
func (n *node) ready() {
	n.t.Helper()
	eventually(n.t, func() bool {
		_, err := n.get("/readyz")
		return err == nil
	}, patience, 10*time.Millisecond,
		"the replica is ready")
}

// consumer takes all tokens of a bucket, again and again.
type consumer struct {
	mu    sync.Mutex
	taken int64
}

// consume starts a consumer that ends with the test.
func consume(t *testing.T, rdb *redis.Client, key string) *consumer {
	t.Helper()
	c := &consumer{}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		pace := time.NewTicker(2 * time.Millisecond)
		defer pace.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-pace.C:
			}
			c.mu.Lock()
			r, err := lua.TakeUpTo(ctx, rdb, key, 1_000_000)
			if err == nil && r.OK { // errors are ignored: an outage shows in the number of taken tokens
				c.taken += r.Taken
			}
			c.mu.Unlock()
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return c
}

// account returns the number of tokens that all refills so far have brought: those
// that were taken and those in the bucket. It also returns the time of the last refill.
func (c *consumer) account(t *testing.T, rdb *redis.Client, key string) (tokens, last int64) {
	t.Helper()
	c.mu.Lock() // no take changes the numbers meanwhile
	defer c.mu.Unlock()
	p, err := lua.Peek(t.Context(), rdb, key, 1)
	require.NoError(t, err)
	return c.taken + p.Tokens, p.Last
}

// rest lets the fleet run for a while.
func rest(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}
