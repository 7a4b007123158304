package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testenv"
)

// pooledRegion runs a replica of region eu of a pool that us has a part in, too, and returns the path of its
// configuration and the address of its admin server.
func pooledRegion(t *testing.T) (path, addr string) {
	t.Helper()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	path = writeConfig(t, fmt.Sprintf(`region: eu
redis: {url: %q}
version: 3
election: {ttl: 2s, endpoints: [%s]}
listen: 127.0.0.1:0
pools:
  - {name: payments, rate: 1000/s, capacity: 3000, regions: {eu: {weight: 3, floor: 100/s}, us: {floor: 50/s}}}
`, server.URL(), strings.Join(etcd.Endpoints(), ",")))
	cfg, err := config.Load(config.Source{Path: path})
	require.NoError(t, err)
	r, err := replica.New(cfg, replica.Options{Identity: "one", Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return path, r.Addr().String()
}

func TestPoolStatusFenceAndLift(t *testing.T) {
	t.Parallel()
	path, addr := pooledRegion(t)
	// answer types into the prompt.
	answer := func(line string, args ...string) (string, error) {
		var out, errs bytes.Buffer
		root := rootCommand(env{stdout: &out, stderr: &errs})
		root.SetArgs(append(args, "--config", path))
		root.SetIn(strings.NewReader(line))
		err := root.ExecuteContext(t.Context())
		return out.String() + errs.String(), err
	}
	status := func() poolAnswer {
		code, stdout, stderr := runWith(t, nil, "pool", "status", "-c", path, "-o", "json")
		require.Zero(t, code, stderr)
		var a poolAnswer
		require.NoError(t, json.Unmarshal([]byte(stdout), &a))
		return a
	}
	granted := func(want float64) func() bool {
		return func() bool {
			a := status()
			return len(a.Pools) == 1 && a.Pools[0].Regions[0].Applied && a.Pools[0].Regions[0].Granted > want-1 && a.Pools[0].Regions[0].Granted <= want
		}
	}
	require.Eventually(t, granted(950), 30*time.Second, 50*time.Millisecond, "eu has all but the floor of us, which has never reported")
	a := status()
	require.Equal(t, "eu/one", a.Coordinator)
	require.EqualValues(t, 3, a.Version)
	eu, us := a.Pools[0].Regions[0], a.Pools[0].Regions[1]
	require.InDelta(t, 950, eu.Claimed, 1)
	require.Positive(t, eu.Remaining)
	require.Less(t, eu.Age, 12.0)
	require.False(t, us.Reported)

	code, stdout, stderr := runWith(t, nil, "pool", "status", "-c", path)
	require.Zero(t, code, stderr)
	require.Regexp(t, `coordinator +eu/one, epoch \d+`, stdout)
	require.Regexp(t, `payments +1000/s, capacity 3000; at most 950/s in use`, stdout)
	require.Regexp(t, `(?m)^eu +950/s +100/s .* s ago *$`, stdout)
	require.Regexp(t, `(?m)^us +0/s .* never +has never reported$`, stdout)

	seen := watchTwice(t, `"coordinator":"eu/one"`, "pool", "status", "-c", path, "-o", "json", "--watch=100ms")
	require.Equal(t, strings.Count(seen, "\n"), strings.Count(seen, `"coordinator"`), "an object per line")

	// A region of another name, and second thoughts.
	code, _, stderr = runWith(t, nil, "pool", "fence", "asia", "-c", path, "--yes")
	require.Equal(t, exitUsage, code)
	require.Contains(t, stderr, `region "asia" is in no pool: regions are eu, us`)
	text, err := answer("no\n", "pool", "fence", "eu")
	require.ErrorIs(t, err, errUnconfirmed)
	require.Contains(t, text, "eu may be using 950/s of 1000/s in payments")
	require.Contains(t, text, "it seems to be alive")
	require.Nil(t, status().Pools[0].Regions[0].Fenced)

	text, err = answer("us\n", "pool", "fence", "us", "--reason", "drill")
	require.NoError(t, err)
	require.NotContains(t, text, "alive")
	require.Regexp(t, `refiller\.audit: operator action: action="pool fence" region=us operator=\S+ reason=drill `, text)
	require.Eventually(t, granted(1000), 30*time.Second, 50*time.Millisecond, "its floor is free")
	require.Equal(t, "drill", status().Pools[0].Regions[1].Fenced.Reason)

	code, stdout, stderr = runWith(t, nil, "pool", "lift", "us", "-c", path)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "pool lift: done for us")
	require.Contains(t, stderr, `action="pool lift" region=us`)
	require.Eventually(t, granted(950), 30*time.Second, 50*time.Millisecond, "its floor is reserved again")
	code, _, stderr = runWith(t, nil, "pool", "lift", "us", "-c", path)
	require.Equal(t, exitFailed, code)
	require.Contains(t, stderr, "region is not fenced")

	code, stdout, stderr = runWith(t, nil, "status", "--addr", addr)
	require.Zero(t, code, stderr)
	require.Regexp(t, `pools +in eu; eu/one coordinates under epoch`, stdout)
	page, err := get(t.Context(), "http://"+addr+"/")
	require.NoError(t, err)
	for _, want := range []string{`<h2 id="pools">Pools in eu</h2>`, "eu/one coordinates all regions under epoch", `<td>payments</td>`, "950/s of 1\u202f000/s"} {
		require.Contains(t, string(page), want)
	}
	require.Regexp(t, `(?m)^payments +\d+ +2250 +950/s +1000/s +100/s`, stdout)
}

func TestPoolCommandsSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"which command? status, fence or lift":                  {"pool"},
		"where is etcd? give --config FILE or --etcd HOST:PORT": {"pool", "status"},
		"want text or json":                                     {"pool", "status", "-o", "xml"},
		"--watch 1ms: want 100ms or more":                       {"pool", "status", "--watch=1ms"},
		"accepts 1 arg":                                         {"pool", "fence"},
	} {
		code, _, stderr := runWith(t, nil, args...)
		require.Equal(t, exitUsage, code, stderr)
		require.Contains(t, stderr, want)
	}
}
