package operate

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// rate is the rate per second of the bucket whose tokens these tests count. The bucket is never full.
const rate = 1000

// counted returns a configuration with two buckets: checkout, whose tokens are counted, and mail, for other takes.
func counted(redis string) string {
	return fmt.Sprintf(`redis: {%s}
buckets:
  - {key: checkout, capacity: 100000000, rate: %d/s, initial: 0}
  - {key: mail, capacity: 100, rate: 1/m}
`, redis, rate)
}

// awaitRefill waits until the bucket has been refilled again, by the clock of Redis. what describes the wait.
func awaitRefill(t *testing.T, rdb *redis.Client, what string) {
	t.Helper()
	now, err := rdb.Time(t.Context()).Result()
	require.NoError(t, err)
	eventually(t, func() bool {
		p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
		return err == nil && p.Last > now.UnixMicro()
	}, patience, 10*time.Millisecond, what)
}

// requireNothingLost requires that between two accounts the refills brought exactly the tokens that were due.
func requireNothingLost(t *testing.T, tokens, last, tokensThen, lastThen int64) {
	t.Helper()
	due := float64(rate) * float64(lastThen-last) / 1e6
	require.InDelta(t, due, tokensThen-tokens, 1, "over %d µs", lastThen-last)
}

func TestAPasswordIsRotatedWithoutALostRefill(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	file := filepath.Join(t.TempDir(), "password")
	acl := func(rules ...any) {
		t.Helper()
		require.NoError(t, rdb.Do(t.Context(), append([]any{"acl", "setuser", "app"}, rules...)...).Err())
	}
	reconnect := func() { // makes clients reconnect, as when a proxy or Redis closes old connections
		t.Helper()
		require.NoError(t, rdb.Do(t.Context(), "client", "kill", "user", "app").Err())
	}
	write := func(password string) { require.NoError(t, os.WriteFile(file, []byte(password+"\n"), 0o600)) }

	acl("on", ">first", "~*", "&*", "+@all")
	write("first")
	n := startNode(t, "one", counted(fmt.Sprintf("url: %q, username: app, password_file: %q", server.URL(), file)))
	n.ready()
	awaitRefill(t, rdb, "the first refill")
	load := consume(t, rdb, "checkout")
	tokens, last := load.account(t, rdb, "checkout")

	// First both passwords are valid, then the file changes, and then the old password is removed.
	acl(">second")
	write("second")
	reconnect()
	awaitRefill(t, rdb, "a refill with the new password")
	acl("<first")
	reconnect()
	awaitRefill(t, rdb, "a refill after the old password was removed")
	tokensThen, lastThen := load.account(t, rdb, "checkout")
	requireNothingLost(t, tokens, last, tokensThen, lastThen)
	require.NotContains(t, n.Log(), "WRONGPASS")

	// If the old password is removed before the file changes, refills pause. They go on when the file has the new one.
	acl(">third", "<second")
	reconnect()
	eventually(t, func() bool {
		_, err := n.get("/readyz")
		return err != nil
	}, patience, 10*time.Millisecond,
		"the replica is not ready")
	eventually(t, func() bool { return n.status().Away != "" }, patience, 10*time.Millisecond, "the status has the reason")
	require.Contains(t, n.status().Away, "WRONGPASS")
	write("third")
	n.ready()
	awaitRefill(t, rdb, "a refill after the file has changed")
	tokensThen, lastThen = load.account(t, rdb, "checkout")
	requireNothingLost(t, tokens, last, tokensThen, lastThen)
}

func TestAFullDiskOfRedisPausesRefillsAndTheyGoOnByThemselves(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	n := startNode(t, "one", counted(fmt.Sprintf("url: %q", server.URL())))
	n.ready()
	awaitRefill(t, rdb, "the first refill")
	load := consume(t, rdb, "checkout")
	client, err := fetch.New(rdb, fetch.WithTimeout(5*time.Second))
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close(t.Context())) }()

	// A directory has the name of the snapshot. So each snapshot fails, and Redis refuses writes.
	snapshot := filepath.Join(server.DataDir(), "dump.rdb")
	require.NoError(t, os.Mkdir(snapshot, 0o700))
	require.NoError(t, rdb.ConfigSet(t.Context(), "save", "1 1").Err())
	eventually(t, func() bool { return n.status().Away != "" }, patience, 10*time.Millisecond, "the status has the reason")
	require.Contains(t, n.status().Away, "MISCONF")
	tokens, last := load.account(t, rdb, "checkout")
	n.logs("redis refuses calls: refills pause")
	_, err = n.get("/readyz")
	require.ErrorContains(t, err, "MISCONF")
	_, err = client.Take(t.Context(), "mail", 1)
	require.ErrorIs(t, err, fetch.ErrUnavailable)
	require.ErrorContains(t, err, "MISCONF")
	out, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/consumer"), "take", "mail",
		"--redis", server.URL()).CombinedOutput()
	var exit *exec.ExitError
	require.True(t, errors.As(err, &exit), "%s", out)
	require.Equal(t, 1, exit.ExitCode())
	require.Contains(t, string(out), "MISCONF")
	require.NotContains(t, string(out), "may have taken effect", "the take had no effect")

	// When the directory is removed, Redis can write its next snapshot, and everything goes on.
	require.NoError(t, os.Remove(snapshot))
	n.ready()
	awaitRefill(t, rdb, "a refill after Redis can write again")
	eventually(t, func() bool {
		r, err := client.Take(t.Context(), "mail", 1)
		return err == nil && r.OK
	},
		patience, 10*time.Millisecond, "consumers get tokens again")
	tokensThen, lastThen := load.account(t, rdb, "checkout")
	due := rate * (lastThen - last) / 1_000_000
	require.Greater(t, due, int64(2*rate), "Redis tries again after five seconds")
	require.GreaterOrEqual(t, tokensThen-tokens, int64(2*rate), "the first refill credits two seconds of tokens")
	require.LessOrEqual(t, tokensThen-tokens, due, "refills credit no more than the due tokens")
}

func TestAReplicaIsNotReadyWhileRedisIsReadOnly(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	require.NoError(t, server.Client().Do(t.Context(), "replicaof", "127.0.0.1", "1").Err())
	n := startNode(t, "one", counted(fmt.Sprintf("url: %q", server.URL())))
	n.logs("redis refuses calls: refills pause")
	_, err := n.get("/readyz")
	require.ErrorContains(t, err, "READONLY")

	require.NoError(t, server.Client().Do(t.Context(), "replicaof", "no", "one").Err())
	n.logs("redis takes calls again: refills go on")
	n.ready()
}

func TestABackupOfRedisGivesNoTokensTwiceWhileARefillerRemembers(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	n := startNode(t, "one", limit(server.URL(), 1, "1/m"))
	n.ready()
	awaitRefill(t, rdb, "the first refill")
	require.NoError(t, rdb.Save(t.Context()).Err())
	backup, err := os.ReadFile(filepath.Join(server.DataDir(), "dump.rdb"))
	require.NoError(t, err)
	restore := func() {
		t.Helper()
		server.Stop()
		require.NoError(t, os.WriteFile(filepath.Join(server.DataDir(), "dump.rdb"), backup, 0o600))
		server.Restart()
	}
	held := func() int64 {
		t.Helper()
		p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
		require.NoError(t, err)
		return p.Tokens
	}

	taken, err := lua.TakeUpTo(t.Context(), rdb, "checkout", 1000)
	require.NoError(t, err)
	require.EqualValues(t, 1000, taken.Taken)
	awaitRefill(t, rdb, "a refill after the takes")
	restore()
	eventually(t, func() bool { return held() < 10 }, patience, 10*time.Millisecond, "the bucket's new era is empty")
	n.logs("server lost writes: bucket begins a new era")

	// A refiller that was restarted meanwhile can't know that the server lost writes.
	n.Stop()
	restore()
	n.Restart()
	n.findAddr(2)
	n.ready()
	awaitRefill(t, rdb, "a refill after the restart")
	require.EqualValues(t, 1000, held())
	out, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/refiller"), "reset", "checkout", "-n", "0",
		"--redis", server.URL()).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Less(t, held(), int64(10))
}

func TestAHistoryThatCannotBeWrittenIsReportedAtOnce(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "a", limit(server.URL(), 1, "100/s"), "--history", "/dev/full")
	n.logs("history can't be written: nothing is recorded any more")
	n.ready()
}
