package pool

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/policy"
)

// ReadSettings reads the settings in force below a prefix; found is false if there are none.
func ReadSettings(ctx context.Context, client *clientv3.Client, prefix string) (s Settings, found bool, err error) {
	entries, _, err := newEtcdRegistry(client, prefix).load(ctx, configKey)
	if err != nil || len(entries) == 0 {
		return Settings{}, false, err
	}
	s, err = decodeSettings(entries[0].value)
	if err != nil {
		return Settings{}, true, fmt.Errorf("%s: %w", configKey, err)
	}
	return s, true, nil
}

// Status is the state of all pools below a prefix, according to etcd.
type Status struct {
	Version int64        `json:"version"` // of the settings in force
	Pools   []PoolStatus `json:"pools"`
	// Unreadable has the error of each key whose record can't be read. The status of the key's region is then incomplete.
	// If the key is that of the settings, the status of all regions is incomplete.
	Unreadable map[string]string `json:"unreadable,omitempty"`

	Settings Settings           `json:"-"` // in force
	Fences   map[string]Fencing `json:"-"` // by region
}

// PoolStatus is the status of one pool.
type PoolStatus struct {
	Name     string         `json:"name"`
	Rate     string         `json:"rate,omitempty"` // empty if the pool was removed from the configuration
	Capacity int64          `json:"capacity,omitempty"`
	Open     bool           `json:"open"`            // its regions may get more than their floors
	Waits    []string       `json:"waits,omitempty"` // it opens when these regions have acknowledged it or are fenced
	Regions  []RegionStatus `json:"regions"`
}

// RegionStatus is one region's part in a pool. Rates are tokens per second.
type RegionStatus struct {
	Region      string    `json:"region"`
	Granted     float64   `json:"granted"`              // by the newest grant, floor included
	Floor       float64   `json:"floor"`                // of the region
	Capacity    int64     `json:"capacity"`             // of the region's bucket
	Demand      float64   `json:"demand"`               // the rate that it could use, as the coordinator computed it
	Age         float64   `json:"grant_age_seconds"`    // of the newest grant, at the region's last report
	Remaining   float64   `json:"remaining_seconds"`    // of the newest grant, at the last report; 0 on the floor
	Applied     bool      `json:"applied"`              // the region has acknowledged the newest grant
	Claimed     float64   `json:"claimed"`              // the highest rate that it may be using, if Known
	Tokens      int64     `json:"tokens"`               // at its last report
	Used        int64     `json:"used"`                 // taken by its consumers up to its last report; never falls
	Reported    bool      `json:"reported"`             // its last report has the state of the bucket
	At          time.Time `json:"reported_at,omitzero"` // of its last report, on the clock of its Redis
	Reporter    string    `json:"reporter"`             // the agent that reported last
	Fenced      *Fencing  `json:"fenced"`               // set if an operator has fenced or drained the region
	Unreadable  bool      `json:"unreadable,omitempty"` // some record of it can't be read
	Alive       bool      `json:"alive"`                // it reported while ReadLiveStatus waited
	OtherServer bool      `json:"other_redis"`          // another Redis reports under its name, too
	Joined      bool      `json:"joined"`               // it has acknowledged terms of the pool in this etcd
	Bucket      string    `json:"bucket,omitempty"`     // "none": its Redis has no bucket; "plain": it isn't a pool's
	Configured  bool      `json:"configured"`
}

// Idle reports whether the region has acknowledged that it must use nothing of the pool.
func (r RegionStatus) Idle() bool { return r.Joined && r.Applied && r.Claimed == 0 }

// Known reports whether Claimed is all that the region may be using. It is not if a record of the region can't be
// read, or if the region is in use and etcd has no report of it, for example because etcd was emptied. Then the region
// may also be using an earlier grant, until that grant ends.
func (r RegionStatus) Known() bool { return !r.Unreadable && (r.Reported || !r.inUse()) }

// inUse reports whether the region may use a part of the pool: it is configured and not fenced. So a region that
// is being drained is in use.
func (r RegionStatus) inUse() bool { return r.Configured && (r.Fenced == nil || r.Fenced.Drain) }

// ReadStatus reads the pools below a prefix. It does not find out which regions are alive.
func ReadStatus(ctx context.Context, client *clientv3.Client, prefix string) (Status, error) {
	s, _, err := readStatus(ctx, newEtcdRegistry(client, prefix))
	return s, err
}

// ReadLiveStatus is like ReadStatus, and also finds out which regions are alive. A region is alive if it writes a
// report while ReadLiveStatus waits. The times in reports are not compared, since they come from the regions' own
// clocks. ReadLiveStatus waits until each of the named regions has reported, but not longer than 2.5 s. If no region is
// named, it waits for all regions that have ever reported.
func ReadLiveStatus(ctx context.Context, client *clientv3.Client, prefix string, regions ...string) (Status, error) {
	return readLiveStatus(ctx, newEtcdRegistry(client, prefix), regions...)
}

func readLiveStatus(ctx context.Context, r registry, regions ...string) (Status, error) {
	s, revision, err := readStatus(ctx, r)
	if err != nil {
		return Status{}, err
	}
	waits := map[string]bool{}
	for _, region := range regions {
		waits[region] = true
	}
	for _, p := range s.Pools {
		for _, one := range p.Regions {
			if len(regions) == 0 && one.Reporter != "" {
				waits[one.Region] = true
			}
		}
	}
	alive, err := awaitReports(ctx, r, revision, waits)
	for _, p := range s.Pools {
		for i := range p.Regions {
			p.Regions[i].Alive = alive[p.Regions[i].Region]
		}
	}
	return s, err
}

// awaitReports returns the regions that write a report after the revision. It returns when all regions of waits have
// written one, or after the time in which every living region writes one.
func awaitReports(ctx context.Context, r registry, revision int64, waits map[string]bool) (map[string]bool, error) {
	alive := map[string]bool{}
	waiting, cancel := context.WithTimeout(ctx, DefaultTiming().fresh())
	events, watched := make(chan entry), make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { watched <- r.watch(waiting, revision+1, events) })
	for len(waits) > 0 {
		select {
		case e := <-events:
			if region, ok := e.under(reportKeys); ok && !e.deleted {
				alive[region] = true
				delete(waits, region)
			}
		case err := <-watched:
			if waiting.Err() != nil {
				err = ctx.Err() // nil if the time has passed
			}
			return alive, err
		}
	}
	return alive, nil
}

func readStatus(ctx context.Context, r registry) (Status, int64, error) {
	rec, revision, err := readRecords(ctx, r)
	if err != nil {
		return Status{}, 0, err
	}
	pools := map[string]Pool{} // a pool without regions was removed from the configuration
	for _, s := range rec.shares {
		for name := range s.pools {
			pools[name] = Pool{Name: name}
		}
	}
	for _, p := range rec.settings.Pools {
		pools[p.Name] = p
	}
	out := Status{Version: rec.settings.Version, Settings: rec.settings, Fences: rec.fences, Unreadable: rec.unreadable}
	for _, name := range slices.Sorted(maps.Keys(pools)) {
		out.Pools = append(out.Pools, rec.status(pools[name]))
	}
	return out, revision, nil
}

// status returns the status of a pool.
func (rec records) status(p Pool) PoolStatus {
	l := rec.ledger(p)
	out := PoolStatus{Name: p.Name, Open: l.open && l.pool != nil, Waits: l.waits(), Regions: []RegionStatus{}}
	if l.pool != nil {
		out.Rate, out.Capacity = p.Rate.String(), p.Capacity
	}
	for _, region := range slices.Sorted(maps.Keys(l.accounts)) {
		a := l.accounts[region]
		part, configured := l.parts[region]
		claimed, _ := a.claims(l.unit)
		if configured && !a.joined && a.declared != fenced {
			claimed.rate = max(claimed.rate, l.reserved(part))
		}
		r := RegionStatus{
			Region: region, Configured: configured || rec.unreadable[configKey] != "", Joined: a.joined,
			Claimed: l.unit.perSecond(claimed.rate),
		}
		for _, keys := range []string{shareKeys, reportKeys, fenceKeys} {
			r.Unreadable = r.Unreadable || rec.unreadable[keys+region] != ""
		}
		if f, ok := rec.fences[region]; ok {
			r.Fenced = &f
		}
		r.fill(rec.shares[region].pools[p.Name], rec.reports[region], p.Name, rec.shares[region].lease)
		out.Regions = append(out.Regions, r)
	}
	return out
}

// ledger returns a pool's ledger as a new coordinator would make it. If p has no regions, the pool was removed from
// the configuration.
func (rec records) ledger(p Pool) *ledger {
	l, now := newLedger(p.Name), time.Now()
	if len(p.Regions) > 0 {
		l.configure(&p)
	}
	for region, s := range rec.shares {
		if g, ok := s.pools[p.Name]; ok {
			l.inherit(region, g, s.lease, now)
		}
	}
	for region, a := range l.accounts {
		if f, ok := rec.fences[region]; ok {
			a.declared = f.declared()
		}
		if t := rec.reports[region].tickets[p.Name]; t.timed() {
			l.applyTicket(region, t, false, DefaultTiming(), now)
		}
	}
	return l
}

// records are the decoded records of all pools in etcd. The keys of shares, reports and fences are regions.
type records struct {
	settings Settings
	shares   map[string]share
	reports  map[string]report
	fences   map[string]Fencing

	unreadable map[string]string // the errors of records that can't be read, by key
}

func readRecords(ctx context.Context, r registry) (records, int64, error) {
	rec := records{shares: map[string]share{}, reports: map[string]report{}, fences: map[string]Fencing{},
		unreadable: map[string]string{}}
	entries, revision, err := r.load(ctx)
	for _, e := range entries {
		if err := rec.read(e); err != nil {
			rec.unreadable[e.key] = err.Error()
		}
	}
	return rec, revision, err
}

// read adds a record.
func (rec *records) read(e entry) (err error) {
	if region, ok := e.under(shareKeys); ok {
		rec.shares[region], err = decodeShare(e.value)
	} else if region, ok := e.under(reportKeys); ok {
		rec.reports[region], err = decodeReport(e.value)
	} else if region, ok := e.under(fenceKeys); ok {
		var f Fencing
		f, err = decodeFencing(e.value)
		if err == nil {
			rec.fences[region] = f
		}
	} else if e.key == configKey {
		rec.settings, err = decodeSettings(e.value)
	}
	return err
}

// fill sets the fields that come from the region's grants and from its last report. The grants are in order, the newest
// first; there may be none.
func (s *RegionStatus) fill(g grants, r report, pool string, lease time.Duration) {
	perSecond := func(n int64, t policy.Terms) float64 { return unit{micros: t.Per}.perSecond(n) }
	newest := policy.Terms{Per: 1}
	if len(g.terms) > 0 {
		newest = g.terms[0]
	}
	s.OtherServer = g.doubled
	s.Floor, s.Capacity = perSecond(newest.Tokens, newest), newest.Capacity
	s.Granted, s.Demand = max(s.Floor, perSecond(newest.GrantTokens, newest)), perSecond(g.demand, newest)
	ticket := r.tickets[pool]
	s.Reporter = r.agent
	s.Reported, s.Used = ticket.timed(), ticket.used
	if s.Reported {
		s.Tokens, s.Applied = ticket.tokens, ticket.acknowledges(newest)
		s.At = time.UnixMicro(ticket.now).UTC()
		if newest.GrantTokens > 0 && newest.GrantEra == ticket.era {
			s.Remaining = max(0, float64(newest.GrantEnd-ticket.now)/1e6)
			s.Age = max(0, lease.Seconds()-s.Remaining)
		}
		s.Bucket = map[kind]string{absent: "none", plain: "plain"}[ticket.kind]
	}
}
