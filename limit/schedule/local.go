package schedule

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// local keeps schedules in memory and computes what the scripts do.
type local struct {
	config Config
	now    func() time.Time

	mu    sync.Mutex
	keys  map[string][]entry // sorted by instant, then id
	sweep int                // the number of keys at which expired schedules are dropped
}

type entry struct {
	at int64
	id string
}

func (e entry) compare(o entry) int { return cmp.Or(cmp.Compare(e.at, o.at), cmp.Compare(e.id, o.id)) }

const (
	firstSweep = 1024
	steps      = 32 * rounds // the most steps of a search, after which it ends early
)

func newLocal(cfg Config, now func() time.Time) *local {
	return &local{config: cfg, now: now, keys: map[string][]entry{}, sweep: firstSweep}
}

func (l *local) reserve(ctx context.Context, key string, c call) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now().UnixMicro()
	longest := l.config.longest().Microseconds()
	at := c.at
	if at == 0 {
		at = now
	}
	l.drop(now)
	entries := l.held(key, now)
	held := slices.IndexFunc(entries, func(e entry) bool { return e.id == c.id })
	switch {
	case held >= 0 && entries[held].at != at:
		return answer{code: codeIDTaken, now: entries[held].at}, nil
	case held < 0 && at < now:
		return answer{code: codePast, now: now}, nil
	case held < 0 && at > now+l.config.horizon().Microseconds():
		return answer{code: codeHorizon, now: now}, nil
	}
	a := l.find(entries, at, c.n)
	a.now = now
	switch {
	case held >= 0:
		a = answer{code: codeRepeated, now: now, left: a.left}
	case len(a.denied) > 0:
		a.code = codeDenied
		return a, nil
	case c.check:
		return answer{code: codeDone, now: now, left: a.left, until: now}, nil
	default:
		a = answer{code: codeDone, now: now, left: a.left - c.n}
		old, _ := slices.BinarySearchFunc(entries, entry{at: now - longest + 1}, entry.compare)
		entries = slices.Delete(entries, 0, old)
		for _, id := range c.ids() {
			i, _ := slices.BinarySearchFunc(entries, entry{at, id}, entry.compare)
			entries = slices.Insert(entries, i, entry{at, id})
		}
		l.keys[key] = entries
	}
	a.until = entries[len(entries)-1].at + longest
	return a, nil
}

// find returns how many reservations fit at an instant, the windows without room for n, and the next instant at which n
// fit.
func (l *local) find(entries []entry, at, n int64) answer {
	a := answer{next: at, left: MaxLimit}
	for i, w := range l.config.Windows {
		more, free := room(entries, at, n, w)
		if more < n {
			a.denied = append(a.denied, int64(i+1))
		}
		a.next, a.left = max(a.next, free), min(a.left, max(0, more))
	}
	for range steps {
		from := a.next
		for _, w := range l.config.Windows {
			_, free := room(entries, from, n, w)
			a.next = max(a.next, free)
		}
		if a.next == from {
			a.sure = true
			break
		}
	}
	return a
}

// room computes the same as the function room in reserve.lua.
func room(entries []entry, t, n int64, w Window) (more, free int64) {
	from := func(t int64) int {
		i, _ := slices.BinarySearchFunc(entries, entry{at: t}, entry.compare)
		return i
	}
	if w.Per.Valid() {
		begin, end := w.span(t)
		more = w.Limit - int64(from(end)-from(begin))
		if more < n {
			return more, end
		}
		return more, t
	}
	length := w.Length.Microseconds()
	lo := from(t - length + 1)
	mid := from(t + 1)
	hi := from(t + length)
	if behind := int64(mid - lo); behind+n > w.Limit {
		return w.Limit - behind, entries[mid-int(w.Limit-n)-1].at + length
	}
	if ahead := int64(hi - mid); ahead+n > w.Limit {
		return w.Limit - ahead, entries[mid].at + length
	}
	most, last := int64(0), lo // last is the index after the reservations of the stretch
	free = t
	for first := lo; first <= mid; first++ {
		begin := t
		if first < mid {
			begin = entries[first].at
		}
		for last < hi && entries[last].at < begin+length {
			last++
		}
		count := int64(last - first)
		most = max(most, count)
		if count+n > w.Limit {
			free = max(free, entries[first].at+length)
		}
	}
	return w.Limit - most, free
}

// held returns a key's reservations. It returns none if all of them are so old that no window with a future instant
// contains them.
func (l *local) held(key string, now int64) []entry {
	entries := l.keys[key]
	if n := len(entries); n == 0 || entries[n-1].at+l.config.longest().Microseconds() <= now {
		return nil
	}
	return entries
}

// drop removes schedules whose reservations are all too old, each time that the number of schedules has doubled.
func (l *local) drop(now int64) {
	if len(l.keys) < l.sweep {
		return
	}
	for k := range l.keys {
		if l.held(k, now) == nil {
			delete(l.keys, k)
		}
	}
	l.sweep = max(firstSweep, 2*len(l.keys))
}

func (l *local) cancel(ctx context.Context, key string, c call, passed bool) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.now().UnixMicro()
	entries, ids := l.held(key, now), c.ids()
	i := slices.IndexFunc(entries, func(e entry) bool { return e.id == c.id })
	if i < 0 || !passed && entries[i].at <= now {
		return false, nil
	}
	entries = slices.DeleteFunc(entries, func(e entry) bool { return slices.Contains(ids, e.id) })
	l.keys[key] = entries
	if len(entries) == 0 {
		delete(l.keys, key)
	}
	return true, nil
}

func (l *local) list(ctx context.Context, key string, from, to, most int64) ([]Entry, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := []Entry{}
	for _, e := range l.held(key, l.now().UnixMicro()) {
		if from <= e.at && e.at < to && int64(len(entries)) < most {
			entries = append(entries, Entry{e.id, time.UnixMicro(e.at)})
		}
	}
	return entries, nil
}

func (l *local) reset(ctx context.Context, key string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.keys, key)
	return nil
}
