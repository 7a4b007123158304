package refill

import (
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// looksPerSecond is how many commands a replica sends in a second to learn whether
	// anybody is in shards in which nobody was.
	looksPerSecond = 9
	// namesAtOnce is about how many names of a shard are read with one command.
	namesAtOnce = 1000
	// turnsAtOnce is how many turns go in one round trip at most.
	turnsAtOnce = 100
	// activeBatch is how many buckets of a shard go in one round trip at most: takes
	// of consumers wait for no more than that. More would cost less of Redis, and keep
	// takes waiting for longer: test/scale has figures.
	activeBatch = 100
)

// activeSets is a lane's part in the active sets of the templates: the shards that
// are on its server.
//
// Who refills a shard is decided by a race on its turns, as with a bucket's index:
// the one who took the last turn takes the next one an interval later, the others
// come a little later and lose, unless it is gone. So that all replicas have work,
// each turn tells how many shards its taker refills; a replica that refills fewer
// takes some over, half an interval after such a turn. A leader takes no turns: it
// refills every shard while the others listen to its pulse.
type activeSets struct {
	l      *lane
	shards []*shard
	held   map[string]int // shards that this replica refills, by template
	pace   *pace
	every  time.Duration    // between two looks at idle shards
	look   time.Time        // the next one
	on     bool             // it is this replica's turn to refill
	calls  []lua.RefillCall // of the last batch: room for the next one's
}

// newActiveSets shares the shards among lanes by the slots of their masters.
func newActiveSets(l *lane, shards []*shard, cluster bool) *activeSets {
	a := &activeSets{l: l, shards: shards, held: map[string]int{}, pace: newPace(min(activeBatch, l.r.cfg.Batch), l.r.cfg.Timeout)}
	for _, s := range shards {
		s.bySlot = cluster
		if a.every == 0 || s.interval/2 < a.every {
			a.every = s.interval / 2
		}
		if s.state == shardHeld {
			a.held[s.Prefix]++
		}
	}
	commands := 1 + len(shards)/lua.OccupiedAtOnce
	if cluster {
		commands = lua.ActiveShards
	}
	a.every = max(a.every, time.Duration(commands)*time.Second/looksPerSecond)
	return a
}

// count adds the shards of a template that this replica refills. Other goroutines may
// call it.
func (a *activeSets) count(t *TemplateStats) {
	for _, s := range a.shards {
		if told := s.told.Load(); told > 0 && s.Prefix == t.Prefix {
			t.Shards++
			t.Active += told - 1
		}
	}
}

// next is when there is something to do; zero if there never is.
func (a *activeSets) next() time.Time {
	at := a.look
	for _, s := range a.shards {
		if s.working() {
			return time.Now()
		}
		if s.state != shardIdle && s.due.Before(at) {
			at = s.due
		}
	}
	if len(a.shards) == 0 {
		return time.Time{}
	}
	return at
}

// act does some of what is due. It returns how long to wait because the server
// failed, 0 if it did not.
func (a *activeSets) act(ctx context.Context) time.Duration {
	if len(a.shards) == 0 {
		return 0
	}
	if !a.l.active() {
		a.release()
		return 0
	}
	if !a.on {
		a.on, a.look = true, time.Now()
	}
	if err := a.attend(ctx); err != nil {
		return a.l.failed(ctx, err)
	}
	return 0
}

// release leaves all shards to others.
func (a *activeSets) release() {
	if a.on {
		a.on = false
		for _, s := range a.shards {
			a.set(s, shardIdle)
		}
	}
}

// attend begins the rounds that are due, so that no turn is late, and does a part of
// the oldest round. The error is the server's.
func (a *activeSets) attend(ctx context.Context) error {
	now := time.Now()
	if !a.look.After(now) {
		if err := a.lookAtIdle(ctx); err != nil {
			return err
		}
	}
	if err := a.begin(ctx, now); err != nil {
		return err
	}
	var oldest *shard
	for _, s := range a.shards {
		if s.working() && (oldest == nil || s.due.Before(oldest.due)) {
			oldest = s
		}
	}
	if oldest == nil {
		return nil
	}
	if oldest.reading {
		if err := a.read(ctx, oldest); err != nil && !a.own(oldest, err) {
			return err
		}
		return nil
	}
	return a.refill(ctx, oldest)
}

// own takes in an error that is the shard's own, and reports whether it is.
func (a *activeSets) own(s *shard, err error) bool {
	if !ownFault(err) {
		return false
	}
	if !s.failed {
		a.l.r.log.Error("buckets of a template can't be refilled", "template", s.Prefix, "shard", s.Number, "error", err)
	}
	a.set(s, shardIdle) // until the next look
	s.failed = true
	return true
}

// set changes what the shard is to this replica. What it knows of the buckets is
// kept only while it refills them.
func (a *activeSets) set(s *shard, state shardState) {
	if s.state == shardHeld {
		a.held[s.Prefix]--
	}
	if state == shardHeld {
		a.held[s.Prefix]++
	}
	if s.state = state; state != shardHeld {
		s.forget()
		s.told.Store(0)
	}
}

// lookAtIdle finds out which of the idle shards hold names.
func (a *activeSets) lookAtIdle(ctx context.Context) error {
	var idle []*shard
	var names []lua.Shard
	for _, s := range a.shards {
		if s.state == shardIdle {
			idle, names = append(idle, s), append(names, s.Shard)
		}
	}
	now := time.Now()
	if len(idle) > 0 {
		ctx, cancel := context.WithTimeout(ctx, a.l.r.cfg.Timeout)
		defer cancel()
		occupied, err := a.l.r.store.occupied(ctx, names)
		if err != nil {
			return err
		}
		a.l.recovered()
		for i, s := range idle {
			if occupied[i] {
				a.set(s, shardOther)
				s.due, s.mine = now, time.Time{}
			}
		}
	}
	a.look = now.Add(a.every)
	return nil
}

// due reports whether a round or a turn of the shard is. A round that goes on for longer
// than the interval doesn't keep the next turn from being taken: others would take it,
// and two replicas would call for the same buckets.
func (a *activeSets) due(s *shard, now time.Time) bool {
	if s.working() {
		return !a.leads() && !s.mine.After(now)
	}
	return s.state != shardIdle && !s.due.After(now)
}

// leads reports whether this replica refills every shard and takes no turns.
func (a *activeSets) leads() bool { return a.l.pulse != nil && a.l.leading }

// begin tries to take the turns that are due, and begins the rounds that are. At most
// turnsAtOnce go in a round trip, those at the shards that this replica refills first:
// the rest is still due the next time. The error is the server's.
func (a *activeSets) begin(ctx context.Context, now time.Time) error {
	var keep, race, round []*shard
	for _, s := range a.shards {
		switch {
		case !a.due(s, now):
		case a.leads() || s.state == shardHeld && s.mine.After(now):
			round = append(round, s)
		case s.state == shardHeld:
			keep = append(keep, s)
		default:
			race = append(race, s)
		}
	}
	race = append(keep, race...)
	err := a.takeTurns(ctx, race[:min(len(race), turnsAtOnce)])
	if err == nil {
		err = a.goRound(ctx, round[:min(len(round), turnsAtOnce)])
	}
	return err
}

// takeTurns tries to take a turn at each of the shards.
func (a *activeSets) takeTurns(ctx context.Context, shards []*shard) error {
	if len(shards) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.l.r.cfg.Timeout)
	defer cancel()
	calls, more := make([]lua.TurnCall, len(shards)), map[string]int{} // shards that it would refill beside those it does
	for i, s := range shards {
		if s.state != shardHeld {
			more[s.Prefix]++
		}
		calls[i] = lua.TurnCall{Shard: s.Shard, Index: s.turn, Interval: s.interval, Load: a.held[s.Prefix] + more[s.Prefix]}
	}
	results := a.l.r.store.turns(ctx, calls)
	now := time.Now()
	var failed error
	for i, s := range shards {
		if err := results[i].Err; err == nil {
			a.raced(s, results[i].Turn, calls[i].Load, now)
		} else if !a.own(s, err) {
			failed = err
		}
	}
	return failed
}

// goRound begins rounds of shards that this replica refills, and at which no turn is due.
func (a *activeSets) goRound(ctx context.Context, shards []*shard) error {
	if len(shards) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.l.r.cfg.Timeout)
	defer cancel()
	names := make([]lua.Shard, len(shards))
	for i, s := range shards {
		names[i] = s.Shard
	}
	results := a.l.r.store.counts(ctx, names)
	now := time.Now()
	var failed error
	for i, s := range shards {
		if err := results[i].Err; err != nil {
			if !a.own(s, err) {
				failed = err
			}
			continue
		}
		if s.state != shardHeld {
			a.set(s, shardHeld)
		}
		if a.leads() && !s.mine.After(now) { // of others a turn may have come due meanwhile
			s.mine = s.nextTurn(now)
		}
		a.beginWith(s, results[i].Count, now)
	}
	return failed
}

// beginWith begins a round, unless one is under way.
func (a *activeSets) beginWith(s *shard, count int64, now time.Time) {
	a.l.recovered()
	s.failed = false
	s.told.Store(1 + count)
	if s.working() {
		return
	}
	s.due = now.Add(s.interval / 2)
	if s.mine.Before(s.due) {
		s.due = s.mine
	}
	if s.begin(count, now); !s.empty.IsZero() && now.Sub(s.empty) >= linger*s.interval {
		a.set(s, shardIdle)
	}
}

// raced takes in the answer to an attempt at a turn, in which this replica would have
// refilled load shards of the template.
func (a *activeSets) raced(s *shard, turn lua.Turn, load int, now time.Time) {
	a.l.recovered()
	s.turn = turn.Index
	switch {
	case turn.Taken:
		if s.state != shardHeld {
			a.set(s, shardHeld)
		}
		s.mine = s.nextTurn(now)
		a.beginWith(s, turn.Count, now)
	case turn.Count > 0:
		a.set(s, shardOther)
		s.due = now.Add(untilTurn(turn, load, s.interval, a.l.rng))
	case s.state == shardHeld: // nobody takes a turn at an empty shard
		s.mine = now.Add(s.interval / 2)
		a.beginWith(s, 0, now)
	default:
		a.set(s, shardIdle)
	}
}

// nextTurn is when the one who takes a turn now takes the next one: an interval later.
// It comes up to a quarter of an interval earlier while the shard's turns aren't at
// the shard's place within the interval: the places are spread over it, and so is
// the work.
func (s *shard) nextTurn(now time.Time) time.Time {
	next := now.Add(s.interval)
	place := s.interval * time.Duration(s.Number) / lua.ActiveShards
	past := (time.Duration(next.UnixNano()) - place) % s.interval
	return next.Add(-min(past, s.interval/4))
}

// untilTurn is the waiting rule of one who lost a turn and would refill load shards of
// the template if it had won: how long until it tries again. Usually that is after
// whoever took it is due, with time to spare for one who is busy: a shard that changes
// hands costs a call more for each of its buckets. Of one who refills two or more shards
// more than this replica does, it takes so many that, one by one, all have as much to do.
func untilTurn(turn lua.Turn, load int, interval time.Duration, rng *rand.Rand) time.Duration {
	since := time.Duration(turn.Now-turn.Last) * time.Microsecond
	if surplus := turn.Load - int64(load) + 1; surplus >= 2 && since < interval/4 && rng.Int64N(2*turn.Load) < surplus {
		return interval/2 + time.Duration(rng.Int64N(int64(interval/20)+1))
	}
	late := interval*3/20 + jitter(interval, rng)
	return min(max(interval-since+late, interval/2), 2*interval)
}

// read reads some names of the shard. Those that are no bucket's of the template are
// removed.
func (a *activeSets) read(ctx context.Context, s *shard) error {
	ctx, cancel := context.WithTimeout(ctx, a.l.r.cfg.Timeout)
	defer cancel()
	names, next, err := a.l.r.store.names(ctx, s.Shard, s.cursor, namesAtOnce)
	if err != nil {
		return err
	}
	a.l.recovered()
	var foreign []string
	names = slices.DeleteFunc(names, func(name string) bool {
		belongs := s.entries[name] != nil || s.belongs(name)
		if !belongs {
			foreign = append(foreign, name)
		}
		return !belongs
	})
	s.read(names, next)
	if len(foreign) > 0 {
		a.l.r.log.Warn("names in the active set are no buckets of the template: removed", "template", s.Prefix, "names", len(foreign), "first", foreign[0])
		return a.l.r.store.remove(ctx, s.Shard, foreign)
	}
	return nil
}

// refill refills some buckets of the shard's round.
func (a *activeSets) refill(ctx context.Context, s *shard) error {
	callCtx, cancel := context.WithTimeout(ctx, a.l.r.cfg.Timeout)
	defer cancel()
	batch := s.next(a.pace.batch())
	calls := a.calls[:0]
	for _, e := range batch {
		calls = append(calls, lua.RefillCall{Key: e.key, Call: policy.Call{Version: e.version, Terms: &s.template.Terms}})
	}
	a.calls = calls
	sent := time.Now()
	results := a.l.r.store.refillActive(callCtx, s.Shard, calls, a.pace.perCall())
	replied := time.Now()
	a.l.r.observeActive(s, calls, results, sent, replied)

	answered, serverErr := 0, error(nil)
	for i := range results {
		if err := results[i].Err; err != nil && !ownFault(err) {
			serverErr = err
			continue
		}
		answered++
	}
	if answered == 0 && serverErr != nil {
		s.work = append(slices.Clone(batch), s.work...)
		a.pace.failed(len(batch))
		return serverErr
	}
	for i, e := range batch {
		s.learn(e, results[i])
	}
	a.pace.answered(results)
	a.l.recovered()
	a.l.sweep(ctx, calls, results, func(i int, err error) { s.unswept = a.l.warnUnswept(calls[i].Key, s.unswept, err) })
	return nil
}

// hurry makes a round due in every shard, at the end of a term: see lane.handOver.
func (a *activeSets) hurry(now time.Time) {
	for _, s := range a.shards {
		if s.state == shardHeld && now.Before(s.due) {
			s.due = now
		}
	}
}

// pending reports whether a round that was due at an instant is still to be done.
func (a *activeSets) pending(at time.Time) bool {
	return slices.ContainsFunc(a.shards, func(s *shard) bool {
		return s.working() || s.state == shardHeld && !s.due.After(at)
	})
}
