package operate

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// limit returns a configuration with one bucket.
func limit(url string, version int, rate string) string {
	return fmt.Sprintf("redis: {url: %q}\nversion: %d\nbuckets:\n  - {key: checkout, capacity: 1000, rate: %s}\n", url,
		version, rate)
}

func TestALoweredLimitIsInForceEverywhereSoonAndNeverRefills(t *testing.T) {
	for _, mode := range []string{"race", "etcd"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			server := testenv.Redis(t)
			rdb := server.Client()
			proxy := testenv.Proxy(t, server.Addr(), 0)
			election := ""
			if mode == "etcd" {
				etcd := testenv.Etcd(t, 1)
				election = fmt.Sprintf("election: {mode: etcd, endpoints: [%q], ttl: 2s}\n", etcd.Endpoints()[0])
			}
			config := func(url string, version int, rate string) string { return election + limit(url, version, rate) }

			// The replica that will be cut off starts first, so that it leads if there is an election.
			cutURL := "redis://" + proxy.Addr() + "/0"
			cut := startNode(t, "cut", config(cutURL, 1, "1000/s"))
			eventually(t, func() bool {
				_, err := lua.Peek(t.Context(), rdb, "checkout", 1)
				return err == nil
			}, patience,
				10*time.Millisecond)
			others := []*node{startNode(t, "a", config(server.URL(), 1, "1000/s")),
				startNode(t, "b", config(server.URL(), 1, "1000/s"))}
			for _, n := range others {
				n.ready()
			}
			load := consume(t, rdb, "checkout")
			rest(t, time.Second)

			inForce := func(version int64, everywhere ...*node) {
				t.Helper()
				began := time.Now()
				eventually(t, func() bool {
					p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
					have := err == nil && p.Terms.Fence.Epoch == version
					for _, n := range everywhere {
						have = have && n.status().Config == version
					}
					return have
				}, 10*time.Second, 10*time.Millisecond, "the version is in force within a second on an idle machine")
				t.Logf("%s: version %d is in force after %s", mode, version, time.Since(began))
			}

			// issued returns the number of tokens that refills brought since an earlier account, and the seconds in between on
			// the clock of Redis. It waits until there have been refills for a while.
			issued := func(tokens, last int64, while time.Duration) (n int64, seconds float64) {
				t.Helper()
				eventually(t, func() bool {
					now, refilled := load.account(t, rdb, "checkout")
					n, seconds = now-tokens, float64(refilled-last)/1e6
					return seconds >= while.Seconds()
				}, patience, 20*time.Millisecond, "refills go on")
				return n, seconds
			}

			proxy.Cut()
			for _, n := range others {
				n.configure(config(server.URL(), 2, "10/s"))
			}
			inForce(2, others...)
			const window = 3 * time.Second
			tokens, last := load.account(t, rdb, "checkout")
			n, seconds := issued(tokens, last, window)
			require.LessOrEqual(t, float64(n), 10*seconds+1, "the limit holds")

			require.NoError(t, proxy.Heal())
			tokens, last = load.account(t, rdb, "checkout")
			eventually(t, func() bool {
				outdated, _ := cut.metric("refiller_buckets_outdated")
				return outdated == 1
			}, patience, 20*time.Millisecond, "the replica with the old file reports an outdated bucket")
			n, seconds = issued(tokens, last, window)
			require.LessOrEqual(t, float64(n), 10*seconds+1, "the old file can't put the old limit back")

			// When no other replica is left, the replica with the old file refills with the policy in force.
			for _, n := range others {
				n.Kill()
			}
			tokens, last = load.account(t, rdb, "checkout")
			n, seconds = issued(tokens, last, window)
			require.LessOrEqual(t, float64(n), 10*seconds+1)
			require.Positive(t, n, "the replica with the old file refills")

			cut.configure(config(cutURL, 3, "1000/s"))
			inForce(3, cut)
			tokens, last = load.account(t, rdb, "checkout")
			n, seconds = issued(tokens, last, window)
			require.GreaterOrEqual(t, float64(n), 900*(seconds-1), "the rate is raised again")
			require.LessOrEqual(t, float64(n), 1000*seconds+1)
		})
	}
}

func TestABadFileIsRefusedAndTheOldOneStaysInForce(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "a", limit(server.URL(), 1, "100/s"))
	n.ready()
	n.configure(limit(server.URL(), 2, "never") + "typo: 1\n")
	eventually(t, func() bool { return n.status().Reload.Refused == 1 }, patience, 10*time.Millisecond)
	s := n.status()
	require.EqualValues(t, 1, s.Config)
	require.Equal(t, "100/s", s.Buckets[0].Rate)
	require.Len(t, s.Reload.Problems, 2, "every problem is reported")
	path := filepath.Join(n.mount, "config.yaml")
	require.Contains(t, s.Reload.Problems[0], path+":4:")
	require.Contains(t, s.Reload.Problems[1], path+":5:1: typo")
	n.logs("config refused: the old one stays in force")
	n.logs("buckets[0].rate")
	refused, _ := n.metric("refiller_config_reloads_total", `result="refused"`)
	require.EqualValues(t, 1, refused)
	ok, _ := n.metric("refiller_config_last_reload_ok")
	require.Zero(t, ok)

	n.configure(limit(server.URL(), 2, "200/s"))
	eventually(t, func() bool { return n.status().Reload.Applied == 1 }, patience, 10*time.Millisecond)
	require.EqualValues(t, 2, n.status().Config)
	ok, _ = n.metric("refiller_config_last_reload_ok")
	require.EqualValues(t, 1, ok)
}

func TestHangupReadsTheFileAgain(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "a", limit(server.URL(), 1, "100/s"))
	n.ready()
	n.Signal(syscall.SIGHUP)
	eventually(t, func() bool { return n.status().Reload.Unchanged == 1 }, patience, 10*time.Millisecond)
	require.Equal(t, "SIGHUP", n.status().Reload.Cause)
	require.True(t, n.Running())

	// If the file is missing, the reload is refused.
	path := filepath.Join(n.mount, "config.yaml")
	require.NoError(t, os.Rename(path, path+".away"))
	n.Signal(syscall.SIGHUP)
	eventually(t, func() bool { return n.status().Reload.Result == "refused" }, patience, 10*time.Millisecond)
	require.NoError(t, os.Rename(path+".away", path))
	eventually(t, func() bool { return n.status().Reload.Result == "unchanged" }, patience, 10*time.Millisecond)
}

// A configuration that is written to etcd changes all replicas at once, if it is valid
// and newer. An older file then changes nothing.
func TestADocumentInEtcdChangesAllReplicas(t *testing.T) {
	t.Parallel()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	client, rdb := etcd.Client(), server.Client()
	const key = "/refiller/config"
	file := func(version int, rate string) string {
		return limit(server.URL(), version, rate) + fmt.Sprintf("election: {endpoints: [%q]}\n", etcd.Endpoints()[0])
	}
	put := func(text string) {
		t.Helper()
		_, err := client.Put(t.Context(), key, text)
		require.NoError(t, err)
	}
	document := func(version int, rate string) string {
		return fmt.Sprintf("version: %d\nbuckets: [{key: checkout, capacity: 1000, rate: %s}]\n", version, rate)
	}
	put(document(2, "200/s"))
	nodes := []*node{startNode(t, "a", file(1, "100/s"), "--config-etcd"),
		startNode(t, "b", file(1, "100/s"), "--config-etcd")}
	for _, n := range nodes {
		n.ready()
	}
	everywhere := func(version int64, rate string) {
		t.Helper()
		began := time.Now()
		eventually(t, func() bool {
			p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
			there := err == nil && p.Terms.Fence.Epoch == version
			for _, n := range nodes {
				s := n.status()
				there = there && s.Config == version && s.Buckets[0].Rate == rate
			}
			return there
		}, patience, 10*time.Millisecond, "version %d", version)
		t.Logf("version %d is in force after %s", version, time.Since(began).Round(time.Millisecond))
	}
	refused := func(n int64, says string) {
		t.Helper()
		for _, node := range nodes {
			eventually(t, func() bool { return node.status().Reload.Refused == n }, patience, 10*time.Millisecond, says)
			require.Contains(t, node.status().Reload.Problems[0], says)
		}
	}
	everywhere(2, "200/s") // the document in etcd is in force from the start
	put(document(3, "300/s"))
	everywhere(3, "300/s")
	require.Equal(t, key+" changed in etcd", nodes[0].status().Reload.Cause)
	put("version: 4\nbuckets: [{key: checkout, capacity: 1000, rate: never}]\n")
	refused(1, "etcd:"+key+":2:")
	put(document(2, "900/s"))
	refused(2, "2 is below 3")
	put(document(3, "900/s"))
	refused(3, "3 is in force already")
	everywhere(3, "300/s")
	put(document(3, "300/s"))
	nodes[0].configure(file(2, "900/s"))
	eventually(t, func() bool { return nodes[0].status().Reload.Cause == "file changed" }, patience, 10*time.Millisecond)
	everywhere(3, "300/s")
	for _, n := range nodes {
		n.configure(file(4, "400/s"))
	}
	everywhere(4, "400/s") // the file is newer than the document

	// If the document is invalid when a replica starts, the replica reports that, and uses its file.
	put("version: x\n")
	n := startNode(t, "c", file(4, "400/s"), "--config-etcd")
	n.ready()
	eventually(t, func() bool { return n.status().Reload.Refused == 1 }, patience, 10*time.Millisecond)
	require.EqualValues(t, 4, n.status().Config)
}

// A replica that starts with another policy under the version in force doesn't change the policy. It shows the policy
// that is enforced, and a conflict: on its page, in its JSON, metrics and log, and in "refiller status" and "refiller
// diff".
func TestStatusShowsThePolicyInForceAndMarksAConflict(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	first := startNode(t, "first", limit(server.URL(), 1,
		"5/s")+"templates: [{prefix: \"user:\", capacity: 9, rate: 1/s}]\n")
	first.ready()
	require.Eventually(t, func() bool {
		_, err := lua.Peek(t.Context(), server.Client(), "checkout", 1)
		return err == nil
	}, patience, 10*time.Millisecond, "the first replica's policy is in force")
	first.Stop()

	other := limit(server.URL(), 1, "50/s") + "templates: [{prefix: \"user:\", capacity: 90, rate: 1/s}]\n"
	n := startNode(t, "second", other)
	n.ready()
	require.Eventually(t, func() bool { return n.status().Conflicts.Total == 2 }, patience, 10*time.Millisecond)
	s := n.status()
	require.Equal(t, []string{"checkout"}, s.Conflicts.Buckets)
	require.Contains(t, s.Conflicts.Templates, "other templates are published under this version")
	require.Equal(t, "5/s", s.Buckets[0].Rate, "the status has the enforced rate")
	require.True(t, s.Buckets[0].Conflict)
	require.Equal(t, []config.Difference{{Field: "rate", InForce: "5/s", File: "50/s"}}, s.Buckets[0].Differs)
	for name, want := range map[string]float64{
		"refiller_config_last_reload_ok": 0, "refiller_buckets_conflicting": 1, "refiller_templates_conflicting": 1,
		"refiller_pools_conflicting": 0,
	} {
		got, _ := n.metric(name)
		require.InDelta(t, want, got, 0, name)
	}
	page, err := n.get("/")
	require.NoError(t, err)
	require.Contains(t, page, "The policies in force under version 1 differ")
	require.NotContains(t, page, "50/s")
	n.logs("policy changed under the same version and is ignored")

	program := testenv.Build(t, "./cmd/refiller")
	out, err := exec.CommandContext(t.Context(), program, "status", "--addr", n.addr).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "CONFLICT")
	require.Contains(t, string(out), "checkout: rate is 5/s in force, and 50/s in the file")
	diff := exec.CommandContext(t.Context(), program, "diff", "-")
	diff.Stdin = strings.NewReader(other)
	out, err = diff.Output()
	require.Equal(t, 3, diff.ProcessState.ExitCode(), "%v", err)
	require.Contains(t, string(out), "! bucket \"checkout\" conflict: replicas would ignore it, because version 1 is in "+
		"force: raise the version\n    rate: 5/s → 50/s\n")

	n.configure(strings.Replace(other, "version: 1", "version: 2", 1))
	require.Eventually(t, func() bool {
		s := n.status()
		return s.Conflicts.Total == 0 && s.Buckets[0].Rate == "50/s" && !s.Buckets[0].Conflict
	}, patience, 10*time.Millisecond)
	ok, _ := n.metric("refiller_config_last_reload_ok")
	require.InDelta(t, 1, ok, 0)
}

// An older file that is put back without a higher version has no effect, even after a restart of the replica. The
// status and the metrics show that for as long as it is true.
func TestAnOlderFileThatIsPutBackIsShownAsWithoutEffect(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	prefixed := func(capacity int) string {
		return fmt.Sprintf("templates: [{prefix: \"user:\", capacity: %d, rate: 1/s}]\n", capacity)
	}
	n := startNode(t, "one", limit(server.URL(), 7, "50/s")+prefixed(9))
	n.ready()
	require.Eventually(t, func() bool {
		refills, _ := n.metric("refiller_refills_total")
		return refills > 0
	}, patience,
		10*time.Millisecond)
	n.Stop()

	n = startNode(t, "one", limit(server.URL(), 6, "5/s")+prefixed(90))
	n.ready()
	require.Eventually(t, func() bool {
		refills, _ := n.metric("refiller_refills_total")
		return n.status().Outdated.Total == 2 && refills > 10
	}, patience, 10*time.Millisecond)
	s := n.status()
	require.Equal(t, []string{"checkout"}, s.Outdated.Buckets)
	require.Equal(t, "the templates of version 7 are published", s.Outdated.Templates)
	require.Equal(t, "50/s", s.Buckets[0].Rate, "the status has the enforced rate")
	for name, want := range map[string]float64{
		"refiller_buckets_outdated": 1, "refiller_templates_outdated": 1, "refiller_pools_outdated": 0,
		"refiller_buckets_conflicting": 0,
	} {
		got, _ := n.metric(name)
		require.InDelta(t, want, got, 0, name)
	}
	page, err := n.get("/")
	require.NoError(t, err)
	require.Contains(t, page, "file has version 6, and a later version is in force")
	out, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/refiller"), "status", "--addr", n.addr).Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "OLD FILE  this replica's file has version 6")

	n.configure(limit(server.URL(), 8, "5/s") + prefixed(90))
	require.Eventually(t, func() bool {
		s := n.status()
		return s.Outdated.Total == 0 && s.Buckets[0].Rate == "5/s"
	}, patience, 10*time.Millisecond)
}

// A replica that has only templates may have nothing to refill. It still reports that Redis is unavailable.
func TestAReplicaOfTemplatesReportsAnUnavailableRedis(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "one", fmt.Sprintf("redis: {url: %q}\ntemplates: [{prefix: \"user:\", capacity: 9, rate: 1/s}]\n",
		server.URL()))
	n.ready()
	require.Empty(t, n.status().Away)
	server.Kill()
	require.Eventually(t, func() bool { return n.status().Away != "" }, patience, 10*time.Millisecond)
	page, err := n.get("/")
	require.NoError(t, err)
	require.Contains(t, page, "Refills pause:</strong>")
	out, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/refiller"), "status", "--addr", n.addr).Output()
	require.NoError(t, err)
	require.Contains(t, string(out), "PAUSED    refills are paused: ")
	server.Restart()
	require.Eventually(t, func() bool { return n.status().Away == "" }, patience, 10*time.Millisecond)
}

// An override stays in force when its key is configured as a bucket later. No version of the file changes that, so
// neither status nor metrics report the file as outdated.
func TestABucketWithAnOverrideIsShownAsSuch(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	program := testenv.Build(t, "./cmd/refiller")
	run := func(stdin string, args ...string) (string, int) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.Output()
		require.NotNil(t, cmd.ProcessState, err)
		return string(out), cmd.ProcessState.ExitCode()
	}
	templates := "templates: [{prefix: \"check\", capacity: 9, rate: 1/s}]\n"
	n := startNode(t, "one", fmt.Sprintf("redis: {url: %q}\nversion: 1\n", server.URL())+templates)
	n.ready()
	eventually(t, func() bool {
		_, code := run("", "limit", "set", "checkout", "--rate", "2/s", "--redis", server.URL())
		return code == 0
	}, patience, 50*time.Millisecond, "the template is published")
	_, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/consumer"), "take", "checkout", "--redis",
		server.URL()).Output()
	require.NoError(t, err)

	later := limit(server.URL(), 2, "5/s") + templates
	n.configure(later)
	eventually(t, func() bool {
		s := n.status()
		refills, _ := n.metric("refiller_refills_total", `bucket="checkout"`)
		return s.Config == 2 && refills > 3
	}, patience, 10*time.Millisecond)
	s := n.status()
	require.True(t, s.Buckets[0].Override)
	require.False(t, s.Buckets[0].Outdated)
	require.Equal(t, "2/s", s.Buckets[0].Rate, "the status has the enforced rate")
	require.Zero(t, s.Outdated.Total)
	require.Zero(t, s.Conflicts.Total)
	outdated, _ := n.metric("refiller_buckets_outdated")
	require.Zero(t, outdated)
	n.logs("bucket has an override, which counts instead of the config")
	page, err := n.get("/")
	require.NoError(t, err)
	require.Contains(t, page, "override")
	require.NotContains(t, page, "4503599627370496")
	out, _ := run("", "status", "--addr", n.addr)
	require.Regexp(t, `checkout .* 2/s .* override\n`, out)
	out, code := run(later, "diff", "-")
	require.Zero(t, code)
	require.Equal(t, "no change\nnote: bucket \"checkout\" has an override, which replaces the policy in the file: "+
		"to remove it, run refiller limit unset\n", out)

	out, code = run("", "limit", "unset", "checkout", "--redis", server.URL())
	require.Regexp(t, "^checkout: no template matches this key any more; its bucket holds [0-9]+ tokens\n$", out)
	require.Zero(t, code)
	eventually(t, func() bool {
		b := n.status().Buckets[0]
		return b.Rate == "5/s" && !b.Override
	}, patience,
		10*time.Millisecond, "the file's rate is in force again")
}
