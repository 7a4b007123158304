package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/drift"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const before = `region: eu
redis: {url: %q}
election: {endpoints: [%q], ttl: 2s}
version: 7
buckets:
  - {key: same, capacity: 100, rate: 50/s}
  - {key: lower, capacity: 100, rate: 50/s, degraded: local}
  - {key: stepped, capacity: 100, every: 1h, tokens: 10}
  - {key: gone, capacity: 100, rate: 50/s}
templates:
  - {prefix: "user:", capacity: 60, rate: 1/s}
  - {prefix: "old:", capacity: 60, rate: 1/s}
pools:
  - {name: payments, rate: 1000/s, capacity: 2000, regions: {eu: {weight: 2}, us: {}}}
`

// putInForce runs a replica with a configuration until it is in force in Redis and etcd.
func putInForce(t *testing.T, text string, rdb redis.UniversalClient, keys ...string) {
	t.Helper()
	cfg, err := config.Load(config.Source{Data: []byte(text + "listen: 127.0.0.1:0\n")})
	require.NoError(t, err)
	r, err := replica.New(cfg, replica.Options{Identity: "a"})
	require.NoError(t, err)
	ctx, stop := testContext(t)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	require.Eventually(t, func() bool {
		for _, key := range keys {
			p, err := lua.Peek(t.Context(), rdb, key, 1)
			if err != nil || p.Terms == nil || !p.Terms.Pool && p.Terms.FileVersion() < cfg.Version {
				return false
			}
		}
		set, _, err := lua.ReadTemplates(t.Context(), rdb, "")
		return err == nil && set != nil && set.Version() >= cfg.Version
	}, 30*time.Second, 10*time.Millisecond)
	stop()
	require.NoError(t, <-done)
}

func TestDiffShowsWhatAFileWouldChange(t *testing.T) {
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	rdb := server.Client()
	text := fmt.Sprintf(before, server.URL(), etcd.Endpoints()[0])
	path := filepath.Join(t.TempDir(), "new.yaml")
	diff := func(pairs ...string) (code int, stdout, stderr string) {
		require.NoError(t, os.WriteFile(path, []byte(strings.NewReplacer(pairs...).Replace(text)), 0o600))
		return runWith(t, nil, "diff", path)
	}

	code, stdout, stderr := diff()
	require.Equal(t, 3, code, stderr)
	require.Equal(t, `+ bucket "gone" added
+ bucket "lower" added
+ bucket "same" added
+ bucket "stepped" added
+ template "old:" added
+ template "user:" added
+ pool "payments" added
`, stdout, "no policy is in force yet")

	putInForce(t, text, rdb, "same", "lower", "stepped", "gone", "payments")
	code, stdout, stderr = diff()
	require.Zero(t, code, stderr+stdout)
	require.Equal(t, "no change\n", stdout)

	code, stdout, stderr = diff("version: 7", "version: 8")
	require.Equal(t, 3, code, stderr)
	require.Equal(t, "~ version 7 → 8\n~ pools_version 7 → 8\n", stdout)

	changes := []string{
		"  - {key: gone, capacity: 100, rate: 50/s}\n", "  - {key: new, capacity: 100, rate: 50/s}\n",
		"{key: lower, capacity: 100, rate: 50/s, degraded: local}", "{key: lower, capacity: 50, rate: 10/m}",
		"every: 1h", "cron: \"30 * * * *\"", // no common instants, so the next instants always differ
		"prefix: \"old:\"", "prefix: \"new:\"", "capacity: 60, rate: 1/s}\n  - {prefix: \"old",
		"capacity: 60, rate: 2/s, max_keys: 9}\n  - {prefix: \"new",
		"rate: 1000/s, capacity: 2000", "rate: 1000/s, floor_share: 40%, capacity: 2000", "us: {}",
		"us: {floor: 100/s}, ap: {}",
	}
	const changed = `~ bucket "lower" changed
    capacity: 100 → 50
    rate: 50/s → 10/m
    degraded: local → closed
+ bucket "new" added
~ bucket "stepped" changed
    schedule: SCHEDULE → 30 * * * * UTC
+ template "new:" added
- template "old:" removed
~ template "user:" changed
    rate: 1/s → 2/s
    max_keys: 0 → 9
~ pool "payments" changed
    floor_share: 20% → 40%
    regions.us.floor: none → 100/s
    regions.ap.weight: none → 1
`
	lines := func(text string) []string {
		var kept []string
		for _, line := range strings.Split(text, "\n") {
			if before, after, found := strings.Cut(line, "schedule: next "); found {
				_, after, _ = strings.Cut(after, " → ")
				line = before + "schedule: SCHEDULE → " + after
			}
			if !strings.HasPrefix(line, "- bucket \"gone\"") { // it is refilled until a minute after this
				kept = append(kept, line)
			}
		}
		return kept
	}
	code, stdout, stderr = diff(append(changes, "version: 7", "version: 8")...)
	require.Equal(t, 3, code, stderr)
	require.Contains(t, stdout,
		"- bucket \"gone\" removed: consumers can use it until you delete it (refiller delete)\n")
	require.Equal(t, lines("~ version 7 → 8\n"+strings.Replace(changed, "~ pool ", "~ pools_version 7 → 8\n~ pool ", 1)),
		lines(stdout))

	code, stdout, stderr = diff(changes...)
	require.Equal(t, 3, code, stderr)
	require.Contains(t, stdout, "! bucket \"lower\" conflict: replicas would ignore it, because version 7 is in force: "+
		"raise the version\n    capacity: 100 → 50\n")
	require.Contains(t, stdout, "! template \"new:\" conflict")
	require.Contains(t, stdout, "! pool \"payments\" conflict")
	require.Contains(t, stdout, "+ bucket \"new\" added\n", "a new bucket needs no new version")

	code, stdout, stderr = diff("{key: same,", "{key: payments,", "name: payments", "name: same", "version: 7",
		"version: 8")
	require.Equal(t, 3, code, stderr)
	require.Contains(t, stdout, "bucket \"payments\" c")
	require.Contains(t, stdout, "kind: pool → bucket\n")
	require.Contains(t, stdout, "~ pool \"same\" changed\n    kind: bucket → pool\n")

	require.NoError(t, os.WriteFile(path, []byte(strings.NewReplacer(changes...).Replace(text)), 0o600))
	code, stdout, _ = runWith(t, nil, "diff", "-o", "json", path)
	require.Equal(t, 3, code)
	var report drift.Report
	require.NoError(t, json.Unmarshal([]byte(stdout), &report))
	require.Contains(t, report.Changes, drift.Change{
		What: "pool", Name: "payments", Change: drift.Conflict, Version: 7, Fields: []config.Difference{
			{Field: "floor_share", InForce: "20%", File: "40%"}, {Field: "regions.us.floor", File: "100/s"},
			{Field: "regions.ap.weight", File: "1"},
		},
	})
}

func TestDiffWithoutAnAnswerExitsWithOneOrTwo(t *testing.T) {
	server := testenv.Redis(t)
	code, _, stderr := runWith(t, nil, "diff", writeConfig(t, goodConfig+"version: x\n"))
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "version")
	code, _, stderr = runWith(t, nil, "diff", "--redis", "redis://127.0.0.1:1", writeConfig(t, goodConfig))
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "connection refused")

	rdb := server.Client()
	require.NoError(t, rdb.Set(t.Context(), "{a}:ctl", "not a hash", 0).Err())
	code, stdout, stderr := runWith(t, nil, "diff", "--redis", server.URL(), writeConfig(t, goodConfig))
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "note: ")
	require.Contains(t, stdout, `malformed bucket "a"`)

	require.NoError(t, rdb.Do(t.Context(), "acl", "setuser", "reader", "on", ">p", "~*", "+@all", "-scan").Err())
	code, stdout, stderr = runWith(t, map[string]string{"REFILLER_REDIS_USERNAME": "reader",
		"REFILLER_REDIS_PASSWORD": "p"}, "diff", "--redis", server.URL(), writeConfig(t, goodConfig))
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "the Redis user may not SCAN")
}

func TestDiffReadsAllMastersOfACluster(t *testing.T) {
	cluster := testenv.Cluster(t)
	rdb := cluster.Client()
	for _, key := range []string{"a", "b", "c", "d", "e"} {
		terms := policy.Policy{Capacity: 10, Rate: policy.PerSecond(5)}.Terms(policy.Fence{Epoch: 1})
		_, err := lua.Refill(t.Context(), rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
	}
	url := cluster.URL()
	code, stdout, stderr := runWith(t, nil, "diff", "--redis", url, writeConfig(t, goodConfig+"version: 1\n"))
	require.Equal(t, 3, code, stderr)
	var want strings.Builder
	for _, key := range []string{"b", "c", "d", "e"} {
		fmt.Fprintf(&want, "- bucket %q removed: consumers can use it until you delete it (refiller delete)\n", key)
	}
	require.Equal(t, want.String(), stdout)
}
