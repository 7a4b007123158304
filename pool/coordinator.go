package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/policy"
)

// pace is the shortest time between two rounds of planning, so that what
// happens at about the same time is answered with one write.
const pace = 50 * time.Millisecond

// maxPace bounds the pace of a coordinator with much to do: planning takes at
// most about a tenth of its time.
const maxPace = time.Second

// errDeposed ends a term: the coordinator's key in the election is gone.
var errDeposed = errors.New("pool: another coordinator has taken office")

// errStuck ends a term: etcd keeps the coordinator in office and takes nothing from it.
var errStuck = errors.New("pool: shares can't be written: another coordinator is to try")

// CoordinatorConfig is what a Coordinator needs.
type CoordinatorConfig struct {
	Client *clientv3.Client // stays the caller's
	Prefix string           // of the pools' keys, without a slash at the end
	Timing Timing
	Logger hclog.Logger // nil means a default one named refiller.pool
}

// Coordinator hands out the shares of all pools below a prefix while it leads.
// It is safe for concurrent use.
type Coordinator struct {
	timing   Timing
	log      hclog.Logger
	registry registry

	mu      sync.Mutex
	stats   CoordinatorStats
	pools   map[string]PoolSum // while it leads
	regions map[string]RegionSeen
}

// CoordinatorStats counts what a coordinator did since it was made.
type CoordinatorStats struct {
	Leading bool
	Epoch   int64 // of the present or last term
	Commits int64 // transactions that were made
	Refused int64 // transactions that were not, since a key had changed
	Errors  int64 // requests to etcd that failed
	Writes  int64 // shares written
	Plans   int64 // rounds of planning, of one pool each
	// TooLarge counts the shares that were not written because etcd would have refused them.
	TooLarge int64
	Unread   int // records that can't be read: until they can, shares are renewed as they are and nobody gets more
}

// PoolSum is what a pool's regions may be using together, in tokens per second.
type PoolSum struct {
	Rate    float64 // R, never exceeded by Claimed; 0 once the pool has left the configuration
	Claimed float64 // the most that the regions may be using: what they were offered and have not acknowledged away
	Demand  float64 // what they could use
}

// RegionSeen is what the coordinator knows of a region.
type RegionSeen struct {
	Heard  time.Time // when its last report came; zero for never in this term
	Since  time.Time // since when it is known
	Fenced bool      // an operator has declared that it uses nothing
}

// NewCoordinator checks the configuration; it makes no request.
func NewCoordinator(cfg CoordinatorConfig) (*Coordinator, error) {
	if cfg.Client == nil || cfg.Prefix == "" {
		return nil, fmt.Errorf("%w: Client and Prefix are required", ErrPool)
	}
	if err := cfg.Timing.Validate(); err != nil {
		return nil, err
	}
	return newCoordinator(newEtcdRegistry(cfg.Client, cfg.Prefix), cfg.Timing, cfg.Logger), nil
}

func newCoordinator(r registry, t Timing, log hclog.Logger) *Coordinator {
	if log == nil {
		log = hclog.Default().Named("refiller.pool")
	}
	return &Coordinator{timing: t, log: log, registry: r, pools: map[string]PoolSum{}, regions: map[string]RegionSeen{}}
}

// Lead coordinates under a term until ctx ends or the term turns out to be over.
// It is the function that an election among all regions calls.
func (c *Coordinator) Lead(ctx context.Context, term election.Term) error {
	return c.govern(ctx, office{key: term.Key, epoch: term.Epoch})
}

// Stats is a snapshot of the counts.
func (c *Coordinator) Stats() CoordinatorStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.stats
}

// Sums tells of each pool by name while this coordinator leads.
func (c *Coordinator) Sums() map[string]PoolSum {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.pools)
}

// Regions tells of each region that reports or should, by name, while this
// coordinator leads.
func (c *Coordinator) Regions() map[string]RegionSeen {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.regions)
}

// saw notes what is known of a region.
func (c *Coordinator) saw(region string, note func(*RegionSeen)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, known := c.regions[region]
	if !known {
		r.Since = time.Now()
	}
	note(&r)
	c.regions[region] = r
}

func (c *Coordinator) count(change func(*CoordinatorStats)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change(&c.stats)
}

func (c *Coordinator) enter(leading bool, epoch int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Leading, c.stats.Epoch, c.stats.Unread = leading, epoch, 0
	c.pools, c.regions = map[string]PoolSum{}, map[string]RegionSeen{}
}

func (c *Coordinator) govern(ctx context.Context, o office) error {
	c.enter(true, o.epoch)
	defer c.enter(false, o.epoch)
	t := newTenure(c, o)
	failures := 0
	for ctx.Err() == nil {
		began := time.Now()
		err := t.session(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, errDeposed):
			return err
		case time.Since(t.able) > t.timing.Lease/3:
			return fmt.Errorf("%w: %w", errStuck, err)
		case time.Since(began) > maxPace:
			failures = 0
		}
		c.count(func(s *CoordinatorStats) { s.Errors++ })
		if failures++; failures == 1 {
			c.log.Warn("connection to etcd lost: shares stay as they are", "epoch", o.epoch, "error", err)
		}
		sleep(ctx, min(pace<<min(failures, 5), maxPace))
	}
	return context.Cause(ctx)
}

// tenure is one term of a coordinator. What it has offered stays known for the
// whole term, through every loss of the connection.
type tenure struct {
	*Coordinator
	office  office
	seq     int64
	ledgers map[string]*ledger
	order   []*ledger        // by name; rebuilt when it is nil
	seen    map[string]int64 // revisions at which the shares in etcd last changed
	gone    map[string]bool  // shares that we have removed
	dirty   map[string]bool  // regions whose share is to be written
	fenced  map[string]bool  // regions that an operator has declared dead
	lease   time.Duration    // the longest that any grant in etcd may have
	large   string           // the last region whose share was too large
	told    string           // the last bad record that was logged
	able    time.Time        // when a share was last written, or there was none to write
	unread  map[string]unread
}

// unread is a key whose content, or whose absence, nothing can be concluded from.
type unread struct {
	why   error
	until time.Time // when what it may have granted has ended; zero while it is there
}

func newTenure(c *Coordinator, o office) *tenure {
	return &tenure{
		Coordinator: c, office: o, ledgers: map[string]*ledger{}, seen: map[string]int64{}, gone: map[string]bool{},
		dirty: map[string]bool{}, fenced: map[string]bool{}, able: time.Now(), unread: map[string]unread{},
	}
}

// session reads everything and keeps up with the changes until something fails.
func (t *tenure) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()

	loading, done := context.WithTimeout(ctx, t.timeout())
	entries, revision, err := t.registry.load(loading)
	done()
	if err != nil {
		return err
	}
	t.restore(entries, time.Now())

	events := make(chan entry, 1024)
	watched := make(chan error, 1)
	wg.Go(func() { watched <- t.registry.watch(ctx, revision+1, events) })

	timer := time.NewTimer(0)
	defer timer.Stop()
	next := time.Now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-watched:
			return err
		case e := <-events:
			t.learn(e, time.Now())
			for n := len(events); n > 0; n-- {
				t.learn(<-events, time.Now())
			}
			timer.Reset(time.Until(next))
		case <-timer.C:
			began := time.Now()
			t.plan(began)
			next = began.Add(min(max(pace, 10*time.Since(began)), maxPace))
			if err := t.publish(ctx); err != nil {
				return err
			}
			timer.Reset(t.rest(next))
		}
	}
}

// timeout bounds a request to etcd: a member that is cut off answers late or
// never.
func (t *tenure) timeout() time.Duration { return max(t.timing.Report, time.Second) }

// rest is how long nothing needs to be done if nothing happens, not before next.
func (t *tenure) rest(next time.Time) time.Duration {
	at := next.Add(t.timing.Report)
	for _, l := range t.ledgers {
		switch {
		case l.dirty:
			at = next
		case !l.wake.IsZero() && l.wake.Before(at):
			at = l.wake
		}
	}
	if at.Before(next) {
		at = next
	}
	return time.Until(at)
}

// restore takes in everything that is in etcd.
func (t *tenure) restore(entries []entry, now time.Time) {
	clear(t.seen)
	clear(t.gone)
	clear(t.fenced)
	// Settings come first: they say which regions are expected to report. Shares
	// come before reports, which acknowledge them.
	order := func(e entry) int {
		return slices.IndexFunc([]string{configKey, fenceKeys, shareKeys, reportKeys}, func(p string) bool {
			_, ok := e.under(p)
			return ok
		})
	}
	sort.SliceStable(entries, func(i, j int) bool { return order(entries[i]) < order(entries[j]) })
	configured, shared := false, false
	for _, e := range entries {
		_, share := e.under(shareKeys)
		configured, shared = configured || e.key == configKey, shared || share
		if region, ok := e.under(fenceKeys); ok {
			t.fenced[region] = true
			t.saw(region, func(r *RegionSeen) { r.Fenced = true })
			continue
		}
		t.learn(e, now)
	}
	if shared && !configured {
		t.missing()
	}
	for _, l := range t.ledgers {
		for region := range l.accounts {
			l.fence(region, t.fenced[region])
		}
	}
}

// missing notes that the pools' settings are gone while regions hold shares. That isn't to say that there are no pools.
func (t *tenure) missing() {
	t.unread[configKey] = unread{why: errors.New("it is missing, and regions have shares")}
	t.log.Error("pools are missing in etcd: shares are renewed as they are, and nobody gets more", "key", configKey)
}

// learn takes in one key.
func (t *tenure) learn(e entry, now time.Time) {
	var err error
	if region, ok := e.under(reportKeys); ok && !e.deleted {
		err = t.hear(region, e.value, now)
	} else if region, ok := e.under(shareKeys); ok {
		err = t.recall(region, e, now)
	} else if region, ok := e.under(fenceKeys); ok {
		t.fence(region, !e.deleted)
	} else if e.key == configKey && e.deleted {
		t.missing()
	} else if e.key == configKey {
		if err = t.configure(e.value); err == nil {
			delete(t.unread, configKey)
		} else {
			t.unread[configKey] = unread{why: err}
		}
	}
	if err != nil && t.told != e.key+e.value {
		t.told = e.key + e.value
		t.log.Error("record can't be read: shares are renewed as they are, and nobody gets more", "key", e.key, "error", err)
	}
}

func (t *tenure) hear(region, value string, now time.Time) error {
	r, err := decodeReport(value)
	if err != nil {
		return err
	}
	for name, ticket := range r.tickets {
		if l := t.ledgers[name]; l != nil {
			l.hear(region, ticket, t.timing, now)
		}
	}
	t.saw(region, func(r *RegionSeen) { r.Heard = now })
	return nil
}

// recall takes in a share as it is in etcd: an earlier coordinator's, or one of
// our own that arrived after it was given up.
func (t *tenure) recall(region string, e entry, now time.Time) error {
	if e.revision <= t.seen[e.key] {
		return nil // as we wrote it
	}
	if e.deleted {
		delete(t.seen, e.key)
		if u, ok := t.unread[e.key]; ok && u.until.IsZero() {
			u.until = now.Add(hold(max(t.lease, t.timing.Lease))) // the region may use what it was granted until then
			t.unread[e.key] = u
		}
		return nil
	}
	t.seen[e.key] = e.revision
	s, err := decodeShare(e.value)
	if err != nil {
		t.unread[e.key] = unread{why: err}
		return err
	}
	delete(t.unread, e.key)
	t.lease = max(t.lease, s.lease)
	for name, terms := range s.terms {
		l := t.ledgers[name]
		if l == nil { // the pool has left the configuration
			l = newLedger(name)
			l.configure(nil)
			t.ledgers[name], t.order = l, nil
		}
		l.inherit(region, terms, max(s.lease, t.timing.Lease), now)
		l.fence(region, t.fenced[region])
	}
	return nil
}

func (t *tenure) fence(region string, fenced bool) {
	if t.fenced[region] == fenced {
		return
	}
	t.fenced[region] = fenced
	t.saw(region, func(r *RegionSeen) { r.Fenced = fenced })
	for _, l := range t.ledgers {
		l.fence(region, fenced)
	}
	t.log.Warn("operator fence", "region", region, "fenced", fenced, "epoch", t.office.epoch)
}

func (t *tenure) configure(value string) error {
	s, err := decodeSettings(value)
	if err != nil {
		return err
	}
	configured := map[string]*Pool{}
	for i, p := range s.Pools {
		configured[p.Name] = &s.Pools[i]
		if t.ledgers[p.Name] == nil {
			t.ledgers[p.Name], t.order = newLedger(p.Name), nil
		}
	}
	for name, l := range t.ledgers {
		l.configure(configured[name])
		for region := range l.accounts {
			l.fence(region, t.fenced[region])
			t.saw(region, func(*RegionSeen) {})
		}
	}
	t.log.Info("pools in force", "version", s.Version, "pools", len(s.Pools), "epoch", t.office.epoch)
	return nil
}

// plan plans for the pools that need it.
func (t *tenure) plan(now time.Time) {
	regions, together := t.survey()
	frozen := t.frozen(now)
	plans := int64(0)
	sums := map[string]PoolSum{}
	for name, l := range t.ledgers {
		if !l.dirty && (l.wake.IsZero() || l.wake.After(now)) {
			continue
		}
		plans++
		if frozen {
			for _, region := range l.renew(t.timing, now, t.nextFence) {
				t.dirty[region] = true
			}
			sums[name] = l.sum()
			continue
		}
		for _, region := range l.plan(t.timing, now, together, t.nextFence) {
			t.dirty[region] = true
		}
		if l.pool == nil && len(l.accounts) == 0 {
			delete(t.ledgers, name)
			t.order = nil
		}
		sums[name] = l.sum()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stats.Plans += plans
	maps.Copy(t.pools, sums)
	maps.DeleteFunc(t.pools, func(name string, _ PoolSum) bool { return t.ledgers[name] == nil })
	maps.DeleteFunc(t.regions, func(region string, _ RegionSeen) bool { return !regions[region] })
}

// frozen reports whether there is a record that can't be read. What it grants to whom isn't known, so nothing can be given away.
func (t *tenure) frozen(now time.Time) bool {
	before := len(t.unread)
	maps.DeleteFunc(t.unread, func(_ string, u unread) bool { return !u.until.IsZero() && now.After(u.until) })
	if before > 0 && len(t.unread) == 0 {
		t.log.Info("every record can be read again", "epoch", t.office.epoch)
		for _, l := range t.ledgers {
			l.dirty = true
		}
	}
	t.count(func(s *CoordinatorStats) { s.Unread = len(t.unread) })
	return len(t.unread) > 0
}

// maxLine is more than the bytes that one offer takes in a share.
const maxLine = MaxName + 2 + 17*18

// survey lists the regions, and reports whether the shares of all of them are
// sure to fit into one transaction, whatever is offered.
func (t *tenure) survey() (regions map[string]bool, together bool) {
	regions, lines := map[string]bool{}, 0
	for _, l := range t.ledgers {
		for r := range l.accounts {
			regions[r] = true
		}
		lines += len(l.accounts) * (maxOffers + 1)
	}
	return regions, len(regions) <= maxTxnWrite && lines*maxLine < maxTxnBytes
}

func (t *tenure) nextFence() policy.Fence {
	t.seq++
	return policy.Fence{Epoch: t.office.epoch, Seq: t.seq}
}

// publish writes the shares of the regions that have changed. What fails is
// written again after a fresh look: an offer counts from when it was planned,
// whether it arrives or not.
func (t *tenure) publish(ctx context.Context) error {
	if len(t.dirty) == 0 {
		t.able = time.Now()
		return nil
	}
	regions := make([]string, 0, len(t.dirty))
	for r := range t.dirty {
		regions = append(regions, r)
	}
	sort.Strings(regions)
	t.lease = max(t.lease, t.timing.Lease)
	for len(regions) > 0 {
		var writes []sharing
		size, n := 0, 0
		for _, r := range regions {
			w, ok := t.write(r)
			if len(w.value) > maxShareBytes {
				t.tooLarge(r, len(w.value))
				n++
				continue
			}
			if len(writes) == maxTxnWrite || len(writes) > 0 && size+len(w.value) > maxTxnBytes {
				break
			}
			n++
			if ok {
				writes = append(writes, w)
				size += len(w.value)
			}
		}
		if err := t.commit(ctx, writes); err != nil {
			return err
		}
		for _, r := range regions[:n] {
			delete(t.dirty, r)
		}
		regions = regions[n:]
	}
	return nil
}

// tooLarge tells of a share that etcd would refuse. Its region keeps what it has until the grants end; others go on.
func (t *tenure) tooLarge(region string, bytes int) {
	if t.large != region {
		t.large = region
		t.log.Error("share is too large for etcd and is not written", "region", region, "bytes", bytes, "most", maxShareBytes)
	}
	t.count(func(s *CoordinatorStats) { s.TooLarge++ })
}

// sharing is the write of a region's share.
type sharing struct {
	entries []recording
	write
}

// recording is what a share says of one pool.
type recording struct {
	l     *ledger
	a     *account
	terms []policy.Terms
}

// write is the share of a region as it should be; false if there is nothing to
// write.
func (t *tenure) write(region string) (sharing, bool) {
	if t.order == nil {
		t.order = slices.SortedFunc(maps.Values(t.ledgers), func(l, m *ledger) int { return strings.Compare(l.name, m.name) })
	}
	entries, count := make([]recording, 0, len(t.order)), 0
	for _, l := range t.order {
		if a := l.accounts[region]; a != nil {
			entries = append(entries, recording{l: l, a: a})
			count += len(a.offers)
		}
	}
	all := make([]policy.Terms, 0, count) // of all entries, one after the other
	text := appendLease(make([]byte, 0, 64+lineBytes*count), t.lease)
	for i := range entries {
		e, n := &entries[i], len(all)
		all = e.a.list(all)
		e.terms = all[n:len(all):len(all)]
		text = appendLines(text, e.l.name, e.a.demand.units(e.l.unit.total), e.terms)
	}
	key := shareKeys + region
	w := sharing{entries, write{key: key, seen: t.seen[key], value: string(text), remove: count == 0}}
	if t.gone[key] {
		w.seen = 0
	}
	if u, ok := t.unread[key]; ok && u.until.IsZero() {
		return w, false // it isn't ours to replace
	}
	return w, !w.remove || w.seen > 0
}

func (t *tenure) commit(ctx context.Context, shares []sharing) error {
	if len(shares) == 0 {
		return nil
	}
	writes := make([]write, len(shares))
	for i, s := range shares {
		writes[i] = s.write
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout())
	defer cancel()
	revision, v, err := t.registry.commit(ctx, t.office, writes)
	switch {
	case err != nil:
		return err
	case v == deposed:
		return errDeposed
	case v == conflict: // a write of ours that was given up has arrived after all
		t.count(func(s *CoordinatorStats) { s.Refused++ })
		return errors.New("pool: a share has changed since it was read")
	}
	for _, w := range shares {
		recorded(w.entries)
		if t.seen[w.key] = revision; w.remove {
			t.gone[w.key] = true
		} else {
			delete(t.gone, w.key)
		}
	}
	t.able = time.Now()
	t.count(func(s *CoordinatorStats) { s.Commits++; s.Writes += int64(len(writes)) })
	return nil
}

// recorded notes that etcd holds a share. What that frees can be given away.
func recorded(entries []recording) {
	for _, e := range entries {
		_, before := e.a.claims(e.l.unit)
		e.a.recorded = e.terms
		_, after := e.a.claims(e.l.unit)
		e.l.dirty = e.l.dirty || after.rate < before.rate || after.capacity < before.capacity
	}
}

// sleep waits for d or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
