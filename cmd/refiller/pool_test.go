package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/pool"
)

// pooledRegion runs a replica of the region eu. Its pool also has the region us. pooledRegion returns the path of the
// configuration and the address of the admin server.
func pooledRegion(t *testing.T) (path, addr string) {
	t.Helper()
	etcd, server := testenv.Etcd(t, 1), testenv.Redis(t)
	text := fmt.Sprintf(`region: eu
redis: {url: %q}
version: 3
election: {ttl: 2s, endpoints: [%s]}
listen: 127.0.0.1:0
pools:
  - {name: payments, rate: 1000/s, capacity: 3000, regions: {eu: {weight: 3, floor: 100/s}, us: {floor: 50/s}}}
`, server.URL(), strings.Join(etcd.Endpoints(), ","))
	return writeConfig(t, text), replicaOf(t, text)
}

func TestPoolStatusFenceAndLift(t *testing.T) {
	t.Parallel()
	path, addr := pooledRegion(t)
	// answer runs a command, and types a line at its prompt.
	answer := func(line string, args ...string) (string, error) {
		var out, errs bytes.Buffer
		root := rootCommand(env{Stdout: &out, Stderr: &errs})
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
			return len(a.Pools) == 1 && a.Pools[0].Regions[0].Applied && a.Pools[0].Regions[0].Granted > want-1 &&
				a.Pools[0].Regions[0].Granted <= want
		}
	}
	require.Eventually(t, granted(100), 30*time.Second, 50*time.Millisecond,
		"us has never reported, so each region has only its floor")
	a := status()
	require.Equal(t, "eu/one", a.Coordinator)
	require.EqualValues(t, 3, a.Version)
	eu, us := a.Pools[0].Regions[0], a.Pools[0].Regions[1]
	require.False(t, a.Pools[0].Open)
	require.Equal(t, []string{"us"}, a.Pools[0].Waits)
	require.InDelta(t, 100, eu.Claimed, 1)
	require.Positive(t, eu.Remaining)
	require.Less(t, eu.Age, 12.0)
	require.False(t, us.Reported)

	var code int
	var stdout, stderr string
	renewed := regexp.MustCompile(`(?m)^eu +100/s +100/s .* renewed \d\.\d s ago$`)
	require.Eventually(t, func() bool {
		code, stdout, stderr = runWith(t, nil, "pool", "status", "-c", path)
		return code == 0 && renewed.MatchString(stdout)
	}, 30*time.Second, 50*time.Millisecond, "eu acknowledges its offer and renews its grant")
	require.Regexp(t, `coordinator +eu/one, elected in epoch \d+`, stdout)
	require.Regexp(t, `payments  1000/s, capacity 3000; at most 150/s in use
closed: regions have only their floors until these regions acknowledge it or are
fenced: us
regions in an unknown state may use more until earlier grants end
REGION`, stdout)
	require.Regexp(t, `(?m)^us +0/s .* 50/s .* unknown +see below\n`+
		`us +has not reported, and may use an earlier grant$`, stdout)

	seen := watchTwice(t, `"coordinator":"eu/one"`, "pool", "status", "-c", path, "-o", "json", "--watch=100ms")
	require.Equal(t, strings.Count(seen, "\n"), strings.Count(seen, `"coordinator"`), "each line has one object")

	// The command refuses unknown regions and a wrong prefix. An operator may also decline.
	code, _, stderr = runWith(t, nil, "pool", "fence", "asia", "-c", path, "--yes")
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, `region "asia" is in no pool: want one of eu, us`)
	file, err := os.ReadFile(path)
	require.NoError(t, err)
	elsewhere := writeConfig(t, strings.Replace(string(file), "ttl: 2s", "ttl: 2s, prefix: /other", 1))
	code, _, stderr = runWith(t, nil, "pool", "fence", "eu", "-c", elsewhere, "--yes")
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, "there are no pools below /other/pools: check election.prefix")
	text, err := answer("no\n", "pool", "fence", "eu")
	require.ErrorIs(t, err, errUnconfirmed)
	require.Contains(t, text, "eu may be using 100/s of 1000/s in payments")
	require.Contains(t, text, "so it is alive")
	require.Nil(t, status().Pools[0].Regions[0].Fenced)

	text, err = answer("us\n", "pool", "fence", "us", "--reason", "drill")
	require.NoError(t, err)
	require.NotContains(t, text, "alive")
	require.Contains(t, text,
		"The state of us in payments is not known. It may be using up to 50/s of 1000/s,\n"+
			"or an earlier grant until that grant ends.\n")
	require.Regexp(t, `refiller\.audit: operator action: action="pool fence" region=us operator=\S+ reason=drill `, text)
	require.Eventually(t, granted(1000), 30*time.Second, 50*time.Millisecond,
		"the floor of us is free, and the pool opens")
	require.True(t, status().Pools[0].Open)
	require.Equal(t, "drill", status().Pools[0].Regions[1].Fenced.Reason)

	code, stdout, stderr = runWith(t, nil, "pool", "lift", "us", "-c", path)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "pool lift: done for us")
	require.Contains(t, stderr, `action="pool lift" region=us`)
	require.Eventually(t, granted(750), 30*time.Second, 50*time.Millisecond,
		"the part of us is reserved until us acknowledges, since its bucket is unknown")
	code, _, stderr = runWith(t, nil, "pool", "lift", "us", "-c", path)
	require.Equal(t, cli.ExitFailed, code)
	require.Contains(t, stderr, "region is not fenced")

	_, stdout, _ = runWith(t, nil, "doctor", "-c", path)
	require.Contains(t, stdout, "eu/one coordinates the pools")
	require.NotContains(t, stdout, "leads", "in mode race no replica leads")
	code, stdout, stderr = runWith(t, nil, "status", "--addr", addr)
	require.Zero(t, code, stderr)
	require.Regexp(t, `pools +region eu; eu/one coordinates, elected in epoch`, stdout)
	page, err := get(t.Context(), "http://"+addr+"/")
	require.NoError(t, err)
	for _, want := range []string{`<h2 id="pools">Pools in eu</h2>`, "eu/one coordinates all regions, elected in epoch",
		`<td>payments</td>`, "750/s of 1\u202f000/s"} {
		require.Contains(t, string(page), want)
	}
	require.Regexp(t, `(?m)^payments +\d+ +2250 +750/s +1000/s +100/s`, stdout)
}

func TestPoolStatusShowsTheStateOfAGrant(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]pool.RegionStatus{
		"renewed 0.5 s ago":        {Age: 0.5, Remaining: 11.5, Alive: true},
		"not renewed, ends in 7 s": {Age: 5, Remaining: 7, Alive: true},
		"on its floor":             {Age: 12, Alive: true},
		"was on its floor":         {Age: 12},
		"had 12 s left":            {Remaining: 12},
		"can't be read":            {Remaining: 12, Unreadable: true},
	} {
		r.Configured = true
		r.Reported = true
		r.Applied = true
		r.Granted = 100
		require.Equal(t, want, grant(r))
	}
	lifted := pool.RegionStatus{Configured: true, Reported: true, Capacity: 1}
	require.Equal(t, "gets its floor when it reports", grant(lifted))
	require.Equal(t, "silent: gets its floor when it reports",
		plannedRegion{State: "silent", Change: "none", Then: 100}.remarks("changed"))
	r := pool.RegionStatus{Configured: true, Reported: true, Alive: true, Remaining: 12, Granted: 100}
	require.Equal(t, "not acknowledged", grant(r))
	r.Fenced = &pool.Fencing{Operator: "ann", At: time.Unix(1_700_000_000, 0), Reason: "flood"}
	require.Equal(t, "fenced by ann at 2023-11-14 22:13:20: flood", grant(r))
}

func TestPoolStatusFitsEightyColumns(t *testing.T) {
	t.Parallel()
	one := pool.RegionStatus{Region: "eu-west-1", Granted: 737.5, Floor: 100, Demand: 5000, Claimed: 737.5, Tokens: 2250,
		Capacity: 2250,
		Age:      0.5, Remaining: 11.5, Applied: true, Reported: true, Configured: true, Alive: true}
	two := one
	two.Region, two.Remaining = "us-east-1", 0
	a := poolAnswer{Coordinator: "eu-west-1/refiller-0", Epoch: 9,
		Status: pool.Status{Version: 20261122, Pools: []pool.PoolStatus{
			{Name: "payments", Rate: "1475/s", Capacity: 4500, Open: true, Regions: []pool.RegionStatus{one, two}}}}}
	part := 0.5
	for _, region := range []string{"eu-west-1", "us-east-1"} {
		h := admin.ShareHistory{Pool: "payments", Region: region, Minutes: make([]*float64, 60)}
		h.Minutes[59] = &part
		a.History = append(a.History, h)
	}
	var out bytes.Buffer
	require.NoError(t, a.write(&out, 80))
	fits(t, out.String())
	require.Regexp(t, `(?m)^eu-west-1 +737\.5/s +100/s +5000/s .* 2250/2250 +alive +renewed 0\.5 s ago$`, out.String())
	require.Regexp(t, `(?m)^us-east-1 +737\.5/s .* on its floor$`, out.String())
	require.Contains(t, out.String(), "at most 1475/s in use")
	require.Regexp(t, `(?m)^us-east-1  ·{59}▅$`, out.String())
}

// fits checks that no line has more than 80 columns.
func fits(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		require.LessOrEqual(t, utf8.RuneCountInString(strings.TrimSuffix(line, "\n")), 80, line)
	}
}

// words is text on one line.
func words(text string) string { return strings.Join(strings.Fields(text), " ") }

// Every remark about a pool is shown in full within 80 columns, on a terminal and elsewhere.
func TestPoolStatusShowsEveryRemarkInEightyColumns(t *testing.T) {
	t.Parallel()
	region := pool.RegionStatus{Region: "eu-west-1", Granted: 737.5, Floor: 100, Demand: 5000, Claimed: 737.5,
		Tokens: 2250, Capacity: 2250, Reported: true, Reporter: "a", Configured: true}
	drained := region
	drained.Region = "us-east-1"
	drained.OtherServer = true
	drained.Fenced = &pool.Fencing{
		Operator: "ann", Drain: true, At: time.Unix(1_700_000_000, 0), Reason: "the racks are replaced, see the calendar",
	}
	unread := pool.RegionStatus{Region: "ap-northeast-1", Configured: true}
	a := poolAnswer{Status: pool.Status{
		Unreadable: map[string]string{"rep/eu-west-1": "pool: bad record: its first line is not of a format known here: x"},
		Pools: []pool.PoolStatus{{Name: "payments", Rate: "1475/s", Capacity: 4500,
			Waits: []string{"ap-northeast-1", "eu-west-1", "us-east-1"}, Regions: []pool.RegionStatus{region, drained, unread}}},
	}}
	for _, width := range []int{80, 0} {
		var out bytes.Buffer
		require.NoError(t, a.write(&out, width))
		if width > 0 {
			fits(t, out.String())
		}
		for _, want := range []string{
			"closed: regions have only their floors until these regions acknowledge it or are fenced: ap-northeast-1, " +
				"eu-west-1, us-east-1",
			"regions in an unknown state may use more until earlier grants end",
			"CAUTION: more than one Redis reports for us-east-1. One has the share, and another one has the floor in addition.",
			"us-east-1 has not acknowledged its drain, requested by ann at 2023-11-14 22:13:20: " +
				"the racks are replaced, see the calendar",
			"ap-northeast-1 has not reported, and may use an earlier grant",
			"CAUTION: rep/eu-west-1 can't be read: pool: bad record: its first line is not of a format known here: x",
		} {
			require.Contains(t, words(out.String()), want)
		}
	}
}

// After an outage of etcd, its shares may be old at first. Then no living region has a grant.
func TestPoolStatusSaysThatNoLivingRegionHasAGrant(t *testing.T) {
	t.Parallel()
	const remark = "no living region has a grant, only its floor; these shares may be outdated\n"
	live := pool.RegionStatus{Region: "eu", Granted: 500, Claimed: 500, Reported: true, Configured: true, Alive: true}
	silent := live
	silent.Region = "us"
	silent.Alive = false
	silent.Remaining = 12
	granted := live
	granted.Remaining = 11
	fenced := live
	fenced.Fenced = &pool.Fencing{}
	unheard := pool.RegionStatus{Region: "us", Configured: true}
	for _, test := range []struct {
		regions []pool.RegionStatus
		closed  bool
		want    bool
	}{
		{regions: []pool.RegionStatus{live, silent}, want: true},
		{regions: []pool.RegionStatus{live, live}, want: true},
		{regions: []pool.RegionStatus{silent, silent}, want: true},
		{regions: []pool.RegionStatus{granted, silent}},
		{regions: []pool.RegionStatus{fenced, fenced}},
		{regions: []pool.RegionStatus{live, silent}, closed: true},
		{regions: []pool.RegionStatus{unheard}},
	} {
		p := pool.PoolStatus{Name: "payments", Rate: "1000/s", Open: !test.closed, Regions: test.regions}
		var out bytes.Buffer
		require.NoError(t, poolAnswer{Status: pool.Status{Pools: []pool.PoolStatus{p}}}.write(&out, 80))
		require.Equal(t, test.want, strings.Contains(out.String(), remark), out.String())
	}
}

func TestPoolCommandsSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"no subcommand was given: want status, plan, fence or lift":            {"pool"},
		"no address of etcd was given: want --config FILE or --etcd HOST:PORT": {"pool", "status"},
		"want text or json":               {"pool", "status", "-o", "xml"},
		"--watch 1ms: want 100ms or more": {"pool", "status", "--watch=1ms"},
		"no argument: want":               {"pool", "fence"},
	} {
		code, _, stderr := runWith(t, nil, args...)
		require.Equal(t, cli.ExitUsage, code, stderr)
		require.Contains(t, stderr, want)
	}
}

func TestPoolStatusShowsTheLastHour(t *testing.T) {
	t.Parallel()
	w := startTwoRegions(t)
	args := []string{"pool", "status", "-c", w.path, "--history", "--addr", w.runs["us"].Addr().String()}
	require.Eventually(t, func() bool {
		code, stdout, stderr := runWith(t, nil, append(args, "-o", "json")...)
		require.Zero(t, code, stderr)
		var a poolAnswer
		require.NoError(t, json.Unmarshal([]byte(stdout), &a))
		if len(a.History) != 2 {
			return false
		}
		sum := 0.0
		for i, region := range []string{"eu", "us"} {
			h := a.History[i]
			require.Equal(t, []string{"payments", region}, []string{h.Pool, h.Region})
			require.Len(t, h.Minutes, 60)
			require.Nil(t, h.Minutes[0])
			if last := h.Minutes[59]; last != nil {
				sum += *last
			}
		}
		return sum > 0.1 && sum < 1.000001
	}, 30*time.Second, 100*time.Millisecond)
	_, stdout, _ := runWith(t, nil, args...)
	// The minute that has just begun may have no value yet.
	require.Regexp(t, `(?m)^part of the rate in each minute of the last hour:\neu  ·+[▁-█]+·?\nus  ·+[▁-█]+·?$`, stdout)

	code, _, stderr := runWith(t, nil, "pool", "status", "-c", w.path, "--history", "--addr", "127.0.0.1:1")
	require.Equal(t, cli.ExitFailed, code)
	require.Contains(t, stderr, "check that the admin server of a replica is at http://127.0.0.1:1 (--addr)")
	code, _, stderr = runWith(t, nil, "pool", "status", "-c", w.path, "--addr", "127.0.0.1:1")
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, "--addr requires --history")
}
