package refill

import (
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// memory is the state of a replica's buckets, shards and masters. It outlives the workers that recorded it.
type memory struct {
	buckets map[string]*bucket
	shards  map[lua.Shard]*shard
	masters []master
	health  map[string]*health // by the master's id
}

// assign makes one worker for each master, and distributes the buckets and shards over the workers. Buckets and shards
// that existed before keep their state. The state of removed buckets is kept for some time (past), because a bucket
// that comes back is not new. The state of removed shards is dropped.
func (r *Refiller) assign(masters []master) []*worker {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.memory
	now := time.Now() // one time for all, so that buckets of a slot are due together
	next := memory{map[string]*bucket{}, map[lua.Shard]*shard{}, masters, r.healths(masters, now)}
	remember := func(b *bucket) *bucket {
		if old := before.buckets[b.key]; old != nil {
			b.inherit(old)
		}
		next.buckets[b.key] = b
		return b
	}
	for key := range r.past.keys {
		if b := before.buckets[key]; b != nil {
			b.missing = time.Time{}
			next.buckets[key] = b
		}
	}
	shards := r.assignShards(masters, before, next.shards, now)
	workers := make([]*worker, len(masters))
	for i, m := range masters {
		workers[i] = r.newWorker(m, i, shards[i], next.health[m.id], remember, now)
	}
	for _, b := range r.buckets {
		nb, old := r.newBucket(b), before.buckets[b.Key]
		nb.due = now
		nb.unannounced = r.cfg.Elected && !b.Pooled && (old == nil || old.unannounced || old.pooled != nil ||
			old.terms.Fence.Before(nb.terms.Fence))
		w := workers[ownerOf(masters, remember(nb).slot)]
		w.latest = max(w.latest, nb.latest)
		if nb.unannounced {
			w.announce = append(w.announce, entryOf(nb))
		} else {
			w.buckets = append(w.buckets, entryOf(nb))
		}
	}
	for _, w := range workers { // before r.workers is set, because then a term may begin at any time
		w.buckets.order()
		w.announce.order()
		if due, _ := w.due(); due.IsZero() { // no call can show that the outage has ended
			w.failures, w.away = 0, nil
		}
	}
	r.memory, r.workers = next, workers
	return workers
}

// newWorker makes the worker of the i-th master, for shards. Its pulse and its claim keep their state from before.
func (r *Refiller) newWorker(m master, i int, shards []*shard, h *health, remember func(*bucket) *bucket,
	now time.Time) *worker {
	w := &worker{
		r: r, rng: rand.New(rand.NewPCG(r.rng.Uint64(), uint64(i))), leading: r.leading,
		version: r.version, health: h, timer: time.NewTimer(maxIdle),
	}
	w.changed = sync.NewCond(&w.mu)
	w.lastLoop.Store(now.UnixNano())
	if r.cfg.Elected {
		w.pulse = newPulse(keyOn(m, r.pulse), r.cfg.Interval, r.version, w.rng)
		remember(w.pulse.beat)
		w.pulse.assume(w.leading, now)
	}
	var claim *bucket
	if interval := shortest(shards); interval > 0 {
		if r.cfg.Elected { // so that a standby detects an abandoned claim as soon as a late pulse
			interval = min(interval, r.cfg.Interval)
		}
		claim = remember(newClaim(keyOn(m, r.cfg.Pulse+":active"), interval, r.version))
		claim.due = now
		w.buckets = append(w.buckets, entryOf(claim))
	}
	w.sets = newActiveSets(w, m, shards, claim)
	return w
}

func (r *Refiller) newBucket(b Bucket) *bucket {
	if b.Pooled { // its terms come through SetTerms
		return newPooledBucket(b, r.pooled[b.Key], r.version)
	}
	return newBucket(b, r.version)
}

// assignShards assigns the shards of all templates' active sets to the masters. If there are any, it also assigns the
// shards of earlier templates, because their buckets may belong to the present templates.
func (r *Refiller) assignShards(masters []master, before memory, next map[lua.Shard]*shard, now time.Time) [][]*shard {
	of := make([][]*shard, len(masters))
	place := func(id lua.Shard, t *policy.CompiledTemplate, interval time.Duration) {
		s := before.shards[id]
		if s == nil {
			s = &shard{Shard: id}
		}
		next[id] = s
		s.template = t
		s.templates = r.templates
		s.interval = interval
		s.arrivals = nil
		if s.members != nil {
			s.members.resume(now)
		}
		m := ownerOf(masters, s.Slot())
		of[m] = append(of[m], s)
	}
	shortest := time.Duration(0)
	for _, t := range refilled(r.templates) {
		interval := time.Duration(t.Terms.Interval) * time.Microsecond
		if shortest == 0 || interval < shortest {
			shortest = interval
		}
		for i := range lua.ActiveShards {
			place(lua.Shard{Prefix: t.Prefix, Number: i}, t, interval)
		}
	}
	if shortest == 0 {
		return of
	}
	for _, prefix := range slices.Sorted(maps.Keys(r.past.prefixes)) {
		for i := range lua.ActiveShards {
			if id := (lua.Shard{Prefix: prefix, Number: i}); next[id] == nil {
				place(id, nil, shortest)
			}
		}
	}
	for key := range r.past.keys {
		if t := refilledOf(r.templates, key); t != nil {
			s := next[lua.Shard{Prefix: t.Prefix, Number: lua.ActiveShard(key)}]
			s.arrivals = append(s.arrivals, key)
		}
	}
	return of
}

// refilled returns the templates of a set that refillers enforce.
func refilled(set *policy.Templates) (list []*policy.CompiledTemplate) {
	for _, t := range set.All() {
		if t.Refilled() {
			list = append(list, t)
		}
	}
	return list
}

// refilledOf returns the refilled template that applies to a key; nil if there is none.
func refilledOf(set *policy.Templates, key string) *policy.CompiledTemplate {
	if t := set.Of(key); t != nil && t.Refilled() {
		return t
	}
	return nil
}

// past has the prefixes and the keys of earlier configurations that this replica knows, with the times at which they
// were replaced. A bucket of an earlier configuration may be in no active set of the present templates. Without past,
// such a bucket would not be refilled until its next take.
type past struct {
	prefixes map[string]time.Time // of refilled templates
	keys     map[string]time.Time // of configured buckets and pools' buckets
}

// pastFor is how long an entry of past is kept. It may be short, because consumers read later templates within seconds.
const pastFor = 10 * time.Minute

// recordPast records the prefixes and keys of an earlier configuration. It drops those that are too old, and keys that
// are in the present configuration. It is called with the lock held.
func (r *Refiller) recordPast(templates *policy.Templates, buckets []Bucket) {
	now := time.Now()
	tooOld := func(_ string, until time.Time) bool { return now.Sub(until) > pastFor }
	maps.DeleteFunc(r.past.prefixes, tooOld)
	maps.DeleteFunc(r.past.keys, tooOld)
	for _, t := range refilled(templates) {
		r.past.prefixes[t.Prefix] = now
	}
	for _, key := range templates.Plain() {
		r.past.keys[key] = now
	}
	for _, b := range buckets {
		r.past.keys[b.Key] = now
	}
	for _, b := range r.buckets {
		delete(r.past.keys, b.Key)
	}
}

// shortest returns the shortest refill interval of the shards, 0 if there are none.
func shortest(shards []*shard) (interval time.Duration) {
	for _, s := range shards {
		if interval == 0 || s.interval < interval {
			interval = s.interval
		}
	}
	return interval
}
