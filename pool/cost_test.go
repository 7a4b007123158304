package pool

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// BenchmarkCoordinatorPeriod measures the work of a coordinator in one report period, without the network. The regions
// report on 1000 pools, one region after the other, with new random demands, and get grants. A period is 1 s. So ns/op
// divided by 10⁹ is the part of a core that a coordinator needs. MB-shares and MB-reports are what the coordinator and
// the regions write to etcd per second.
func BenchmarkCoordinatorPeriod(b *testing.B) {
	for _, regions := range []int{20, 50} {
		b.Run(fmt.Sprintf("%d regions", regions), func(b *testing.B) { coordinatorPeriod(b, regions) })
	}
}

func coordinatorPeriod(b *testing.B, regions int) {
	const pools = 1000
	rng := rand.New(rand.NewPCG(1, 1))
	settings := Settings{Version: 1}
	for i := range pools {
		p := Pool{Name: fmt.Sprint("pool", i), Rate: policy.PerSecond(10_000), Capacity: 500_000}
		for r := range regions {
			p.Regions = append(p.Regions, Region{Name: fmt.Sprint("region", r), Weight: 1})
		}
		settings.Pools = append(settings.Pools, p)
	}
	t := newTerm(newCoordinator(nil, DefaultTiming(), nil), leadership{revision: 1})
	if err := t.applySettings(settings.record()); err != nil {
		b.Fatal(err)
	}
	now := time.Now()
	size, reported := 0, 0
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer() // the work of agents isn't measured
		now = now.Add(time.Second)
		reports := make([]string, regions)
		reported = 0
		for r := range regions {
			region := fmt.Sprint("region", r)
			rep := report{agent: region, tickets: make(map[string]ticket, pools)}
			for name, l := range t.ledgers {
				shown := ticket{now: now.UnixMicro(), era: 1, tokens: rng.Int64N(1e4), added: now.Unix()*100 + rng.Int64N(1e6),
					denied: rng.Int64N(100)}
				shown.used = shown.added - shown.tokens
				if newest := l.account(region).newest(); newest != nil {
					shown.kind, shown.terms = pooled, *newest
					shown.terms.Interval, shown.terms.MaxElapsed = 0, 0
				}
				rep.tickets[name] = shown
			}
			reports[r] = rep.encode()
			reported += len(reports[r])
		}
		b.StartTimer()
		for r, text := range reports {
			if err := t.applyReport(fmt.Sprint("region", r), text, true, now); err != nil {
				b.Fatal(err)
			}
		}
		t.plan(now) // once a period, since a coordinator with this much work makes one round a period
		size = 0
		for region := range t.dirty {
			w, _ := t.write(region)
			size += len(w.value)
		}
		clear(t.dirty)
	}
	b.ReportMetric(float64(size)/1e6, "MB-shares/op")
	b.ReportMetric(float64(reported)/1e6, "MB-reports/op")
	b.ReportMetric(float64(len(settings.record()))/1e6, "MB-settings")
}
