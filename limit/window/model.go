package window

import "github.com/tokenrefill/refiller/limit/internal/decide"

// fixed computes what fixed.lua does.
type fixed struct {
	limit, window int64                             // ms
	span          func(at int64) (begin, end int64) // of the calendar; nil: a window starts at its first take
}

// count is what a fixed window stores.
type count struct{ taken, ends int64 } // Unix ms

func newFixed(r decide.Rule) decide.Model[count] { return fixed{r.Args[0], r.Args[1], r.Span} }

// latest returns the end of a window that starts now, in ms. For a window of the calendar, it returns the end of the
// window that contains now.
func (f fixed) latest(now int64) int64 {
	if f.span == nil {
		return now/1000 + f.window
	}
	_, end := f.span(now)
	return end / 1000
}

// Step implements decide.Model.
func (f fixed) Step(s count, what decide.What, n, era, now int64) (count, decide.Outcome) {
	latest := f.latest(now)
	s.ends = min(s.ends, latest)
	live, taken := s.ends > now/1000, int64(0)
	if live {
		taken = s.taken
	}
	o := decide.Outcome{Fits: what == decide.Return || taken+n <= f.limit}
	switch {
	case what == decide.Return && live && (era == 0 || era == s.ends || era > latest):
		taken = max(0, taken-n)
		s.taken = taken
	case what == decide.Take && o.Fits:
		if !live {
			s.ends, live = latest, true
		}
		taken += n
		s.taken = taken
	}
	o.Left = max(0, f.limit-taken)
	if live {
		o.Reset = s.ends*1000 - now
	}
	if !o.Fits {
		o.Wait = o.Reset
	}
	if taken > 0 {
		o.More = o.Reset
	}
	return s, o
}

// Until implements decide.Model.
func (f fixed) Until(s count) int64 { return s.ends * 1000 }

// sliding computes what sliding.lua does.
type sliding struct{ limit, slot int64 } // µs

// slots is the content of a sliding window: the number of tokens of the newest slot and of each slot before it.
type slots struct {
	newest, length int64 // µs
	taken          [Slots + 1]int64
}

func newSliding(r decide.Rule) decide.Model[slots] { return sliding{r.Args[0], r.Args[1]} }

// Step implements decide.Model.
func (w sliding) Step(s slots, what decide.What, n, era, now int64) (slots, decide.Outcome) {
	at := slots{newest: now / w.slot, length: w.slot}
	used := int64(0)
	for i, k := range s.taken {
		last := (s.newest-int64(i)+1)*s.length - 1 // the slot's last microsecond
		if age := max(0, at.newest-last/w.slot); age <= Slots {
			at.taken[age] += k
			used += k
		}
	}
	leaves := func(age int) int64 { return (at.newest-int64(age)+Slots+1)*w.slot - now }
	o := decide.Outcome{Fits: what == decide.Return || used+n <= w.limit}
	switch {
	case what == decide.Return:
		first, last := int64(Slots), int64(0)
		if era > 0 {
			last = max(0, at.newest-era)
			first = min(Slots, last)
		}
		for age := first; age >= last; age-- {
			back := min(n, at.taken[age])
			at.taken[age] -= back
			used -= back
			n -= back
		}
	case what == decide.Take && o.Fits:
		at.taken[0] += n
		used += n
	}
	untilFree := func(most int64) (wait int64) {
		for age, excess := Slots, used-most; excess > 0 && age >= 0; age-- {
			excess -= at.taken[age]
			wait = leaves(age)
		}
		return wait
	}
	if !o.Fits {
		o.Wait = untilFree(w.limit - n)
	}
	if used > 0 {
		o.More = untilFree(min(used, w.limit) - 1)
	}
	o.Left = max(0, w.limit-used)
	for age, k := range at.taken {
		if k > 0 {
			o.Reset = leaves(age)
			break
		}
	}
	if o.Fits && what != decide.Peek {
		s = at
	}
	return s, o
}

// Until implements decide.Model.
func (w sliding) Until(s slots) int64 {
	for age, k := range s.taken {
		if k > 0 {
			return (s.newest - int64(age) + Slots + 1) * s.length
		}
	}
	return 0
}
