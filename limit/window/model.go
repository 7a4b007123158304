package window

import "github.com/tokenrefill/refiller/limit/internal/decide"

// fixed computes what fixed.lua does.
type fixed struct{ limit, window int64 } // ms

// count is what a fixed window stores.
type count struct{ left, ends int64 } // Unix ms

func newFixed(r decide.Rule) decide.Model[count] { return fixed{r.Args[0], r.Args[1]} }

// Step implements decide.Model.
func (f fixed) Step(s count, what decide.What, n, era, now int64) (count, int64, decide.Outcome) {
	ms := now / 1000
	s.ends = min(s.ends, ms+f.window)
	live := s.ends > ms
	if live {
		s.left = max(0, min(f.limit, s.left))
	} else {
		s = count{left: f.limit}
	}
	o := decide.Outcome{Fits: what == decide.Return || n <= s.left}
	switch {
	case what == decide.Return && live && (era == 0 || era == s.ends):
		s.left = min(f.limit, s.left+n)
	case what == decide.Take && o.Fits:
		if !live {
			s.ends, live = ms+f.window, true
		}
		s.left -= n
	}
	o.Left = s.left
	if live {
		o.Reset = s.ends*1000 - now
	}
	if !o.Fits {
		o.Wait = o.Reset
	}
	return s, s.ends * 1000, o
}

// sliding computes what sliding.lua does.
type sliding struct{ limit, slot int64 } // µs

// slots is what a sliding window stores: the tokens taken in the newest slot and
// in those before it.
type slots struct {
	newest int64
	taken  [Slots + 1]int64
}

func newSliding(r decide.Rule) decide.Model[slots] { return sliding{r.Args[0], r.Args[1]} }

// Step implements decide.Model.
func (w sliding) Step(s slots, what decide.What, n, era, now int64) (slots, int64, decide.Outcome) {
	at := slots{newest: now / w.slot}
	used := int64(0)
	for i, k := range s.taken {
		if age := max(0, at.newest-s.newest+int64(i)); age <= Slots {
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
			first, last = min(Slots, at.newest-era), max(0, at.newest-era)
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
	case !o.Fits:
		for age, excess := Slots, used+n-w.limit; excess > 0 && age >= 0; age-- {
			excess -= at.taken[age]
			o.Wait = leaves(age)
		}
	}
	o.Left = max(0, w.limit-used)
	for age, k := range at.taken {
		if k > 0 {
			o.Reset = leaves(age)
			break
		}
	}
	return at, now + o.Reset, o
}
