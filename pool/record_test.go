package pool

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestRecordsAreReadBackAsWritten(t *testing.T) {
	terms := termsOf(50, 5, 100, 1_000_000, 100*time.Millisecond)
	terms.Fence = policy.Fence{Epoch: 7, Seq: 9}
	terms.GrantEnd = 1_700_000_000_000_000
	terms.GrantEra = 1_699_999_999_999_999
	older := terms
	older.Fence.Seq = 8
	s := share{12 * time.Second, map[string]grants{
		"a":         {terms: []policy.Terms{terms, older}, demand: 60, since: 7, joined: true, open: true},
		"b:c.d_e-f": {terms: []policy.Terms{older}, joined: true, restored: true},
		"new":       {terms: []policy.Terms{older}},
	}}
	back, err := decodeShare(s.encode())
	require.NoError(t, err)
	require.Equal(t, s, back)

	bare := policy.Policy{Capacity: 9, Rate: policy.PerSecond(3)}.Terms(policy.Fence{Epoch: 5})
	r := report{agent: "host/1 of eu#x", tickets: map[string]ticket{
		"a": ticketOf(lua.Ticket{
			Now: 1_700_000_000_000_000, Version: policy.Version{Era: 3, Index: 4}, Fence: terms.Fence, Terms: &terms, Tokens: -5,
			Added: 6, Denied: 7,
		}),
		"b": {now: 1_700_000_000_000_003, usage: usage{used: 12, ahead: 3}},
		"c": ticketOf(lua.Ticket{Now: 1_700_000_000_000_001, Version: policy.Version{Era: 3}, Terms: &bare, Tokens: 2}),
	}}
	require.True(t, r.tickets["a"].acknowledges(terms))
	require.False(t, r.tickets["a"].acknowledges(older))
	require.False(t, r.tickets["c"].acknowledges(bare))
	backR, err := decodeReport(r.encode())
	require.NoError(t, err)
	require.Equal(t, r, backR)

	p := simPool("payments")
	p.Regions[1].Ceiling, p.Regions[2].Burst = policy.PerSecond(700), 750
	p.Regions[2].since = 2
	settings := Settings{Version: 3, Pools: []Pool{p}}
	backS, err := decodeSettings(settings.encode())
	require.NoError(t, err)
	require.Equal(t, settings, backS)
	many := Settings{Version: 4}
	for i := range 2000 {
		q := p
		q.Name = "payments" + strconv.Itoa(i)
		many.Pools = append(many.Pools, q)
	}
	slices.SortFunc(many.Pools, func(a, b Pool) int { return strings.Compare(a.Name, b.Name) })
	require.Greater(t, len(many.encode()), maxText)
	require.Less(t, len(many.record()), maxText/4)
	require.NoError(t, many.Validate())
	backS, err = decodeSettings(many.record())
	require.NoError(t, err)
	require.Equal(t, many, backS)
	p.Regions[0], p.Regions[2] = p.Regions[2], p.Regions[0]
	require.Equal(t, settings.encode(), Settings{Version: 3, Pools: []Pool{p}}.encode(),
		"the order of regions makes no difference")
}

func TestBadRecordsAreErrors(t *testing.T) {
	for _, text := range []string{
		"", "x", "1 lease x\n", "1 lease -1\n", "2 lease 1\n", "1 lease 1", "1 lease 1\na 1 2 3\n",
		"1 lease 1\na -1 3 1 1 1 1 1 1 1 1 1 1\n", "1 lease 1\na 1 3 1 1 1 1 1 1 1 1 1 !\n",
		"1 lease 1\na 1 3 1 1 1 1 1 1 1 1 1 1 1\n",
		"1 lease 1\n  1 3 1 1 1 1 1\n",
	} {
		_, err := decodeShare(text)
		require.ErrorIs(t, err, ErrRecord, "%q", text)
	}
	for _, text := range []string{"", "x", "1 agent a\np 1 2 3 1 1 1 1 1 1 9\n",
		"1 agent a\np 1 2 2 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n",
		"1 agent a\np zzzzzzzzzzzzzzz\n"} {
		_, err := decodeReport(text)
		require.ErrorIs(t, err, ErrRecord, "%q", text)
	}
	for _, text := range []string{"", "{}x", `{"version":1,"pools":[{"name":"p","rate":"x","interval":"1s"}]}`,
		`{"pools":[{"name":"p","rate":"5/s","interval":"x"}]}`,
		`{"pools":[{"name":"p","rate":"5/s","interval":"1s","capacity":100}]}`, "\x1f\x8b", "\x1f\x8bx"} {
		_, err := decodeSettings(text)
		require.ErrorIs(t, err, ErrRecord, "%q", text)
	}
}

func FuzzDecodeShare(f *testing.F) {
	f.Add("1 lease 12000000\npayments 2s 3 8 1r kf12oi4 4ao3k ku 12l4 5y7t 9b3xr5g4s 9b3xr5g4s\nq  -1  1\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := decodeShare(text)
		if err != nil {
			require.ErrorIs(t, err, ErrRecord)
			return
		}
		back, err := decodeShare(s.encode())
		require.NoError(t, err)
		require.Equal(t, s, back)
	})
}

func TestPoolsAreValidatedAsAWhole(t *testing.T) {
	require.NoError(t, simPool("payments").Validate())
	for name, test := range map[string]struct {
		change func(p *Pool)
		field  string
		says   string
	}{
		"NoRegion":    {func(p *Pool) { p.Regions = nil }, "regions", "want 1 to 100"},
		"BadName":     {func(p *Pool) { p.Name = "a b" }, "name", "letters"},
		"RegionTwice": {func(p *Pool) { p.Regions[1].Name = "ap" }, "name", "twice"},
		"Weight":      {func(p *Pool) { p.Regions[0].Weight = 0 }, "weight", "whole number from 1"},
		"FloorsTooHigh": {func(p *Pool) { p.Regions[0].Floor = policy.PerSecond(51) }, "regions",
			"20.1 % of the rate together: want at most floor_share, 20 %"},
		"FloorShare":       {func(p *Pool) { p.FloorShare = 101 }, "floor_share", "from 1 to 100"},
		"BurstsTooHigh":    {func(p *Pool) { p.Regions[0].Burst = 1000 }, "regions", "at most the capacity, 3000"},
		"BurstTooSmall":    {func(p *Pool) { p.Regions[0].Burst = 399 }, "burst", "below 400"},
		"CapacityTooSmall": {func(p *Pool) { p.Capacity = 1000 }, "burst", "two refill intervals"},
		"CeilingLow":       {func(p *Pool) { p.Regions[0].Ceiling = policy.PerSecond(49) }, "ceiling", "below the floor"},
		"Rate":             {func(p *Pool) { p.Rate = policy.Rate{} }, "rate", "tokens"},
		"RateTooFine":      {func(p *Pool) { p.Rate, p.Capacity = policy.PerSecond(1<<40), 1<<50 }, "rate", "2^53"},
		"Interval":         {func(p *Pool) { p.Interval = time.Nanosecond }, "interval", "1ms"},
	} {
		t.Run(name, func(t *testing.T) {
			p := simPool("payments")
			test.change(&p)
			err := p.Validate()
			var field *FieldError
			require.ErrorAs(t, err, &field)
			require.ErrorIs(t, err, ErrPool)
			require.Equal(t, test.field, field.Field)
			require.ErrorContains(t, err, test.says)
		})
	}
	p := simPool("payments")
	p.FloorShare, p.Regions[0].Floor = 40, policy.PerSecond(200)
	require.NoError(t, p.Validate())
	decoded, err := decodeSettings(Settings{Pools: []Pool{p}}.record())
	require.NoError(t, err)
	require.EqualValues(t, 40, decoded.Pools[0].FloorShare)
	require.Equal(t, Settings{Pools: []Pool{simPool("payments")}}.record(), func() string {
		same := simPool("payments")
		same.FloorShare = DefaultFloorShare
		return Settings{Pools: []Pool{same}}.record()
	}(), "the default floor share is not written")
	require.ErrorIs(t, Settings{Pools: []Pool{simPool("a"), simPool("a")}}.Validate(), ErrPool)
	require.ErrorIs(t, Timing{Report: time.Millisecond, Lease: time.Second}.Validate(), ErrPool)
	require.ErrorIs(t, Timing{Report: time.Second, Lease: time.Second}.Validate(), ErrPool)
	require.NoError(t, DefaultTiming().Validate())
	require.Equal(t, 22*time.Second, ForTTL(10*time.Second).Lease)
}

func TestUnitsAreFineEnoughAndExact(t *testing.T) {
	for _, test := range []struct {
		rate policy.Rate
		want unit
	}{
		{policy.PerSecond(1000), unit{1_000_000, 1_000_000_000}},
		{policy.PerSecond(7), unit{1_000_006, 142_858_000_000}}, // 142858 times
		{policy.PerSecond(3_000_000), unit{1_000_002, 333_334}},
		{policy.Rate{Tokens: 10, Per: time.Minute}, unit{1_000_000, 6_000_000_000_000}},
	} {
		u := Pool{Rate: test.rate}.unit()
		require.GreaterOrEqual(t, u.total, int64(1))
		require.InEpsilon(t, float64(test.rate.Tokens)/test.rate.Per.Seconds(), float64(u.total)*1e6/float64(u.micros), 1e-12)
		require.Equal(t, test.want, u)
	}
}

func TestWatchdogSeesAClockGoWrong(t *testing.T) {
	start := time.Now()
	at := func(ours, clock, travel time.Duration) reading {
		return reading{sent: start.Add(ours), replied: start.Add(ours + travel), clock: start.Add(clock).UnixMicro()}
	}
	for name, test := range map[string]struct {
		readings []reading
		wrong    bool
	}{
		"Right":           {[]reading{at(0, 0, 0), at(time.Second, time.Second, 0)}, false},
		"SlowAnswer":      {[]reading{at(0, 0, 0), at(time.Second, 4*time.Second, 3*time.Second)}, false},
		"WithinTolerance": {[]reading{at(0, 0, 0), at(time.Second, 850*time.Millisecond, 0)}, false},
		"SetBack":         {[]reading{at(0, 0, 0), at(time.Second, 840*time.Millisecond, 0)}, true},
		"SetAhead":        {[]reading{at(0, 0, 0), at(time.Second, 1060*time.Millisecond, 0)}, false},
		"SlowLittleByLittle": {[]reading{at(0, 0, 0), at(time.Second, 870*time.Millisecond, 0),
			at(2*time.Second, 1740*time.Millisecond, 0)}, true},
		"Slewed":      {[]reading{at(0, 0, 0), at(10*time.Second, 9170*time.Millisecond, 0)}, false},
		"AwayForLong": {[]reading{at(0, 0, 0), at(time.Hour, 53*time.Minute, 0)}, true},
	} {
		t.Run(name, func(t *testing.T) {
			var w watchdog
			wrong := false
			for _, r := range test.readings {
				wrong = w.check(r, 1, 12*time.Second)
			}
			require.Equal(t, test.wrong, wrong)
			later := at(2*time.Hour, 2*time.Hour, 0)
			require.Equal(t, test.wrong, w.check(later, 1, 12*time.Second), "a wrong clock stays so until the era ends")
			require.False(t, w.check(at(time.Hour*2, 0, 0), 2, 12*time.Second), "a new era is judged anew")
		})
	}
}

func TestDemandRisesAtOnceAndFallsByHalves(t *testing.T) {
	var d demand
	d.observe(100, 0, 1000, time.Second, false)
	require.EqualValues(t, 110, d.units(1000))
	d.observe(400, 0, 1000, time.Second, false)
	require.EqualValues(t, 440, d.units(1000))
	d.observe(0, 0, 1000, 5*time.Second, false)
	require.EqualValues(t, 220, d.units(1000))
	d.observe(0, 0, 1000, time.Second, true)
	require.EqualValues(t, 55, d.units(1000), "the estimate halves in half a second while others are short")
	d.observe(300, 1e9, 1000, time.Second, false)
	require.EqualValues(t, 715, d.units(1000), "many retries at most double the demand and add a little")
	require.EqualValues(t, 500, d.units(500))
	var idle demand
	idle.observe(0, 1e9, 1000, time.Second, false)
	require.EqualValues(t, 55, idle.units(1000), "a region without a share can start")
}

// encode returns the share as a coordinator writes it.
func (s share) encode() string {
	b := shareHead(s.lease)
	var rows table
	for _, pool := range slices.Sorted(maps.Keys(s.pools)) {
		b = s.pools[pool].append(b, &rows, pool)
	}
	return string(b)
}
