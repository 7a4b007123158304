package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/lua"
)

// planned returns the plan for a file with these pools.
func (w *twoRegions) planned(pools string) (p plan) {
	w.t.Helper()
	code, stdout, stderr := runWith(w.t, nil, "pool", "plan", writeConfig(w.t, w.text["eu"]+pools), "-o", "json")
	require.Zero(w.t, code, stderr)
	require.NotContains(w.t, stdout, "null")
	require.NoError(w.t, json.Unmarshal([]byte(stdout), &p))
	return p
}

// The rates of a plan are the rates in force after the file was put in force.
func TestPoolPlanShowsWhatRegionsGet(t *testing.T) {
	t.Parallel()
	w := startTwoRegions(t)
	go func() { // us wants about 300/s
		rdb, ticker := w.redis["us"].Client(), time.NewTicker(20*time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-t.Context().Done():
				return
			case <-ticker.C:
				_, _ = lua.TakeUpTo(t.Context(), rdb, "payments", 6)
			}
		}
	}()
	w.eventually("the demand of us is known", func(a poolAnswer) bool { return a.Pools[0].Regions[1].Demand > 250 })

	same := w.planned(twoRegionsPool)
	require.Equal(t, "none", same.Pools[0].Change)
	require.False(t, same.Ignored)
	other := strings.Replace(twoRegionsPool, "1000/s", "2000/s", 1)
	require.True(t, w.planned(other).Ignored, "pools that change under the same version are ignored")

	next := strings.NewReplacer("version: 3", "version: 4", "1000/s", "2000/s", "capacity: 3000", "capacity: 4000",
		"floor: 100/s", "floor: 150/s, ceiling: 1400/s").Replace(twoRegionsPool)
	p := w.planned(next)
	require.EqualValues(t, 4, p.Version)
	require.EqualValues(t, 3, p.InForce)
	one := p.Pools[0]
	require.Equal(t, "changed", one.Change)
	require.Equal(t, []string{"1000/s", "2000/s"}, []string{one.RateNow, one.Rate})
	require.Empty(t, one.Waits)
	eu, us := one.Regions[0], one.Regions[1]
	require.InDelta(t, 2000, eu.Then+us.Then, 1)
	require.InDelta(t, 1200, eu.Then, 200, "the share follows the weight, up to the ceiling")
	require.InDelta(t, 150, eu.Floor, 1)
	require.Equal(t, "alive", us.State)
	require.EqualValues(t, 3, w.status().Version, "the plan changes nothing")
	require.Equal(t, "1000/s", w.status().Pools[0].Rate)

	for region, r := range w.runs {
		cfg, err := config.Load(config.Source{Data: []byte(w.text[region] + next)})
		require.NoError(t, err)
		require.NoError(t, r.Reload(cfg, "test"))
	}
	w.eventually("the shares are as planned", func(a poolAnswer) bool {
		p := w.planned(next).Pools[0]
		for i, r := range a.Pools[0].Regions {
			if diff := r.Granted - p.Regions[i].Then; max(diff, -diff) > 20 { // changes below 1 % aren't worth a write
				return false
			}
		}
		return a.Version == 4
	})

	// This file adds a region and a pool, and removes a pool. us is drained and eu is lost.
	code, _, stderr := runWith(t, nil, "pool", "fence", "us", "--drain", "--yes", "-c", w.path)
	require.Zero(t, code, stderr)
	p = w.planned(`version: 5
pools:
  - {name: mail, rate: 60/m, capacity: 90, regions: {eu: {}, us: {}, ap: {}}}
`)
	require.Equal(t, []string{"added", "removed"}, []string{p.Pools[0].Change, p.Pools[1].Change})
	mail := p.Pools[0]
	require.Equal(t, []string{"ap", "eu", "us"}, mail.Waits)
	require.Equal(t, []string{"unheard", "alive", "drained"},
		[]string{mail.Regions[0].State, mail.Regions[1].State, mail.Regions[2].State})
	require.InDelta(t, 0.5, mail.Regions[0].Then, 1e-5)
	require.Zero(t, mail.Regions[2].Then)
	require.Equal(t, "leaves", p.Pools[1].Regions[0].Change)

	bare := w.text["eu"] + "version: 1\nbuckets: [{key: b, capacity: 9, rate: 1/s}]\n"
	code, _, stderr = runWith(t, nil, "pool", "plan", writeConfig(t, bare))
	require.Equal(t, cli.ExitUsage, code)
	require.Contains(t, stderr, "has no field pools")
}

func TestPoolPlanFitsEightyColumns(t *testing.T) {
	t.Parallel()
	p := plan{Version: 20261123, InForce: 20261122, Pools: []plannedPool{
		{Name: "payments", Change: "changed", RateNow: "1000/s", Rate: "2000/s", CapacityNow: 3000, Capacity: 3000,
			Regions: []plannedRegion{
				{Region: "eu-west-1", Change: "none", State: "alive", Now: 737.5, Then: 1400, FloorNow: 100, Floor: 150,
					Demand: 1000},
				{Region: "us-east-1", Change: "leaves", State: "silent", Now: 262.5, FloorNow: 50, Demand: 330},
				{Region: "ap-south-1", Change: "joins", State: "unheard", Then: 600, Floor: 50},
			}},
		{Name: "mail", Change: "added", Rate: "60/m", Capacity: 90, Waits: []string{"ap-south-1", "eu-west-1", "us-east-1"}},
		{Name: "sms", Change: "removed", RateNow: "5/s", CapacityNow: 10},
	}}
	var out bytes.Buffer
	require.NoError(t, p.write(&out, 80))
	for _, line := range strings.Split(out.String(), "\n") {
		require.LessOrEqual(t, utf8.RuneCountInString(line), 80, line)
	}
	require.Contains(t, out.String(), "version 20261123 in the file, version 20261122 in force\n")
	require.Contains(t, out.String(), "\npayments  1000/s → 2000/s, capacity 3000\n")
	require.Regexp(t, `(?m)^eu-west-1 +737\.5/s +1400/s +.*1000/s *$`, out.String())
	require.Regexp(t, `(?m)^us-east-1 +262\.5/s +0/s .* leaves, silent`, out.String())
	require.Regexp(t, `(?m)^ap-south-1 +0/s +600/s .* joins, has never reported$`, out.String())
	require.Contains(t, out.String(), "\nmail  added: 60/m, capacity 90; only floors until these regions acknowledge it:")
	require.Contains(t, out.String(), "\nsms  removed: 5/s, capacity 10\n")
}
