package pool

import (
	"fmt"
	"testing"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// BenchmarkCoordinatorPeriod is the work of a coordinator in one period, without
// the network: 50 regions report on 1000 pools, one after the other, and get
// their grants renewed. The period being 1 s, ns/op over 10⁹ is the part of a
// core that it takes.
func BenchmarkCoordinatorPeriod(b *testing.B) {
	const regions, pools = 50, 1000
	settings := Settings{Version: 1}
	for i := range pools {
		p := Pool{Name: fmt.Sprint("pool", i), Rate: policy.PerSecond(10_000), Capacity: 500_000}
		for r := range regions {
			p.Regions = append(p.Regions, Region{Name: fmt.Sprint("region", r), Weight: 1})
		}
		settings.Pools = append(settings.Pools, p)
	}
	t := newTenure(newCoordinator(nil, DefaultTiming(), nil), office{epoch: 1})
	if err := t.configure(settings.record()); err != nil {
		b.Fatal(err)
	}
	now := time.Now()
	size := 0
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer() // what agents do
		now = now.Add(time.Second)
		reports := make([]string, regions)
		for r := range regions {
			region := fmt.Sprint("region", r)
			rep := report{agent: region, tickets: make(map[string]lua.Ticket, pools)}
			for name, l := range t.ledgers {
				ticket := lua.Ticket{Now: now.UnixMicro(), Version: policy.Version{Era: 1, Index: 1}, Tokens: 100, Added: now.Unix() * 100}
				if newest := l.account(region).newest(); newest != nil {
					ticket.Fence = newest.Fence
				}
				rep.tickets[name] = ticket
			}
			reports[r] = rep.encode()
		}
		b.StartTimer()
		for r, text := range reports {
			if err := t.hear(fmt.Sprint("region", r), text, now); err != nil {
				b.Fatal(err)
			}
		}
		t.plan(now) // with so much to do, the pace is down to one round a period
		size = 0
		for region := range t.dirty {
			w, _ := t.write(region)
			size += len(w.value)
		}
		clear(t.dirty)
	}
	b.ReportMetric(float64(size)/1e6, "MB-written/op")
	b.ReportMetric(float64(len(settings.record()))/1e6, "MB-settings")
}
