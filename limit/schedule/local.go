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
	sweep int                // the number of keys at which the expired are dropped
}

type entry struct {
	at int64
	id string
}

func (e entry) compare(o entry) int { return cmp.Or(cmp.Compare(e.at, o.at), cmp.Compare(e.id, o.id)) }

const (
	firstSweep = 1024
	steps      = 32 // as in reserve.lua
)

func newLocal(cfg Config, now func() time.Time) *local {
	return &local{config: cfg, now: now, keys: map[string][]entry{}, sweep: firstSweep}
}

func (l *local) reserve(ctx context.Context, key, id string, at int64) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now, longest := l.now().UnixMicro(), l.config.longest().Microseconds()
	l.drop(now - longest)
	entries := l.keys[key]
	held := slices.IndexFunc(entries, func(e entry) bool { return e.id == id })
	switch {
	case held >= 0 && entries[held].at != at:
		return answer{code: codeIDTaken, now: entries[held].at}, nil
	case held < 0 && at < now:
		return answer{code: codePast, now: now}, nil
	case held < 0 && at > now+l.config.horizon().Microseconds():
		return answer{code: codeHorizon, now: now}, nil
	}
	a := answer{code: codeDone, now: now, next: at}
	left := int64(MaxLimit)
	for i, w := range l.config.Windows {
		more, free := room(entries, at, w)
		if more < 1 {
			a.denied = append(a.denied, int64(i+1))
		}
		a.next, left = max(a.next, free), min(left, more)
	}
	if len(a.denied) > 0 && held < 0 {
		a.code = codeDenied
		for range steps {
			from := a.next
			for _, w := range l.config.Windows {
				_, free := room(entries, from, w)
				a.next = max(a.next, free)
			}
			if a.next == from {
				break
			}
		}
		return a, nil
	}
	if held >= 0 {
		a.code = codeRepeated
	} else {
		left--
		old, _ := slices.BinarySearchFunc(entries, entry{at: now - longest + 1}, entry.compare)
		entries = slices.Delete(entries, 0, old)
		i, _ := slices.BinarySearchFunc(entries, entry{at, id}, entry.compare)
		entries = slices.Insert(entries, i, entry{at, id})
		l.keys[key] = entries
	}
	return answer{code: a.code, now: now, left: max(0, left), until: entries[len(entries)-1].at + longest}, nil
}

// room is as in reserve.lua.
func room(entries []entry, t int64, w Window) (more, free int64) {
	length := w.Length.Microseconds()
	lo, _ := slices.BinarySearchFunc(entries, entry{at: t - length + 1}, entry.compare)
	mid, _ := slices.BinarySearchFunc(entries, entry{at: t + 1}, entry.compare)
	hi, _ := slices.BinarySearchFunc(entries, entry{at: t + length}, entry.compare)
	if n := int(w.Limit); mid-lo >= n {
		return 0, entries[mid-n].at + length
	} else if hi-mid >= n {
		return 0, entries[mid].at + length
	}
	most, last := int64(0), lo // last is behind what the stretch holds
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
		if count >= w.Limit {
			free = max(free, entries[first].at+length)
		}
	}
	return w.Limit - most, free
}

// drop forgets the schedules whose last instant is at or before one, when their
// number has doubled.
func (l *local) drop(last int64) {
	if len(l.keys) < l.sweep {
		return
	}
	for k, entries := range l.keys {
		if len(entries) == 0 || entries[len(entries)-1].at <= last {
			delete(l.keys, k)
		}
	}
	l.sweep = max(firstSweep, 2*len(l.keys))
}

func (l *local) cancel(ctx context.Context, key, id string) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("schedule: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := l.keys[key]
	i := slices.IndexFunc(entries, func(e entry) bool { return e.id == id })
	if i < 0 || entries[i].at <= l.now().UnixMicro() {
		return false, nil
	}
	if entries = slices.Delete(entries, i, i+1); len(entries) == 0 {
		delete(l.keys, key)
	} else {
		l.keys[key] = entries
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
	for _, e := range l.keys[key] {
		if from <= e.at && e.at < to && int64(len(entries)) < most {
			entries = append(entries, Entry{e.id, time.UnixMicro(e.at)})
		}
	}
	return entries, nil
}
