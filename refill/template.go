package refill

import (
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// LagBounds are the upper bounds of TemplateStats.Lag.
var LagBounds = []time.Duration{
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	75 * time.Millisecond, 100 * time.Millisecond, 150 * time.Millisecond, 200 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second, 10 * time.Second,
}

// TemplateStats counts what this replica's calls for the buckets of one refilled
// template did since it started.
type TemplateStats struct {
	Prefix  string
	Shards  int                     // of the active set that this replica refills
	Active  int64                   // buckets in those shards at their last rounds: over all replicas, those that are not full
	Calls   map[policy.Status]int64 // answers by status
	Errors  int64                   // calls without an answer
	Left    int64                   // buckets that left the active set, because they were full or none
	Added   int64
	Clamped int64
	// Lag counts the refills by how much later than one refill interval after the
	// refill before they came, or after the take that left the bucket less than full:
	// up to each of LagBounds, and beyond them all.
	Lag    []int64
	LagSum time.Duration
}

// tally takes in the answers to calls for buckets of the template.
func (t *TemplateStats) tally(interval time.Duration, results []lua.RefillResult) {
	var calls [policy.StatusMalformed + 1]int64 // a map costs more
	for i := range results {
		r := &results[i]
		if r.Err != nil {
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

// snapshot is a copy that doesn't change.
func (t *TemplateStats) snapshot() TemplateStats {
	s := *t
	s.Calls = make(map[policy.Status]int64, len(t.Calls))
	for status, n := range t.Calls {
		s.Calls[status] = n
	}
	s.Lag = append([]int64(nil), t.Lag...)
	return s
}

// refilled are the templates of a set that refillers enforce.
func refilled(set *policy.Templates) (list []*policy.Ruled) {
	for _, t := range set.All() {
		if t.Enforce == policy.EnforceRefilled {
			list = append(list, t)
		}
	}
	return list
}

// shardsOf makes the shards of the active sets of all templates, with what is known
// of them.
func shardsOf(set *policy.Templates, known map[lua.Shard]*shard) []*shard {
	var list []*shard
	for _, t := range refilled(set) {
		for i := range lua.ActiveShards {
			id := lua.Shard{Prefix: t.Prefix, Number: i}
			s := known[id]
			if s == nil {
				s = &shard{Shard: id}
				known[id] = s
			}
			s.template, s.templates, s.interval = t, set, time.Duration(t.Terms.Interval)*time.Microsecond
			s.reading, s.work = false, nil
			list = append(list, s)
		}
	}
	return list
}
