package refill

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// shard is what this replica knows of one shard of a template's active set. It
// belongs to a lane's goroutine.
//
// A replica that refills a shard goes over it in rounds, two in an interval. A
// bucket is refilled in every other round; the rounds in between are for those that
// are new: a bucket that enters is found within half an interval, its first call
// learns its index, and the second, half an interval later, refills it.
type shard struct {
	lua.Shard
	template  *policy.Ruled
	templates *policy.Templates // of which it is one
	interval  time.Duration
	bySlot    bool // a Cluster: buckets of a slot are refilled one after the other, so that they share script calls

	state shardState
	turn  int64     // index of the last turn that this replica knows of, 0 for none
	due   time.Time // of the next round, or of the next attempt to take a turn; while working, since when
	mine  time.Time // racing: when its next turn is due
	empty time.Time // since when it has been found empty; zero if it wasn't

	round   int64 // number of the present or last round
	entries map[string]*entry
	order   []*entry // entries, those that have left included: by slot, if bySlot; in the order in which they came, so that each keeps its place
	work    []*entry // of the present round, not called yet
	reading bool     // the round reads the names
	cursor  uint64
	told    atomic.Int64 // while this replica refills it, 1 more than the buckets in it; 0 otherwise
	failed  bool         // the shard's own fault was told
	unswept bool
}

// shardState is what a shard is to this replica.
type shardState int

const (
	shardIdle  shardState = iota // nobody is known to be in it
	shardOther                   // another replica refills it
	shardHeld                    // this replica refills it
)

// entry is a bucket in a shard.
type entry struct {
	key     string
	slot    int // if bySlot
	version policy.Version
	round   int64 // of the next call
	seen    int64 // the last round in which its name was read
	left    bool
}

// linger is for how many intervals a shard that has become empty is still looked at
// by the replica that refills it.
const linger = 10

// working reports whether a round is under way.
func (s *shard) working() bool { return s.reading || len(s.work) > 0 }

// forget forgets the buckets.
func (s *shard) forget() {
	s.reading, s.work, s.entries, s.order, s.empty = false, nil, nil, nil, time.Time{}
}

// belongs reports whether a name is that of a bucket of the shard.
func (s *shard) belongs(name string) bool {
	return lua.CheckKey(name) == nil && lua.ActiveShard(name) == s.Number && s.templates.Of(name) == s.template
}

// begin begins a round in which the shard holds count names.
func (s *shard) begin(count int64, now time.Time) {
	s.round++
	if count == 0 {
		if s.empty.IsZero() {
			s.empty = now
		}
		s.entries, s.order = nil, nil
		return
	}
	s.empty = time.Time{}
	if s.entries == nil {
		s.entries = map[string]*entry{}
	}
	// As many as are known are taken for the same ones: one that isn't leaves with its
	// next refill, and then the numbers differ.
	if s.reading, s.cursor = count != int64(len(s.entries)), 0; !s.reading {
		s.collect()
	}
}

// read takes in some of the names.
func (s *shard) read(names []string, next uint64) {
	for _, name := range names {
		e := s.entries[name]
		if e == nil {
			e = &entry{key: name, round: s.round}
			if s.bySlot {
				e.slot = lua.Slot(name)
			}
			s.entries[name] = e
			s.order = append(s.order, e)
		}
		e.seen = s.round
	}
	if s.cursor = next; next == 0 {
		for _, e := range s.order {
			if e.seen != s.round {
				s.drop(e)
			}
		}
		s.reading = false
		if s.bySlot {
			slices.SortStableFunc(s.order, func(a, b *entry) int { return a.slot - b.slot })
		}
		s.collect()
	}
}

// collect makes the round's work.
func (s *shard) collect() {
	kept := s.order[:0]
	for _, e := range s.order {
		if e.left {
			continue
		}
		kept = append(kept, e)
		if e.round <= s.round {
			s.work = append(s.work, e)
		}
	}
	clear(s.order[len(kept):])
	s.order = kept
}

func (s *shard) drop(e *entry) {
	if !e.left {
		e.left = true
		delete(s.entries, e.key)
	}
}

// next takes up to most entries off the work.
func (s *shard) next(most int) []*entry {
	n := min(most, len(s.work))
	batch := s.work[:n]
	if s.work = s.work[n:]; len(s.work) == 0 {
		s.work = nil
	}
	return batch
}

// learn takes in the answer to an entry's call.
func (s *shard) learn(e *entry, r lua.RefillResult) {
	if r.Left {
		s.drop(e)
		return
	}
	if r.Err != nil {
		e.round = s.round + 1
		return
	}
	// As with other buckets: an interval after its refill, and half of one after its
	// index was learned.
	e.version = r.Version
	if e.round = s.round + 1; r.Status.Wrote() {
		e.round = s.round + 2
	}
}
