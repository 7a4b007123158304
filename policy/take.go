package policy

import "math"

// Taking is the result of a take.
type Taking struct {
	OK     bool
	Known  bool  // false: no such bucket
	Taken  int64 // tokens taken
	Tokens int64 // tokens left
	Wait   int64 // denied: µs until the tokens asked for are due; -1 if never
}

// Take takes n tokens, all or nothing.
func (b *Bucket) Take(n, now int64) Taking { return b.TakeLeaving(n, Leave{}, now) }

// TakeLeaving is like Take, but denies the take if fewer tokens than leave would remain.
func (b *Bucket) TakeLeaving(n int64, leave Leave, now int64) Taking {
	if b.Tokens == nil && b.Control == nil {
		return Taking{}
	}
	least := b.least(leave)
	if b.held()-least < n {
		return Taking{Known: true, Tokens: b.held(), Wait: b.Wait(n+least, now)}
	}
	b.add(-n)
	return Taking{OK: true, Known: true, Taken: n, Tokens: b.held()}
}

// held returns the number of tokens; a bucket that lost its key has none.
func (b *Bucket) held() int64 {
	if b.Tokens == nil {
		return 0
	}
	return *b.Tokens
}

// add changes the number of tokens. Without a change a missing key stays missing.
func (b *Bucket) add(n int64) {
	if n != 0 {
		tokens := b.held() + n
		b.Tokens = &tokens
	}
}

// least returns the number of tokens to leave.
func (b *Bucket) least(l Leave) int64 {
	if b.Control == nil {
		return l.Of(0)
	}
	return l.Of(b.Control.Terms.Capacity)
}

// Return gives n tokens back and returns how many of them the full bucket could not hold. The bucket holds at most its
// capacity or, under strict terms, its capacity less the outstanding tokens. A bucket that lost its tokens has no room
// for any: a refill creates it again, with the tokens that OnLoss determines.
func (b *Bucket) Return(n int64) (clamped int64, known bool) {
	if b.Control == nil {
		return 0, false
	}
	if b.Tokens == nil {
		return n, true
	}
	clamped = min(n, max(0, max(b.held(), 0)+n-b.Control.room())) // below 0, plain clients are about to undo their tries
	b.add(n - clamped)
	return clamped, true
}

// Wait returns the time, in microseconds, until the bucket holds n tokens if no client takes any:
//
//   - 0 if the bucket holds them.
//   - Otherwise the time until the first refill at which they are due, or half an interval if that refill is overdue.
//   - At least the time until the first reservation or lease ends, if the outstanding tokens leave no room for n.
//   - -1 if the bucket will never hold them, or if nothing is known of its refills.
func (b *Bucket) Wait(n, now int64) int64 {
	tokens := b.held()
	if tokens >= n {
		return 0
	}
	s := b.Control
	if s == nil || n > s.Terms.Capacity {
		return -1
	}
	// The conversions to float64 round each product before it is added to something, as Lua does. Without them the
	// compiler may fuse a product and a sum into one operation.
	need, interval := float64(n-tokens+s.Debt), float64(s.Terms.Interval)
	var due float64
	if s.Terms.Kind == Stepped {
		if s.Next <= s.Step {
			return -1
		}
		due = float64(s.Next) + float64((math.Ceil(need/float64(s.Terms.Tokens))-1)*float64(s.Next-s.Step))
	} else {
		units := float64(need*float64(s.Terms.Per)) - float64(s.Carry)
		last, granted := s.Last, 0.0
		switch {
		case now < last-ClockTolerance: // the next refill begins an era here, without a grant
			last = now
		case s.Terms.GrantEra == s.Era:
			granted = float64(max(0, s.Terms.GrantEnd-last))
		}
		var t float64
		switch byGrant := float64(granted * float64(s.Terms.GrantTokens)); {
		case units <= byGrant:
			t = math.Ceil(units / float64(s.Terms.GrantTokens))
		case s.Terms.Tokens == 0:
			return -1
		default:
			t = granted + math.Ceil((units-byGrant)/float64(s.Terms.Tokens))
		}
		due = float64(last) + float64(math.Ceil(t/interval)*interval)
	}
	if n > s.room() {
		due = max(due, float64(s.Due))
	}
	wait := due - float64(now)
	if wait < 1 {
		wait = math.Floor(interval / 2)
	}
	return int64(min(wait, maxExact))
}
