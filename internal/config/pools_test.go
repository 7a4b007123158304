package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// goodPools is a valid file with a field on each line, so that a table can break one and name its line.
const goodPools = `region: eu
redis: {url: "redis://127.0.0.1:6379/0"}
version: 7
election: {endpoints: ["127.0.0.1:2379"]}
pools:
  - name: payments
    rate: 10000/s
    capacity: 20000
    interval: 50ms
    regions:
      eu: {weight: 2, floor: 1000/s}
      us: {weight: 1, floor: 500/s, burst: 6000, ceiling: 9000/s}
`

func TestParseReadsPools(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte(goodPools))
	require.NoError(t, err)
	require.Empty(t, c.Buckets)
	require.Equal(t, []pool.Pool{{
		Name: "payments", Rate: policy.PerSecond(10_000), Capacity: 20_000, Interval: 50 * time.Millisecond, FloorShare: 20,
		Regions: []pool.Region{
			{Name: "eu", Weight: 2, Floor: policy.PerSecond(1000)},
			{Name: "us", Weight: 1, Floor: policy.PerSecond(500), Burst: 6000, Ceiling: policy.PerSecond(9000)},
		},
	}}, c.Pools)
	require.Equal(t, "/refiller/pools", c.PoolsPrefix())
	require.Equal(t, "/refiller/regions/eu", c.RefillPrefix(), "the regions share etcd, but each has its own election")
	require.Contains(t, c.Summary(), "0 buckets and 1 pool of 1 on ")

	c, err = parseText([]byte(strings.Replace(goodPools, "eu: {weight: 2, floor: 1000/s}", "eu: {}", 1)))
	require.NoError(t, err)
	require.Equal(t, pool.Region{Name: "eu", Weight: 1}, c.Pools[0].Regions[0])
	require.Equal(t, 100*time.Millisecond, func() time.Duration {
		c, err := parseText([]byte(strings.Replace(goodPools, "    interval: 50ms\n", "", 1)))
		require.NoError(t, err)
		return c.Pools[0].Interval
	}())

	head, _, _ := strings.Cut(goodPools, "pools:")
	c, err = parseText([]byte(head + "pools: []\n"))
	require.NoError(t, err)
	require.True(t, c.Pooled(), "an empty list still takes part, to end the pools")
	c, err = parseText([]byte(good))
	require.NoError(t, err)
	require.False(t, c.Pooled())
	require.Equal(t, "/refiller", c.RefillPrefix())
}

func TestParseReportsFieldLineAndRangeOfPools(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		old, new string // replaced in goodPools
		field    string
		line     int
		says     string
	}{
		{"pools are no list", "pools:\n  - name", "pools:\n    name", "pools", 6, "want a list"},
		{"unknown field", "    capacity: 20000", "    capactiy: 20000", "pools[0].capactiy", 8, "did you mean capacity?"},
		{"unknown field of a region", "floor: 1000/s", "flor: 1000/s", "pools[0].regions.eu.flor", 11, "did you mean floor?"},
		{"no name", "- name: payments\n    rate", "- rate", "pools[0].name", 6, "it is required"},
		{"name with a space", "payments", "pay ments", "pools[0].name", 6, "letters, digits and any of . _ : -"},
		{"no rate", "    rate: 10000/s\n", "", "pools[0].rate", 6, "it is required"},
		{"rate without a time", "10000/s", "10000", "pools[0].rate", 7, "has no time"},
		{"no capacity", "    capacity: 20000\n", "", "pools[0].capacity", 6, "it is required"},
		{"capacity of 2^53", "capacity: 20000", "capacity: 9007199254740992", "pools[0].capacity", 8,
			"from 1 to 1125899906842624"},
		{"interval", "50ms", "2h", "pools[0].interval", 9, "from 1ms to 1h"},
		{"no regions", "    regions:\n      eu: {weight: 2, floor: 1000/s}\n      us: {weight: 1, floor: 500/s, burst: 6000, ceiling: 9000/s}\n", "", "pools[0].regions", 6, "it is required"},
		{"regions are a list", "regions:\n      eu: {weight: 2, floor: 1000/s}\n      us:",
			"regions:\n      - eu: {weight: 2, floor: 1000/s}\n      - us:", "pools[0].regions", 11, "not a list"},
		{"regions are empty", "regions:\n      eu: {weight: 2, floor: 1000/s}\n      us: {weight: 1, floor: 500/s, burst: 6000, ceiling: 9000/s}", "regions: {}", "pools[0].regions", 10, "0 of them: want 1 to 100"},
		{"region twice", "us: {weight: 1", "eu: {weight: 1", "pools[0].regions.eu", 12,
			"given twice: the first is on line 11"},
		{"region with a space", "us: {weight: 1", "u s: {weight: 1", "pools[0].regions.u s", 12, "letters, digits"},
		{"weight", "weight: 2", "weight: 0", "pools[0].regions.eu.weight", 11, "from 1 to 1000000"},
		{"burst", "burst: 6000", "burst: -1", "pools[0].regions.us.burst", 12, "from 1 to 1125899906842624"},
		{"floor", "floor: 500/s", "floor: 0/s", "pools[0].regions.us.floor", 12, "tokens must be a whole number from 1"},
		{"floors together", "floor: 500/s", "floor: 1500/s", "pools[0].regions", 11,
			"the floors are 25 % of the rate together: want at most floor_share, 20 %"},
		{"bursts together", "burst: 6000", "burst: 6668", "pools[0].regions", 11, "the bursts are 20001 together"},
		{"burst below two intervals", "burst: 6000", "burst: 999", "pools[0].regions.us.burst", 12,
			"999 is below 1000, the tokens of two refill intervals of 50ms"},
		{"ceiling below the floor", "ceiling: 9000/s", "ceiling: 499/s", "pools[0].regions.us.ceiling", 12,
			"below the floor"},
		{"rate and interval too large", "rate: 10000/s", "rate: 9007199254/us", "pools[0].rate", 7, "is not below 2^53"},
		{"floor share", "    interval: 50ms", "    floor_share: 120%", "pools[0].floor_share", 9,
			"a percentage from 1% to 100%"},
		{"floor share without a sign", "    interval: 50ms", "    floor_share: 0.4", "pools[0].floor_share", 9,
			"0.4 is not a percentage from 1% to 100%"},
		{"registry without endpoints", "pools:\n", "pool_registry: {prefix: /x}\npools:\n", "pool_registry.endpoints", 5,
			"it is required here"},
		{"registry's user", "pools:\n", "pool_registry: {endpoints: [h:1], username: u}\npools:\n", "pool_registry.username",
			5, "has no password"},
		{"name of a bucket", "", "buckets: [{key: payments, capacity: 9, rate: 1/s}]\n", "pools[0].name", 6,
			"already the key of a bucket"},
		{"name twice", "pools:\n", "pools:\n  - {name: payments, rate: 1/s, capacity: 9, regions: {eu: {}}}\n",
			"pools[1].name", 7, "already the name of the pool on line 6"},
		{"endpoints", "{endpoints: [\"127.0.0.1:2379\"]}", "{mode: race}", "election.endpoints", 4,
			"it is required with pools"},
		{"election", "election: {endpoints: [\"127.0.0.1:2379\"]}", "", "election.endpoints", 6, "it is required with pools"},
		{"no region", "region: eu\n", "", "region", 1, "it is required with pools"},
		{"region unknown", "region: eu", "region: eus", "region", 1,
			"is in no pool, whose regions are eu, us: did you mean eu?"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			text := goodPools + tc.new
			if tc.old != "" {
				require.Contains(t, goodPools, tc.old)
				text = strings.Replace(goodPools, tc.old, tc.new, 1)
			}
			_, err := parseText([]byte(text))
			var problems config.Problems
			require.ErrorAs(t, err, &problems)
			for _, p := range problems {
				require.Positive(t, p.Line)
				if p.Field == tc.field && p.Line == tc.line && strings.Contains(p.Msg, tc.says) {
					return
				}
			}
			require.Failf(t, "not reported", "want %d: %s: ...%s...\ngot:\n%v", tc.line, tc.field, tc.says, err)
		})
	}
}

func TestPoolsHaveAVersionAndARegistryOfTheirOwn(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte(goodPools))
	require.NoError(t, err)
	require.EqualValues(t, 7, c.PoolsVersion, "the default is the file's version")
	require.False(t, c.HasSeparateRegistry())
	require.Equal(t, c.Election.Etcd, c.PoolRegistry)

	own := strings.Replace(goodPools, "pools:\n",
		"pools_version: 3\npool_registry: {endpoints: [\"https://global:2379\"], ttl: 10s, tls: {ca: g.pem}}\npools:\n", 1)
	own = strings.Replace(own, "    interval: 50ms", "    floor_share: 40%", 1)
	c, err = parseText([]byte(strings.Replace(own, "500/s", "3000/s", 1)))
	require.NoError(t, err)
	require.EqualValues(t, 40, c.Pools[0].FloorShare)
	require.EqualValues(t, 3, c.PoolsVersion)
	require.True(t, c.HasSeparateRegistry())
	require.Equal(t, []string{"https://global:2379"}, c.PoolRegistry.Endpoints)
	require.Equal(t, "/refiller/pools", c.PoolsPrefix(), "the default is the election's prefix")
	require.Equal(t, 10*time.Second, c.PoolRegistry.TTL)
	require.Equal(t, []string{"127.0.0.1:2379"}, c.Election.Endpoints)

	next, err := parseText([]byte(strings.NewReplacer("500/s", "3000/s", "version: 7", "version: 8", "10000/s",
		"10001/s").Replace(own)))
	require.NoError(t, err)
	_, err = c.To(next)
	require.ErrorContains(t, err, "pools_version: 3 is in force already with other pools",
		"changes of pools need a new pools_version")
	next, err = parseText([]byte(strings.NewReplacer("500/s", "3000/s", "version: 7", "version: 8", "pools_version: 3",
		"pools_version: 2").Replace(own)))
	require.NoError(t, err)
	_, err = c.To(next)
	require.ErrorContains(t, err, "pools_version: 2 is below 3")

	// A replica in race mode needs no etcd besides the registry.
	_, err = parseText([]byte(strings.Replace(strings.Replace(own, "500/s", "3000/s", 1),
		"{endpoints: [\"127.0.0.1:2379\"]}", "{mode: race}", 1)))
	require.NoError(t, err)
}

func TestABucketWithTheNameOfAPoolNeedsARestart(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte(goodPools))
	require.NoError(t, err)
	others, _, found := strings.Cut(goodPools, "pools:")
	require.True(t, found)
	others = strings.Replace(others, "version: 7", "version: 8", 1)

	next, err := parseText([]byte(others + "buckets: [{key: payments, capacity: 100, rate: 10/s}]\n"))
	require.NoError(t, err)
	_, err = c.To(next)
	require.ErrorContains(t, err, `buckets: "payments" was a pool, and stays one until the replica restarts`)

	next, err = parseText([]byte(others + "buckets: [{key: mail, capacity: 100, rate: 10/s}]\n"))
	require.NoError(t, err)
	change, err := c.To(next)
	require.NoError(t, err)
	require.Equal(t, []string{"pools"}, change.Restart)
}

func TestParseReportsAllProblemsOfPools(t *testing.T) {
	t.Parallel()
	_, err := parseText([]byte(strings.NewReplacer("weight: 2", "weight: -2", "floor: 500/s", "floor: x",
		"rate: 10000/s", "rate: 1").Replace(goodPools)))
	require.Equal(t, 3, strings.Count(err.Error(), "\n")+1, "%v", err)
	_, err = parseText([]byte(strings.NewReplacer("burst: 6000", "burst: 16000", "1000/s", "9000/s", "9000/s}",
		"1/s}").Replace(goodPools)))
	require.Equal(t, 3, strings.Count(err.Error(), "\n")+1, "every conflict between fields is reported: %v", err)
}

func TestChangesOfPoolsNeedAVersion(t *testing.T) {
	t.Parallel()
	parse := func(pairs ...string) config.Config {
		c, err := parseText([]byte(strings.NewReplacer(pairs...).Replace(goodPools)))
		require.NoError(t, err)
		return c
	}
	old := parse()
	for name, pairs := range map[string][]string{
		"rate":   {"rate: 10000/s", "rate: 9000/s"},
		"floor":  {"floor: 500/s", "floor: 600/s"},
		"region": {"      us:", "      ap: {}\n      us:", "floor: 500/s", "floor: 1/s", "burst: 6000", "burst: 2000"},
	} {
		_, err := old.To(parse(pairs...))
		require.ErrorContains(t, err, "7 is in force already with other pools", name)
		change, err := old.To(parse(append(pairs, "version: 7", "version: 8")...))
		require.NoError(t, err)
		require.True(t, change.Pools && change.Applies(), name)
	}
	change, err := old.To(parse("10000/s", "600000/m"))
	require.NoError(t, err)
	require.Equal(t, config.Change{}, change, "the rate is the same in other units")

	without, err := parseText([]byte(strings.Replace(good, "region: eu-west-1", "region: eu", 1)))
	require.NoError(t, err)
	change, err = old.To(without)
	require.NoError(t, err)
	require.Contains(t, change.Restart, "pools")
	require.False(t, change.Pools)
}
