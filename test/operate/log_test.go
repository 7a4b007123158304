package operate

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// longestEnd is the longest time that docs/operations.md allows for the end of a replica.
const longestEnd = 12 * time.Second

// fullPipe returns the write end of a pipe that is full and that nothing reads.
func fullPipe(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	require.NoError(t, w.SetWriteDeadline(time.Now().Add(time.Second)))
	_, err = w.Write(bytes.Repeat([]byte{'\n'}, 1<<24))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	return w
}

// closedPipe returns the write end of a pipe whose read end is closed.
func closedPipe(t *testing.T) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	return w
}

// requireWorkWithout requires that a program works and ends, although its log can't be written. works reports whether
// it has done another piece of its work.
func requireWorkWithout(t *testing.T, log *os.File, works func() bool, program string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), testenv.Build(t, program), args...)
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	require.NoError(t, log.Close())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the program, which the end of the test kills
	for range 3 {
		eventually(t, works, patience, 10*time.Millisecond, "the program works")
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	began := time.Now()
	select {
	case err := <-ended:
		require.NoError(t, err)
		t.Logf("the program ended after %s", time.Since(began))
	case <-time.After(longestEnd):
		require.Fail(t, "the program does not end")
	}
}

// requireReplicaWithout requires that a replica refills and ends, although its log can't be written.
func requireReplicaWithout(t *testing.T, log *os.File) {
	t.Helper()
	server := testenv.Redis(t)
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(limit(server.URL(), 1, "100/s")), 0o600))
	last := int64(0)
	refills := func() bool {
		p, err := lua.Peek(t.Context(), server.Client(), "checkout", 1)
		more := err == nil && p.Version.Index > last
		last = max(last, p.Version.Index)
		return more
	}
	requireWorkWithout(t, log, refills, "./cmd/refiller", "run", "--config", path, "--listen", "127.0.0.1:0")
}

// requireSidecarWithout requires that a sidecar answers takes and ends, although its log can't be written.
func requireSidecarWithout(t *testing.T, log *os.File) {
	t.Helper()
	server := testenv.Redis(t)
	createBucket(t, server.Client())
	socket := filepath.Join(t.TempDir(), "http")
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}}
	defer client.CloseIdleConnections()
	takes := func() bool {
		res, err := client.Post("http://sidecar/v1/take", "application/json", strings.NewReader(`{"key":"checkout"}`))
		return err == nil && res.Body.Close() == nil && res.StatusCode == http.StatusOK
	}
	requireWorkWithout(t, log, takes, "./cmd/consumer", "serve", "--redis", server.URL(), "--http", "unix:"+socket,
		"--grpc", "none", "--deadline", "5s")
}

// createBucket creates the bucket checkout with 1000 tokens.
func createBucket(t *testing.T, rdb redis.UniversalClient) {
	t.Helper()
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(1)}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "checkout", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
}

func TestALogThatIsNotReadStopsNoRefills(t *testing.T) {
	t.Parallel()
	requireReplicaWithout(t, fullPipe(t))
}

func TestALogThatIsNotReadStopsNoSidecar(t *testing.T) {
	t.Parallel()
	requireSidecarWithout(t, fullPipe(t))
}

func TestALogWhoseReaderHasEndedEndsNoReplica(t *testing.T) {
	t.Parallel()
	requireReplicaWithout(t, closedPipe(t))
}

func TestALogWhoseReaderHasEndedEndsNoSidecar(t *testing.T) {
	t.Parallel()
	requireSidecarWithout(t, closedPipe(t))
}
