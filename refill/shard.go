package refill

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// shard is one shard of a template's active set. It belongs to a worker's goroutine.
type shard struct {
	lua.Shard
	template  *policy.CompiledTemplate // nil: an earlier one's; the shard is only read, for names to move to others
	templates *policy.Templates        // the present ones
	interval  time.Duration
	bySlot    bool // a Cluster: buckets of a slot are refilled one after the other, so that they share script calls

	members *members     // nil unless this replica refills the shard and it has or had buckets
	active  atomic.Int64 // 1 more than the buckets in it; 0 without members
	failed  bool         // the shard's fault was logged

	arrivals []string // buckets that had policies of their own and are the template's now; to be put into the shard
}

// enter has the replica refill the shard from now on.
func (s *shard) enter(now time.Time) {
	s.members = &members{of: s, due: now, entries: map[string]*entry{}}
}

// leave forgets the members. Replies to calls for them that are under way change nothing.
func (s *shard) leave() {
	s.members = nil
	s.active.Store(0)
}

// begin begins a round in which the shard holds count names.
func (s *shard) begin(count int64, now time.Time) {
	s.active.Store(1 + count)
	s.members.begin(count, now)
	if !s.members.empty.IsZero() && now.Sub(s.members.empty) >= linger*s.interval {
		s.leave()
	}
}

// home returns the refilled template of a name in the shard; nil if the name is no bucket's of one, or not of a shard
// with this number. Other goroutines may call it.
func (s *shard) home(name string) *policy.CompiledTemplate {
	if lua.CheckKey(name) != nil || lua.ActiveShard(name) != s.Number {
		return nil
	}
	return refilledOf(s.templates, name)
}

// belongs reports whether a name is that of a bucket of the shard. Other goroutines may call it.
func (s *shard) belongs(name string) bool { return s.template != nil && s.home(name) == s.template }

// sortedNames are names that were read from a shard.
type sortedNames struct {
	kept    []string            // buckets of the shard
	moved   map[string][]string // buckets of other templates, by prefix
	foreign []string            // no buckets of templates
}

// sort sorts names in the shard. A shard of an earlier template keeps what no present one takes over: a later
// configuration may have that template again.
func (s *shard) sort(names []string) sortedNames {
	sorted := sortedNames{moved: map[string][]string{}}
	for _, name := range names {
		home := s.home(name)
		switch home {
		case s.template:
			sorted.kept = append(sorted.kept, name)
		case nil:
			sorted.foreign = append(sorted.foreign, name)
		default:
			sorted.moved[home.Prefix] = append(sorted.moved[home.Prefix], name)
		}
	}
	return sorted
}

// members are the buckets in a shard that this replica refills.
//
// It goes over them in rounds, two in an interval. A bucket is refilled in every other round; the rounds in between
// are for new buckets. Where rounds take longer, a bucket is refilled in each. A bucket that enters is found within
// half an interval. Its first call reads its index, and the second, half an interval later, refills it.
type members struct {
	of    *shard
	due   time.Time // when the present round was due, or the next one is
	empty time.Time // since when there have been none; zero if there are

	round    int64 // number of the present or last round
	entries  map[string]*entry
	order    []*entry // entries, and some that have left, in the order in which they came; by slot, if bySlot
	work     []*entry // of the present round, not called yet
	underWay int      // calls of the present round
	reading  bool     // the round reads the names
	cursor   uint64
	asked    bool // a call about the names is under way
}

// entry is a bucket in a shard.
type entry struct {
	key      string
	slot     int // if bySlot
	version  policy.Version
	state    lua.Seen // goes with version
	round    int64    // of the next call
	seen     int64    // the last round in which its name was read
	failures int      // in a row, the bucket's own
	left     bool
	unswept  bool // its reservations could not be ended

	template  *policy.CompiledTemplate // by which it was last refilled
	division  *division                // nil unless it has flows
	undivided bool                     // its plan could not be written
}

// divide has the bucket divided as in a template. It keeps what is known of the flows if that doesn't change it.
func (e *entry) divide(t *policy.CompiledTemplate) {
	if e.template == t {
		return
	}
	e.template = t
	e.division = newDivision(t.Policy, &t.Terms).continues(e.division)
}

// linger is for how many intervals a replica still reads a shard that has become
// empty.
const linger = 10

// resume continues with the members under another worker, perhaps with another refill interval. It drops buckets that
// now have a policy of their own or belong to another template: of two policies under one version the first stays.
func (m *members) resume(now time.Time) {
	m.due = now
	m.reading = false
	m.work = nil
	for _, e := range m.order {
		if !m.of.belongs(e.key) {
			m.drop(e)
		}
	}
}

// working reports whether a round is under way.
func (m *members) working() bool { return m.reading || len(m.work) > 0 || m.underWay > 0 }

// ready reports whether a call can be made once it is due: a round may only wait for answers.
func (m *members) ready() bool { return !m.asked && (m.underWay == 0 || len(m.work) > 0) }

// begin begins a round in which there are count of them.
func (m *members) begin(count int64, now time.Time) {
	m.round++
	if count == 0 {
		clear(m.entries)
		m.order = nil
		if m.empty.IsZero() {
			m.empty = now
		}
		m.end(now)
		return
	}
	m.empty = time.Time{}
	// If the shard holds as many names as are known, they are taken to be the same. A known bucket that is no longer in
	// the shard leaves with its next refill, and then the numbers differ.
	m.reading, m.cursor = count != int64(len(m.entries)), 0
	if !m.reading {
		m.collect(now)
	}
}

// end sets when the next round is due, if this one is over. A late round doesn't make the next ones late, unless the
// worker is behind by more than an interval.
func (m *members) end(now time.Time) {
	if m.working() {
		return
	}
	m.due = m.due.Add(m.of.interval / 2)
	if now.Sub(m.due) > m.of.interval {
		m.due = now
	}
}

// read applies a reading of some of the names.
func (m *members) read(names []string, next uint64, now time.Time) {
	for _, name := range names {
		e := m.entries[name]
		if e == nil {
			e = &entry{key: name, round: m.round}
			if m.of.bySlot {
				e.slot = lua.Slot(name)
			}
			m.entries[name] = e
			m.order = append(m.order, e)
		}
		e.seen = m.round
	}
	m.cursor = next
	if next == 0 {
		for _, e := range m.order {
			if e.seen != m.round {
				m.drop(e)
			}
		}
		m.reading = false
		if m.of.bySlot {
			slices.SortStableFunc(m.order, func(a, b *entry) int { return a.slot - b.slot })
		}
		m.collect(now)
	}
}

// collect makes the round's work, of names that could be read.
func (m *members) collect(now time.Time) {
	m.of.failed = false
	kept := m.order[:0]
	for _, e := range m.order {
		if e.left {
			continue
		}
		kept = append(kept, e)
		if e.round <= m.round && m.of.template != nil {
			m.work = append(m.work, e)
		}
	}
	clear(m.order[len(kept):])
	m.order = kept
	m.end(now)
}

func (m *members) drop(e *entry) {
	if !e.left {
		e.left = true
		delete(m.entries, e.key)
	}
}

// take takes up to most entries off the work, for a call. On a Cluster a shard may name buckets of another master than
// its own: they go in calls without those on its own, which don't wait for that master then.
func (m *members) take(most int, own master) []*entry {
	n := min(most, len(m.work))
	first := own.owns(m.work[0].slot)
	if other := slices.IndexFunc(m.work[:n], func(e *entry) bool { return own.owns(e.slot) != first }); other > 0 {
		n = other
	}
	batch := m.work[:n:n]
	m.work = m.work[n:]
	if len(m.work) == 0 {
		m.work = nil
	}
	m.underWay++
	return batch
}

// putBack returns entries to the work after the server failed their call.
func (m *members) putBack(batch []*entry) {
	m.underWay--
	m.work = append(slices.Clone(batch), m.work...)
}

// apply applies the replies to the calls of entries. As with other buckets, the next call comes an interval after a
// refill, and half an interval after a call that only read the index.
func (m *members) apply(batch []*entry, results []lua.RefillResult, now time.Time) {
	m.underWay--
	for i, e := range batch {
		r := &results[i]
		switch {
		case r.Left:
			m.drop(e)
		case r.Err != nil && ownFault(r.Err):
			e.failures++
			e.round = m.round + min(1<<min(e.failures, 16), max(1, int64(2*maxBucketBackoff/m.of.interval)))
		case r.Err != nil:
			e.round = m.round + 1
		default:
			e.version = r.Version
			e.state = r.Seen
			e.failures = 0
			e.round = m.round + 1
			if r.Status.Wrote() && now.Sub(m.due) < m.of.interval/2 {
				e.round = m.round + 2
			}
		}
	}
	m.end(now)
}
