package refill

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Stats counts what this replica's calls did since it started.
type Stats struct {
	Calls    map[policy.Status]int64 // replies by status
	Errors   int64                   // calls without a reply
	Faults   int64                   // calls for buckets that are malformed or forbidden
	Added    int64                   // tokens this replica added
	Clamped  int64                   // tokens due that full buckets could not hold
	Leading  bool
	Epoch    int64 // of the present or last term
	Racing   bool  // elected mode: it refills instead of a silent leader, on one master or more
	Version  int64
	Buckets  int
	LastLag  time.Duration // time between the last two refills of the bucket refilled last
	LastCall time.Time     // time of the last reply; zero before the first one
	LastLoop time.Time     // when the slowest worker last checked for a due call; zero while none runs
	Away     error         // why refills pause on a master, or on all; nil if they don't

	Templates []TemplateStats // of the refilled templates; the counts above don't include them
}

// LagBounds are the upper bounds of TemplateStats.Lag.
var LagBounds = []time.Duration{
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 75 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond,
	200 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond,
	5 * time.Second, 10 * time.Second,
}

// TemplateStats counts what this replica's calls for the buckets of one refilled template have done since it started.
type TemplateStats struct {
	Prefix  string
	Shards  int                     // of the active set that this replica refills
	Active  int64                   // buckets in those shards at their last rounds
	Calls   map[policy.Status]int64 // replies by status
	Errors  int64                   // calls without a reply
	Faults  int64                   // calls for buckets that are forbidden or that make the script fail
	Left    int64                   // names that left the active set: buckets that were full, and names of no bucket
	Added   int64
	Clamped int64
	// Lag counts the refills by their delay. Element i has those with a delay up to LagBounds[i] that no element before it
	// has, and the last element has the others. The delay is the part of the elapsed time that exceeds one refill
	// interval. The elapsed time begins with the previous refill, or with the take that left the bucket less than full.
	Lag    []int64
	LagSum time.Duration
}

func newTemplateStats(prefix string) *TemplateStats {
	return &TemplateStats{Prefix: prefix, Calls: map[policy.Status]int64{}, Lag: make([]int64, len(LagBounds)+1)}
}

// add counts the replies to calls for buckets of the template.
func (t *TemplateStats) add(interval time.Duration, results []lua.RefillResult) {
	var calls [policy.StatusConflict + 1]int64 // a map costs more
	for i := range results {
		r := &results[i]
		switch {
		case r.Err == nil:
		case ownFault(r.Err):
			t.Faults++
			continue
		default:
			t.Errors++
			continue
		}
		calls[r.Status]++
		t.Added += r.Added
		t.Clamped += r.Clamped
		if r.Left {
			t.Left++
		}
		if !r.Status.Wrote() || r.Elapsed == 0 {
			continue
		}
		lag := max(0, time.Duration(r.Elapsed)*time.Microsecond-interval)
		t.LagSum += lag
		bound := 0
		for bound < len(LagBounds) && lag > LagBounds[bound] {
			bound++
		}
		t.Lag[bound]++
	}
	for status, n := range calls {
		if n > 0 {
			t.Calls[policy.Status(status)] += n
		}
	}
}

// snapshot returns a copy that doesn't change.
func (t *TemplateStats) snapshot() TemplateStats {
	s := *t
	s.Calls, s.Lag = maps.Clone(t.Calls), slices.Clone(t.Lag)
	return s
}

// Stats returns a snapshot of the counts.
func (r *Refiller) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.stats
	s.Calls, s.Away = maps.Clone(r.stats.Calls), r.away
	for _, id := range slices.Sorted(maps.Keys(r.memory.health)) {
		if s.Away == nil {
			s.Away = r.memory.health[id].away
		}
	}
	for _, w := range r.workers {
		s.Racing = s.Racing || w.racing
		if t := time.Unix(0, w.lastLoop.Load()); s.LastLoop.IsZero() || t.Before(s.LastLoop) {
			s.LastLoop = t
		}
	}
	for _, t := range refilled(r.templates) {
		one := r.templateStats[t.Prefix].snapshot()
		for _, w := range r.workers {
			w.sets.count(&one)
		}
		s.Templates = append(s.Templates, one)
	}
	s.Leading = r.leading
	s.Epoch = r.epoch
	s.Version = r.version
	s.Buckets = len(r.buckets)
	return s
}

func (r *Refiller) setRacing(w *worker, racing bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.racing = racing
}

func (r *Refiller) setAway(w *worker, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.away = err
}

func (r *Refiller) observe(e Event) {
	r.mu.Lock()
	switch {
	case e.OwnFault():
		r.stats.Faults++
	case e.Err != nil:
		r.stats.Errors++
	default:
		r.stats.Calls[e.Outcome.Status]++
		r.stats.Added += e.Outcome.Added
		r.stats.Clamped += e.Outcome.Clamped
		r.stats.LastCall = e.Replied
		if e.Outcome.Status.Wrote() {
			r.stats.LastLag = time.Duration(e.Outcome.Elapsed) * time.Microsecond
		}
	}
	r.mu.Unlock()
	if r.cfg.Observe != nil {
		r.cfg.Observe(e)
	}
}

// observeActive counts the replies to calls for buckets of a shard, and passes them to Config.ObserveActive.
func (r *Refiller) observeActive(s *shard, t *trip) {
	r.mu.Lock()
	if stats := r.templateStats[s.Prefix]; stats != nil {
		stats.add(s.interval, t.results)
	}
	r.mu.Unlock()
	if r.cfg.ObserveActive == nil {
		return
	}
	for i := range t.results {
		r.cfg.ObserveActive(t.event(i))
	}
}
