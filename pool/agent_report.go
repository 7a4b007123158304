package pool

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// pools returns the names of the pools to report on. These are the pools that have the region in this replica's
// settings, in the settings in etcd or in the region's share. It adds pools whose newest known terms give the region a
// rate, because etcd may have lost these pools. The kind of the region's bucket doesn't matter: a pool may wait for the
// region's report even if the bucket doesn't belong to the pool yet.
func (a *Agent) pools() []string {
	names := map[string]bool{}
	add := func(name string, is bool) {
		if is {
			names[name] = true
		}
	}
	a.mu.Lock()
	for _, p := range a.settings.Pools {
		add(p.Name, p.Has(a.region))
	}
	a.mu.Unlock()
	for name, b := range a.known {
		add(name, b.offered && !isRetired(b.terms))
	}
	for name, has := range a.named {
		add(name, has)
	}
	maps.Copy(names, a.shared)
	return slices.Sorted(maps.Keys(names))
}

// view is the result of reading the region's buckets.
type view struct {
	names   []string // of the pools
	results []lua.TicketResult
	failed  error             // the error of a bucket that can't be read
	voids   []lua.RefillCall  // for the buckets whose clock is wrong
	tickets map[string]ticket // of the buckets that were read and whose clock is right
	rate    float64           // the relative error of the rate of Redis' clock
	news    bool              // a ticket shows something that the coordinator doesn't know yet
}

// poll reads the buckets, voids grants that a wrong clock would prolong, and applies new terms. It writes a report in
// any of three cases: must is set, it is this agent's turn, or a ticket has news for the coordinator.
func (a *Agent) poll(ctx context.Context, must bool) {
	v := a.read(ctx)
	changed, failed := a.void(ctx, v.voids)
	a.observeRedis(ctx, v, cmp.Or(v.failed, failed))
	if changed || a.apply(ctx) {
		a.poll(ctx, true) // the state that was read is out of date
		return
	}
	// The usage continues from the report in etcd. So no report is written before that one has been read.
	if len(v.tickets) == 0 || !a.loaded || !must && !v.news && a.now().Before(a.turn()) {
		return
	}
	a.put(ctx, a.report(v))
}

// read reads the tickets and checks the clocks.
func (a *Agent) read(ctx context.Context) view {
	v := view{names: a.pools(), tickets: map[string]ticket{}}
	asking, cancel := context.WithTimeout(ctx, a.redisTimeout())
	defer cancel()
	sent := a.raw()
	v.results = a.buckets.tickets(asking, v.names)
	replied := a.raw()
	a.polled = a.now()
	for i, res := range v.results {
		name := v.names[i]
		t := res.Ticket
		b := a.bucket(v.names[i])
		if res.Err != nil {
			v.failed = res.Err
			continue
		}
		if era := t.Version.Era; era != 0 && era != b.era {
			b.before, b.era = b.era, era
		}
		if t.Version.Era != 0 && b.watchdog.check(reading{sent, replied, t.Now}, t.Version.Era, a.timing.Lease) {
			v.voids = append(v.voids, b.void(name, t))
			continue
		}
		if rate := b.watchdog.rate(); math.Abs(rate) > math.Abs(v.rate) {
			v.rate = rate
		}
		a.restart(name, b, t)
		b.fence = t.Fence
		if b.version.Before(t.Version) {
			b.version = t.Version
		}
		now, before := ticketOf(t), a.reported.tickets[name]
		now.before = b.before
		if now.era == 0 {
			now.before = b.era
		}
		if a.loaded {
			now = b.count(now)
		}
		v.tickets[name] = now
		v.news = v.news || !before.timed() || before.terms != now.terms || before.era != now.era ||
			b.surges(now, a.timing.Report)
	}
	return v
}

// restart gives the terms in force to the refiller, if etcd has not offered any terms since this process started.
// Without them the refiller couldn't create the bucket if the server lost it.
func (a *Agent) restart(name string, b *bucket, t lua.Ticket) {
	if a.refiller != nil && !b.offered && t.Terms != nil && t.Terms.Pool {
		_ = a.refiller.SetTerms(name, *t.Terms) // it fails if this process doesn't refill the pool
	}
}

// report returns the report of a view. If a bucket couldn't be read, or failed to begin the new era that its wrong
// clock requires, the report has only the bucket's last known usage.
func (a *Agent) report(v view) report {
	for _, name := range v.names {
		if b := a.bucket(name); !v.tickets[name].timed() && b.counted != (ticket{}) {
			v.tickets[name] = b.counted.usageOnly()
		}
	}
	return report{agent: a.identity, tickets: v.tickets}
}

// recordReport records a report that is in etcd.
func (a *Agent) recordReport(r report) {
	for name, t := range r.tickets {
		b := a.bucket(name)
		if s, ok := b.nextSample(t, a.timing.Report); ok && t.timed() {
			b.sample = s
		}
		b.recount(t)
	}
	a.reported, a.since = r, a.now()
}

// observeRedis updates the agent's state from the tickets, and logs when Redis becomes unavailable or available again.
func (a *Agent) observeRedis(ctx context.Context, v view, failed error) {
	var shares []Share
	for i, res := range v.results {
		if b := a.bucket(v.names[i]); b.offered && res.Err == nil {
			share := shareOf(v.names[i], b.terms, res.Ticket)
			share.Demand = policy.Rate{Tokens: b.demand, Per: share.Floor.Per}
			share.Open, share.Doubled = b.open, b.doubled
			share.Used = -1
			if a.loaded {
				share.Used = b.counted.used
			}
			shares = append(shares, share)
		}
	}
	a.setState(func(s *AgentState) {
		s.Shares, s.Away = shares, ""
		s.ClockRate = v.rate
		if failed != nil {
			s.Away = failed.Error()
		}
	})
	unavailable := failed != nil
	if unavailable == a.unavailable || ctx.Err() != nil {
		return
	}
	a.unavailable = unavailable
	if unavailable {
		a.log.Warn("redis is unavailable: the region gets no grants", "region", a.region, "error", failed)
	} else {
		a.log.Info("redis is available again", "region", a.region)
	}
}

// shareOf returns the region's share of a pool at the time of a ticket. t are the newest terms. Their grant counts only
// if the ticket shows that it is in force.
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
		a.recordReport(r)
		a.setState(func(s *AgentState) { s.Reports, s.Cut = s.Reports+1, "" })
	} else if ctx.Err() == nil {
		a.since = a.now() // the next try is made at the time of the next report
		a.setState(func(s *AgentState) { s.Failures, s.Cut = s.Failures+1, err.Error() })
	}
	if cut := err != nil; cut != a.cut && ctx.Err() == nil {
		a.cut = cut
		if cut {
			a.log.Warn("report can't be written", "region", a.region, "error", err)
		} else {
			a.log.Info("reports go on", "region", a.region)
		}
	}
}

// When agents poll Redis and report, in hundredths of the report period H.
const (
	// ownTurn is the time between two reports of the reporter, and halfway is the time between two of its polls. Twice
	// halfway exceeds ownTurn, so the reporter writes a report at every second poll. If demand surges, it also writes one
	// at the poll in between. The rest of H is left for the write to etcd.
	ownTurn, halfway = 95, 52
	// othersTurn is the time after the last report at which another agent reports if the reporter is silent. othersPoll is
	// the time between two polls of such an agent. A random time of up to lag is added to each, so that the agents don't
	// act at the same time.
	othersTurn = 125
	othersPoll = 100
	lag        = 12
)

// hundredths returns n hundredths of the report period.
func (a *Agent) hundredths(n time.Duration) time.Duration { return a.timing.Report * n / 100 }

// isReporter reports whether the region's last report is this agent's.
func (a *Agent) isReporter() bool { return a.reported.agent == a.identity }

// turn returns when this agent reports next.
func (a *Agent) turn() time.Time {
	if a.since.IsZero() || a.isReporter() {
		return a.since.Add(a.hundredths(ownTurn))
	}
	return a.since.Add(a.hundredths(othersTurn))
}

// next returns when to poll again.
func (a *Agent) next() time.Time {
	if a.isReporter() {
		return a.polled.Add(a.hundredths(halfway))
	}
	at := a.polled.Add(a.hundredths(othersPoll))
	if turn := a.turn(); turn.Before(at) && turn.After(a.polled) {
		at = turn
	}
	return at.Add(time.Duration(a.rng.Int64N(int64(a.hundredths(lag)))))
}
