package pool

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// pools returns the names of the pools to report on: those that this replica's settings, the settings in etcd or the
// region's share name for the region, whatever kind of bucket it has now. It adds those whose newest known terms leave
// the region something, because etcd may have lost them. A pool that waits for the region needs a report even if the
// bucket isn't a pool's.
func (a *Agent) pools() []string {
	names := map[string]bool{}
	a.mu.Lock()
	for _, p := range a.settings.Pools {
		names[p.Name] = p.Has(a.region)
	}
	a.mu.Unlock()
	for name, b := range a.known {
		names[name] = names[name] || b.offered && !isRetired(b.terms)
	}
	for _, more := range []map[string]bool{a.named, a.shared} {
		for name, is := range more {
			names[name] = names[name] || is
		}
	}
	maps.DeleteFunc(names, func(_ string, is bool) bool { return !is })
	return slices.Sorted(maps.Keys(names))
}

// look reads the tickets, checks the clocks, and writes a report if must is set, if it is this agent's turn, or if a
// ticket is news to the coordinator. It writes no report before it has read the region's keys from etcd, because the
// usage continues from the report there.
func (a *Agent) look(ctx context.Context, must bool) {
	names := a.pools()
	asking, cancel := context.WithTimeout(ctx, a.redisTimeout())
	sent := a.now()
	results := a.buckets.tickets(asking, names)
	replied := a.now()
	cancel()
	a.looked = replied

	r := report{agent: a.identity, tickets: map[string]ticket{}}
	var voids []lua.RefillCall
	var failed error
	for i, res := range results {
		if res.Err != nil {
			failed = res.Err
			continue
		}
		t, b := res.Ticket, a.bucket(names[i])
		if t.Version.Era != 0 && b.watchdog.check(reading{sent, replied, t.Now}, t.Version.Era, a.timing.Lease) {
			a.log.Warn("redis' clock doesn't agree with ours: bucket begins a new era", "pool", names[i], "region", a.region,
				"era", t.Version.Era)
			voids = append(voids, b.void(names[i], t))
			continue
		}
		now := ticketOf(t)
		if a.loaded {
			now = b.count(now)
		}
		r.tickets[names[i]] = now
		if b.fence = t.Fence; b.version.Before(t.Version) {
			b.version = t.Version
		}
		before, known := a.reported.tickets[names[i]]
		must = must || !known || before.terms != now.terms || before.era != now.era || b.surges(now, a.timing.Report)
	}
	a.observeRedis(ctx, names, results, failed)
	if len(voids) > 0 {
		calling, cancel := context.WithTimeout(ctx, a.redisTimeout())
		a.buckets.refill(calling, voids)
		cancel()
		a.note(func(s *AgentState) { s.Voids += int64(len(voids)) })
	}
	if len(voids) > 0 || a.apply(ctx) {
		a.look(ctx, true) // what was read is no longer so
		return
	}
	if len(r.tickets) > 0 && a.loaded && (must || !a.now().Before(a.turn())) {
		a.put(ctx, r)
		if a.wiped && len(a.shared) == 0 {
			signal(a.changed) // nothing is left that settings of ours might contradict
		}
	}
}

// sample is what was asked for until a ticket, in tokens per µs.
type sample struct {
	until ticket
	rate  float64
}

// hear takes in what has been reported.
func (a *Agent) hear(r report) {
	for name, t := range r.tickets {
		b := a.bucket(name)
		if s, ok := b.next(t, a.timing.Report); ok {
			b.sample = s
		}
		b.recount(t)
	}
	a.reported, a.since = r, a.now()
}

// next is the sample that a report of the ticket would make; not ok if it would make none, being too short.
func (b *bucket) next(t ticket, period time.Duration) (sample, bool) {
	from := b.sample.until
	elapsed, goesOn := t.since(from)
	if !goesOn {
		return sample{until: t}, true
	}
	asked := t.taken(from) + t.denied - from.denied
	return sample{t, float64(asked) / float64(max(elapsed.Microseconds(), 1))}, elapsed >= period/2
}

// surges reports whether demand has risen so much since the last report that
// the coordinator should hear of it before the period is over.
func (b *bucket) surges(now ticket, period time.Duration) bool {
	s, ok := b.next(now, period)
	step := 0.1 * float64(max(b.terms.Tokens, b.terms.GrantTokens)) / float64(max(b.terms.Per, 1))
	return ok && s.rate > 1.2*b.sample.rate+step
}

// observeRedis notes what the tickets tell of this region, and whether there are any.
func (a *Agent) observeRedis(ctx context.Context, names []string, results []lua.TicketResult, failed error) {
	var shares []Share
	for i, res := range results {
		if b := a.bucket(names[i]); b.offered && res.Err == nil {
			share := shareOf(names[i], b.terms, res.Ticket)
			share.Demand = policy.Rate{Tokens: b.demand, Per: share.Floor.Per}
			if share.Used = -1; a.loaded {
				share.Used = b.counted.used
			}
			shares = append(shares, share)
		}
	}
	a.note(func(s *AgentState) {
		if s.Shares, s.Away = shares, ""; failed != nil {
			s.Away = failed.Error()
		}
	})
	if away := failed != nil; away != a.away && ctx.Err() == nil {
		if a.away = away; away {
			a.log.Warn("redis is away: no tickets, so no grants", "region", a.region, "error", failed)
		} else {
			a.log.Info("redis is back: tickets go on", "region", a.region)
		}
	}
}

// shareOf is what is in force if the server has the newest terms.
func shareOf(pool string, t policy.Terms, at lua.Ticket) Share {
	s := Share{Pool: pool, Floor: t.Rate(), Capacity: t.Capacity, Tokens: at.Tokens}
	s.Rate = s.Floor
	if left := t.GrantEnd - at.Now; at.Fence == t.Fence && at.Version.Era == t.GrantEra && left > 0 {
		s.Remaining = time.Duration(left) * time.Microsecond
		s.Rate.Tokens = t.GrantTokens
	}
	return s
}

// put writes the report.
func (a *Agent) put(ctx context.Context, r report) {
	writing, cancel := context.WithTimeout(ctx, a.timing.request())
	defer cancel()
	a.mu.Lock()
	seen := a.revision
	a.mu.Unlock()
	revision, err := a.registry.put(writing, reportKeys+a.region, r.encode())
	if err == nil {
		a.wroteAt(revision, seen)
		a.hear(r)
		a.note(func(s *AgentState) { s.Reports, s.Cut = s.Reports+1, "" })
	} else if ctx.Err() == nil {
		a.since = a.now() // so that the next try comes in its time
		a.note(func(s *AgentState) { s.Failures, s.Cut = s.Failures+1, err.Error() })
	}
	if cut := err != nil; cut != a.cut && ctx.Err() == nil {
		if a.cut = cut; cut {
			a.log.Warn("report can't be written", "region", a.region, "error", err)
		} else {
			a.log.Info("reports go on", "region", a.region)
		}
	}
}

// turn is when this agent reports next: the one that did last after a period, the others a little later.
func (a *Agent) turn() time.Time {
	if a.since.IsZero() || a.reports() {
		return a.since.Add(a.timing.Report * 95 / 100)
	}
	return a.since.Add(a.timing.Report * 5 / 4)
}

// reports reports whether the region's last report is this agent's.
func (a *Agent) reports() bool { return a.reported.agent == a.identity }

// next is when to look again: halfway to the next report, in case demand surges, or once a period.
func (a *Agent) next() time.Time {
	at := a.looked.Add(a.timing.Report * 52 / 100)
	if !a.reports() {
		at = a.looked.Add(a.timing.Report + time.Duration(a.rng.Int64N(int64(a.timing.Report/8))))
		if turn := a.turn(); turn.Before(at) && turn.After(a.looked) {
			at = turn.Add(time.Duration(a.rng.Int64N(int64(a.timing.Report / 8))))
		}
	}
	return at
}
