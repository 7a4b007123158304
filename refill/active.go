package refill

import (
	"context"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// pollsPerSecond is the number of commands that a replica sends in a second to find the idle shards that hold names.
	pollsPerSecond = 9
	// namesAtOnce is about the number of names of a shard that one command reads.
	namesAtOnce = 1000
	// countsAtOnce is the most shards whose names are counted in one round trip.
	countsAtOnce = 100
	// activeBatch is the most buckets of a shard in one round trip. A take that arrives meanwhile waits until Redis has
	// refilled them all. More buckets would cost Redis less time, but takes would wait longer: test/scale has figures.
	activeBatch = 100
)

// activeSets has those shards of the templates' active sets that are on a worker's server. The worker refills their
// buckets while this replica leads or has the claim.
type activeSets struct {
	w            *worker
	on           master
	claim        *bucket // nil if no template is refilled
	held         bool    // this replica refills the sets
	shards       []*shard
	pollInterval time.Duration // between two polls of the idle shards
	nextPoll     time.Time
	polling      bool  // a poll is under way
	turns        turns // of polls and rounds
}

// newActiveSets makes the activeSets of a worker.
func newActiveSets(w *worker, on master, shards []*shard, claim *bucket) *activeSets {
	// The shards may have members from an earlier worker. Because held is true at first, assume forgets them if this
	// replica doesn't refill the sets.
	a := &activeSets{w: w, on: on, claim: claim, shards: shards, held: true}
	cluster := on.slots != nil
	for _, s := range shards {
		s.bySlot = cluster
		if a.pollInterval == 0 || s.interval/2 < a.pollInterval {
			a.pollInterval = s.interval / 2
		}
	}
	commands := 1 + len(shards)/lua.OccupiedAtOnce
	if cluster {
		commands = lua.ActiveShards
	}
	a.pollInterval = max(a.pollInterval, time.Duration(commands)*time.Second/pollsPerSecond)
	a.assume()
	return a
}

// assume applies a change of this replica's role or claim. A leader has every claim, because the other replicas don't
// call for them. The replica remembers the buckets only while it refills them.
func (a *activeSets) assume() {
	held := a.w.leading || a.w.refills() && a.claim != nil && a.claim.held
	switch {
	case held && !a.held:
		a.nextPoll = time.Now()
	case !held && a.held:
		for _, s := range a.shards {
			s.leave()
		}
	}
	a.held = held
}

// count adds the numbers of this replica's shards of a template to t. Other goroutines may call it.
func (a *activeSets) count(t *TemplateStats) {
	for _, s := range a.shards {
		if n := s.active.Load(); n > 0 && s.Prefix == t.Prefix {
			t.Shards++
			t.Active += n - 1
		}
	}
}

// due returns when the next call is due, zero for never, and the refill interval of the buckets that it is for.
func (a *activeSets) due() (at time.Time, interval time.Duration) {
	if !a.held || len(a.shards) == 0 {
		return at, 0
	}
	if !a.polling {
		at, interval = a.nextPoll, 2*a.pollInterval
	}
	for _, s := range a.shards {
		if m := s.members; m != nil && m.ready() && (at.IsZero() || m.due.Before(at)) {
			at, interval = m.due, s.interval
		}
	}
	return at, interval
}

// next returns one of the calls that are due; nil if none is. Polls and rounds take turns.
func (a *activeSets) next(ctx context.Context, now time.Time) call {
	if !a.held {
		return nil
	}
	return a.turns.next(ctx, now, a.poll, a.round)
}

// poll returns a call that puts arrivals into a shard or, if there are none, polls the idle shards; nil if no poll is
// due.
func (a *activeSets) poll(ctx context.Context, now time.Time) call {
	if a.polling || a.nextPoll.After(now) {
		return nil
	}
	if c := a.arrive(ctx); c != nil {
		return c
	}
	return a.pollIdle(ctx)
}

// round returns a call of a round; nil if none is due. Rounds that are due begin first. Then those that are under way
// continue, beginning with the oldest.
func (a *activeSets) round(ctx context.Context, now time.Time) call {
	var begin []*shard
	var oldest *shard
	for _, s := range a.shards {
		switch m := s.members; {
		case m == nil || !m.ready() || m.due.After(now):
		case !m.working():
			begin = append(begin, s)
		case oldest == nil || m.due.Before(oldest.members.due):
			oldest = s
		}
	}
	switch {
	case len(begin) > 0:
		return a.begin(ctx, begin[:min(len(begin), countsAtOnce)])
	case oldest == nil:
		return nil
	case oldest.members.reading:
		return a.read(ctx, oldest)
	}
	return a.refill(ctx, oldest)
}

// request is a request about the names in active sets.
type request interface {
	// send makes the request. It runs without the mutex.
	send(ctx context.Context)
	// apply applies the reply, with the mutex held. Its error means that the server failed the request.
	apply() error
}

// ask returns the call that makes a request.
func (a *activeSets) ask(ctx context.Context, r request) call {
	within := a.w.timeout()
	return func() func() {
		callCtx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		r.send(callCtx)
		return func() {
			if err := r.apply(); err != nil {
				a.w.failed(ctx, err)
				return
			}
			a.w.answered()
		}
	}
}

// shardFault reports whether the cause of an error is the shard, and not its server. If it is, the replica stops
// refilling the shard until the next poll.
func (a *activeSets) shardFault(s *shard, err error) bool {
	if !ownFault(err) {
		return false
	}
	if !s.failed {
		a.w.r.log.Error("buckets of a template can't be refilled",
			"template", s.Prefix, "shard", s.Number, "error", err)
	}
	s.leave()
	s.failed = true
	return true
}

// arrive returns a call that puts the arrivals of one shard into it; nil if there are none. A replica with an outdated
// configuration leaves the arrivals to the others.
func (a *activeSets) arrive(ctx context.Context) call {
	i := slices.IndexFunc(a.shards, func(s *shard) bool { return len(s.arrivals) > 0 })
	if i < 0 || a.w.outdated() {
		return nil
	}
	s := a.shards[i]
	r := &arrival{a: a, s: s, names: s.arrivals}
	s.arrivals = nil
	a.polling = true
	return a.ask(ctx, r)
}

// arrival is a request that adds names to a shard.
type arrival struct {
	a     *activeSets
	s     *shard
	names []string
	err   error
}

func (r *arrival) send(ctx context.Context) { r.err = r.a.w.r.store.add(ctx, r.s.Shard, r.names) }

func (r *arrival) apply() error {
	r.a.polling = false
	if r.err == nil || r.a.shardFault(r.s, r.err) {
		return nil
	}
	r.s.arrivals = r.names
	return r.err
}

// pollIdle returns a call that finds out which idle shards hold names; nil if no shard is idle. A shard is idle if it
// has no members.
func (a *activeSets) pollIdle(ctx context.Context) call {
	r := &idlePoll{a: a}
	for _, s := range a.shards {
		if s.members == nil {
			r.idle = append(r.idle, s)
			r.names = append(r.names, s.Shard)
		}
	}
	a.nextPoll = time.Now().Add(a.pollInterval)
	if len(r.idle) == 0 {
		return nil
	}
	a.polling = true
	return a.ask(ctx, r)
}

// idlePoll is a request that finds which idle shards hold names.
type idlePoll struct {
	a        *activeSets
	idle     []*shard
	names    []lua.Shard // of idle
	occupied []bool
	err      error
}

func (r *idlePoll) send(ctx context.Context) {
	r.occupied, r.err = r.a.w.r.store.occupied(ctx, r.names)
}

func (r *idlePoll) apply() error {
	r.a.polling = false
	for i := range r.occupied {
		if r.occupied[i] && r.a.held {
			r.idle[i].enter(time.Now())
		}
	}
	return r.err
}

// begin returns a call that begins a round in each of the shards.
func (a *activeSets) begin(ctx context.Context, shards []*shard) call {
	r := &beginning{a: a, shards: shards, names: make([]lua.Shard, len(shards)), asked: make([]*members, len(shards))}
	for i, s := range shards {
		r.names[i] = s.Shard
		r.asked[i] = s.members
		s.members.asked = true
	}
	return a.ask(ctx, r)
}

// beginning is a request that counts the names of shards, in order to begin a round in each.
type beginning struct {
	a      *activeSets
	shards []*shard
	names  []lua.Shard // of shards
	asked  []*members  // of shards, when the request was made
	counts []lua.CountResult
}

func (r *beginning) send(ctx context.Context) { r.counts = r.a.w.r.store.counts(ctx, r.names) }

func (r *beginning) apply() (failed error) {
	now := time.Now()
	for i, s := range r.shards {
		r.asked[i].asked = false
		switch err := r.counts[i].Err; {
		case err != nil && !r.a.shardFault(s, err):
			failed = err
		case err == nil && s.members == r.asked[i]:
			s.begin(r.counts[i].Count, now)
		}
	}
	return failed
}

// read returns a call that reads some names of the shard. It also moves or removes names that belong to no bucket of
// the template. If a later configuration is in force, it leaves them, because the later template may have these
// buckets.
func (a *activeSets) read(ctx context.Context, s *shard) call {
	r := &reading{a: a, s: s, m: s.members, cursor: s.members.cursor, outdated: a.w.outdated()}
	r.m.asked = true
	return a.ask(ctx, r)
}

// reading is a request that reads some names of a shard, and corrects them: see putRight.
type reading struct {
	a        *activeSets
	s        *shard
	m        *members // of the shard, when the request was made
	cursor   uint64   // where this request begins to read; after send, where the next one begins
	outdated bool     // this replica's configuration is outdated, so the names stay as they are
	kept     []string
	err      error
}

func (r *reading) send(ctx context.Context) {
	var names []string
	names, r.cursor, r.err = r.a.w.r.store.names(ctx, r.s.Shard, r.cursor, namesAtOnce)
	sorted := r.s.sort(names)
	r.kept = sorted.kept
	if r.err == nil && !r.outdated {
		r.err = r.a.putRight(ctx, r.s, sorted)
	}
}

func (r *reading) apply() error {
	r.m.asked = false
	if r.err == nil {
		r.m.read(r.kept, r.cursor, time.Now())
	}
	if r.err != nil && r.a.shardFault(r.s, r.err) {
		return nil
	}
	return r.err
}

// putRight moves names to the shards of their templates, and removes names of no bucket. If the shard to which names
// are to be moved has a fault, they stay where they are. The reads of that shard report the fault, and the next round
// tries again.
func (a *activeSets) putRight(ctx context.Context, s *shard, names sortedNames) error {
	for prefix, list := range names.moved {
		err := a.w.r.store.move(ctx, s.Shard, prefix, list)
		switch {
		case err != nil && ownFault(err):
			continue
		case err != nil:
			return err
		}
		a.w.r.log.Info("buckets belong to another template now: moved to its active set",
			"from", s.Prefix, "to", prefix, "names", len(list), "first", list[0])
	}
	if len(names.foreign) == 0 {
		return nil
	}
	err := a.w.r.store.remove(ctx, s.Shard, names.foreign)
	if err == nil {
		a.w.r.log.Warn("names in the active set are no buckets of the template: removed",
			"template", s.Prefix, "names", len(names.foreign), "first", names.foreign[0])
	}
	return err
}

// refill returns a call that refills some buckets of the shard's round.
func (a *activeSets) refill(ctx context.Context, s *shard) call {
	m := s.members
	batch := m.take(min(activeBatch, a.w.sizes.batch()), a.on)
	t := a.w.newTrip(len(batch), a.w.sizes.perCall())
	terms := &s.template.Terms
	if a.w.outdated() {
		terms = nil
	}
	for i, e := range batch {
		t.calls[i] = lua.RefillCall{Key: e.key, Call: policy.Call{Version: e.version, Terms: terms}, Seen: e.state}
		e.divide(s.template)
		if e.division != nil {
			t.divided = append(t.divided, divided{i, e.division})
		}
	}
	within := a.w.timeout()
	store := a.w.r.store
	return func() func() {
		t.run(ctx, within, store, func(ctx context.Context, calls []lua.RefillCall, perCall int) []lua.RefillResult {
			return store.refillActive(ctx, s.Shard, calls, perCall)
		})
		return func() {
			a.applyRefills(ctx, s, m, batch, t)
			a.w.ended = append(a.w.ended, t)
		}
	}
}

// applyRefills applies the replies to a round trip. If a bucket is on another master than its shard and that master is
// unavailable, the bucket waits for the next round and delays no others.
func (a *activeSets) applyRefills(ctx context.Context, s *shard, m *members, batch []*entry, t *trip) {
	a.w.r.observeActive(s, t)
	err := t.serverError()
	if err != nil && a.on.owns(batch[0].slot) {
		m.putBack(batch)
		a.w.refillsFailed(ctx, len(batch), err)
		return
	}
	m.apply(batch, t.results, t.replied)
	var news notices
	for i, e := range batch {
		if err := t.results[i].Err; e.failures == 1 && ownFault(err) {
			news.add(hclog.Error, "bucket can't be refilled", "bucket", e.key, "error", err)
		}
		warnUndivided(&news, e.key, e.division, &e.undivided)
	}
	for _, swept := range t.swept {
		warnUnswept(&news, batch[swept.index].key, &batch[swept.index].unswept, swept.err)
	}
	news.log(a.w.r.log)
	if err == nil {
		a.w.refilled(t)
	}
}

// hurry makes a round due in every shard, at the end of a term: see worker.handOver.
func (a *activeSets) hurry(now time.Time) {
	for _, s := range a.shards {
		if m := s.members; m != nil && now.Before(m.due) {
			m.due = now
		}
	}
}

// pending reports whether a round that was due at an instant has not ended yet.
func (a *activeSets) pending(at time.Time) bool {
	return a.held && slices.ContainsFunc(a.shards, func(s *shard) bool {
		return s.members != nil && !s.members.due.After(at)
	})
}
