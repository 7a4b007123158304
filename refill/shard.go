package refill

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// shard is one shard of a template's active set. One worker owns it.
type shard struct {
	lua.Shard
	template  *policy.CompiledTemplate // nil if the template is an earlier one: then names are only moved to other shards
	templates *policy.Templates        // the present templates
	interval  time.Duration
	bySlot    bool // on a Cluster: buckets are refilled in the order of their slots, so that they share script calls

	members *members     // nil unless this replica refills the shard and it has or had buckets
	active  atomic.Int64 // number of names in it, plus 1; 0 without members
	failed  bool         // the shard's fault was logged

	arrivals []string // keys of an earlier configuration that are the template's now; still to be put into the shard
}

// enter makes the replica refill the shard from now on.
func (s *shard) enter(now time.Time) {
	s.members = &members{of: s, due: now, entries: map[string]*entry{}}
}

// leave forgets the members. If a call for them is under way, its reply changes nothing.
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

// home returns the refilled template of a name in the shard. It returns nil if no refilled template applies to the
// name, or if the name belongs to a shard with another number. Other goroutines may call it.
func (s *shard) home(name string) *policy.CompiledTemplate {
	if lua.CheckKey(name) != nil || lua.ActiveShard(name) != s.Number {
		return nil
	}
	return refilledOf(s.templates, name)
}

// belongs reports whether a name is the name of one of the shard's buckets. Other goroutines may call it.
func (s *shard) belongs(name string) bool { return s.template != nil && s.home(name) == s.template }

// sortedNames are names that were read from a shard.
type sortedNames struct {
	kept    []string            // buckets of the shard
	moved   map[string][]string // buckets of other templates, by prefix
	foreign []string            // not the names of templates' buckets
}

// sort sorts names that were read from the shard. If the shard is of an earlier template, it keeps the names that match
// no present template, because a later configuration may have that template again.
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
// The replica goes over them in rounds, two in an interval. A bucket is refilled in every second round. The rounds in
// between are for new buckets. A new bucket is found within half an interval, and its first call reads its index. Its
// second call, half an interval later, refills it. If rounds take longer than half an interval, a bucket is refilled in
// each of them.
type members struct {
	of    *shard
	due   time.Time // when the present round was due; between two rounds, when the next one is due
	empty time.Time // since when the shard has been empty; zero if it isn't

	round    int64 // number of the present or last round
	entries  map[string]*entry
	order    []*entry // entries, and some that have left, in the order in which they came; by slot, if bySlot
	work     []*entry // entries of the present round for which no call was made yet
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
	state    lua.Seen // of the same reply as version
	round    int64    // of the next call
	seen     int64    // the last round in which its name was read
	failures int      // in a row, because of the bucket itself
	left     bool
	unswept  bool // its reservations could not be ended

	template  *policy.CompiledTemplate // by which it was last refilled
	division  *division                // nil unless it has flows
	undivided bool                     // its plan could not be written
}

// divide gives the bucket the division that a template demands. It keeps the division if the template divides the
// bucket in the same way as the one before.
func (e *entry) divide(t *policy.CompiledTemplate) {
	if e.template == t {
		return
	}
	e.template = t
	e.division = newDivision(t.Policy, &t.Terms).continues(e.division)
}

const (
	// linger is the number of intervals for which a replica still reads a shard that has become empty.
	linger = 10
	// readEvery is the number of rounds, two in an interval, after which a replica reads the names even if it knows as
	// many. A read costs Redis about 0.2 µs for each name, a fiftieth of the two refills of its bucket in the meantime.
	readEvery = 4
)

// resume continues with the members under another worker, perhaps with another refill interval. It drops buckets that
// are configured now or belong to another template. Otherwise two policies would be sent for them under one version.
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

// ready reports whether a call can be made when it is due. It returns false if the round only waits for answers.
func (m *members) ready() bool { return !m.asked && (m.underWay == 0 || len(m.work) > 0) }

// begin begins a round. count is the number of names in the shard.
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
	// If the shard holds as many names as this replica knows, they are nearly always the same. They can differ if entries
	// of the shard were lost: as many others may have come since.
	m.reading = count != int64(len(m.entries)) || m.round%readEvery == 0
	m.cursor = 0
	if !m.reading {
		m.collect(now)
	}
}

// end sets when the next round is due, if the present one is over. The next round is due half an interval after the
// present one was due, even if the present one was late. If the worker is behind by more than an interval, the next
// round is due now.
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

// collect sets the round's work, after the names were read.
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

// take removes up to most entries from the work, for a call. On a Cluster a shard may have buckets on another master
// than its own. Such buckets don't share a call with buckets on the shard's master, which would have to wait for the
// other master.
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
