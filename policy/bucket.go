package policy

import "math"

// ClockTolerance is how far, in microseconds, a server's clock may step back
// before the bucket starts a new era.
const ClockTolerance = 50_000

// Status is what a refill did.
type Status int64

// Statuses of a refill, in the order of the protocol's rules. Those that write
// add one to the index.
const (
	StatusApplied     Status = iota + 1 // credited what was due; writes
	StatusSwitched                      // the index was old, the fence newer: settled and switched; writes
	StatusStale                         // the caller's (era, index) is old; nothing written
	StatusEarly                         // under half an interval since the last refill; nothing written
	StatusForeign                       // someone else moved the index: their stretch isn't credited again; writes
	StatusInitialised                   // created or adopted; writes
	StatusUnknown                       // no such bucket, and this call may not create it; nothing written
	StatusRolledBack                    // the server lost a write that the caller saw: new era; writes
	StatusClock                         // the server's clock stepped back: new era; writes
	StatusMalformed                     // a key holds something else; nothing written
	StatusConflict                      // terms of the other kind, plain or a pool's, are in force, of no lower version; nothing written
)

// Wrote reports whether the call changed the bucket.
func (s Status) Wrote() bool {
	switch s {
	case StatusApplied, StatusSwitched, StatusForeign, StatusInitialised, StatusRolledBack, StatusClock:
		return true
	}
	return false
}

// String names the status as logs and metrics do.
func (s Status) String() string {
	names := [...]string{
		"", "applied", "switched", "stale", "early", "foreign", "initialised", "unknown", "rolled_back", "clock",
		"malformed", "conflict",
	}
	if s < 1 || int(s) >= len(names) {
		return "invalid"
	}
	return names[s]
}

// Create says whether a refill may create a bucket that is missing.
type Create int64

// When a refill may create a missing bucket.
const (
	CreateNever   Create = iota // never, nor adopt what another program made
	CreateLost                  // if the caller remembers it: it was lost
	CreateInitial               // also if nobody remembers it: it is new
)

// Version is what a caller last learned of a bucket: an era, which names one
// unbroken history, and the index within it. The zero Version is of a caller
// that has seen nothing.
type Version struct{ Era, Index int64 }

// Before reports whether v is older than w.
func (v Version) Before(w Version) bool {
	return v.Era < w.Era || v.Era == w.Era && v.Index < w.Index
}

// Call is one refill call.
type Call struct {
	Version Version
	Create  Create
	Terms   *Terms // nil: only what is in force counts (rescue)
	Step    int64  // stepped: the scheduled instant to credit, Unix µs; 0 for none
	Next    int64  // stepped: the instant after it, or the next to come
}

// Outcome is the answer to a refill.
type Outcome struct {
	Status   Status
	Conflict bool    // the terms differ from those in force under the same fence: they were ignored
	Version  Version // what the next call is to know; the index is the copy that the bucket's state has
	Now      int64   // the server's clock, Unix µs
	Last     int64   // the last refill that counts, Unix µs
	Carry    int64   // credit below one token
	Tokens   int64
	Added    int64 // tokens added, and those that paid debt
	Clamped  int64 // tokens due that the full bucket could not hold
	Elapsed  int64 // µs from the refill before to this one; 0 unless it settled
	Fence    Fence // of the terms in force
	Step     int64 // the last instant credited; 0 unless stepped

	Pool         bool  // the terms in force are a pool's
	FileVersion  int64 // of the configuration that they are from, or a later one that was brought since
	PoolsVersion int64 // of a pool's, likewise

	Outstanding int64 // tokens held in reservations and leases
	Due         int64 // when the first record of one ends, Unix µs; 0 if there is none
	Debt        int64 // tokens that refills pay before they add any
}

// Control is the bucket's state beside its tokens and index.
type Control struct {
	Terms Terms
	Era   int64
	Index int64 // copy of the index as our last write left it
	Last  int64 // the last refill, Unix µs; also the highest clock seen
	Carry int64 // credit below one token, in units of 1/Per token
	Step  int64 // the last scheduled instant credited
	Next  int64 // the scheduled instant after it

	Outstanding int64 // tokens held in reservations and leases
	Due         int64 // when the first record of one ends, Unix µs; 0 if there is none
	Debt        int64 // tokens that refills pay before they add any
}

// room is the most tokens that the bucket may hold: its capacity, under strict
// terms without what is outstanding.
func (s *Control) room() int64 {
	if s.Terms.Strict {
		return max(0, s.Terms.Capacity-s.Outstanding)
	}
	return s.Terms.Capacity
}

// Bucket is a bucket's complete state. A nil part is a missing key, so the zero
// Bucket doesn't exist.
type Bucket struct {
	Tokens  *int64
	Index   *int64
	Control *Control
	Held    map[string]Holding // reservations and leases by their id
}

// Refill applies one call at the server's time now, in Unix microseconds.
func (b *Bucket) Refill(c Call, now int64) Outcome {
	if b.Control == nil {
		return b.initialise(c, now)
	}
	s := b.Control
	tokens := int64(0)
	if b.Tokens != nil {
		tokens = *b.Tokens
	} else if s.Terms.OnLoss == LossFull {
		tokens = s.Terms.Capacity
	}
	stored := Version{s.Era, s.Index}
	after, rank := s.Terms.meet(c.Terms)
	newer := after != s.Terms
	out := Outcome{Conflict: rank == differs, Now: now}
	decline := func(status Status) Outcome {
		out.Status, out.Tokens = status, tokens
		s.tell(&out)
		return out
	}

	least := int64(0) // the index is to be higher
	switch {
	case stored.Before(c.Version):
		out.Status, least = StatusRolledBack, c.Version.Index
		tokens = s.rollBack(c, tokens, now)
	case now < s.Last-ClockTolerance:
		out.Status = StatusClock
		if span := s.span(c); span > 0 && s.Step > now+span {
			s.Step, s.Next = now+span, now+2*span
		}
		s.Last = now
		s.Era = max(now, 1+max(s.Era, c.Version.Era))
	default:
		stale := c.Version.Before(stored)
		instant := s.instant(c, newer)
		due := s.Terms.Kind == Stepped && s.Step < instant && instant <= now
		switch {
		case stale && !newer:
			return decline(StatusStale)
		case rank == conflicts:
			return decline(StatusConflict)
		case !newer && !due && now-s.Last < s.Terms.Interval/2:
			return decline(StatusEarly)
		}
		switch {
		case b.Index != nil && *b.Index != 0 && *b.Index != s.Index:
			out.Status, s.Carry = StatusForeign, 0
		case stale:
			out.Status = StatusSwitched
			tokens = s.settle(&out, tokens, due, now)
		default:
			out.Status = StatusApplied
			tokens = s.settle(&out, tokens, due, now)
		}
		if due {
			s.Step, s.Next = instant, 0
		}
		switch {
		case !s.scheduled(c):
		case now < c.Next && c.Next < s.Step:
			// The server's clock was ahead when the schedule began. The instant to come may have been credited then.
			s.Step, s.Next = c.Next, 0
		case c.Next > s.Step:
			s.Next = c.Next
		}
		s.Last = max(s.Last, now)
	}
	if newer {
		tokens = s.change(after, tokens, now, c.Next)
	}
	tokens = min(tokens, s.room()) // a foreign client may have left more
	s.Index = max(s.Index, least)
	if b.Index != nil {
		s.Index = max(s.Index, *b.Index)
	}
	b.write(s.Index+1, tokens, &out)
	return out
}

// How terms that a call brings meet those in force.
type rank int

const (
	older     rank = iota // or the same: they change nothing
	newer                 // they replace them
	differs               // others under the same fence: they are ignored
	conflicts             // of the other kind, and not of a later configuration
)

// meet tells what the terms are after a call that brings others, nil for none.
func (t Terms) meet(brought *Terms) (Terms, rank) {
	switch {
	case brought == nil:
		return t, older
	case t.Pool != brought.Pool: // What a coordinator grants never crosses.
		if brought.FileVersion() > t.FileVersion() && (!brought.Pool || brought.Fence.Epoch == 0) {
			return *brought, newer
		}
		return t, conflicts
	case !t.Pool:
		switch {
		case t.Fence.Before(brought.Fence):
			return *brought, newer
		case t.Fence == brought.Fence && t != *brought:
			return t, differs
		}
		return t, older
	}
	after, how := t, older
	granted := t.Fence.Epoch > 0 || brought.Fence.Epoch > 0
	switch {
	case t.Fence.Before(brought.Fence), t.Fence == brought.Fence && !granted && t.PoolsVersion < brought.PoolsVersion:
		after, how = *brought, newer
	case t.Fence == brought.Fence && (granted || t.PoolsVersion == brought.PoolsVersion):
		same := *brought
		same.Version, same.PoolsVersion = t.Version, t.PoolsVersion
		if same != t {
			how = differs
		}
	}
	after.Version, after.PoolsVersion = max(t.Version, brought.Version), max(t.PoolsVersion, brought.PoolsVersion)
	return after, how
}

// scheduled reports whether a call's instants are of the schedule in force.
func (s *Control) scheduled(c Call) bool {
	return s.Terms.Kind == Stepped && c.Terms != nil && c.Terms.Kind == Stepped && c.Terms.Per == s.Terms.Per
}

// instant is the scheduled instant that a call may credit: the one that it names, if
// that is of the schedule in force; and before another schedule begins, the one that
// comes next under this one.
func (s *Control) instant(c Call, switches bool) int64 {
	switch {
	case s.scheduled(c):
		return c.Step
	case switches:
		return s.Next
	}
	return 0
}

// span is the present period of the schedule in force; 0 if it isn't known.
func (s *Control) span(c Call) int64 {
	switch {
	case s.Terms.Kind != Stepped:
		return 0
	case s.Next > s.Step:
		return s.Next - s.Step
	case !s.scheduled(c):
		return 0
	case c.Step > 0:
		return max(0, c.Next-c.Step)
	}
	return max(0, c.Next-s.Step)
}

// rollBack is for a server that has lost a write which the caller saw. It returns the
// tokens left.
func (s *Control) rollBack(c Call, tokens, now int64) int64 {
	if s.Terms.OnRollback == RollbackKeep {
		tokens = min(tokens, s.Terms.Capacity)
	} else {
		tokens = 0
		if span := s.span(c); span > 0 { // or the step that was forgotten is credited again
			given := int64(0)
			if s.scheduled(c) {
				given = c.Step
			}
			s.Step = min(max(s.Step, now, given), now+span)
			s.Next = s.Step + span
		}
	}
	s.Carry = 0
	if s.Last < now || now < s.Last-ClockTolerance {
		s.Last = now
	}
	s.Era = max(now, 1+max(s.Era, c.Version.Era))
	return tokens
}

// initialise creates, adopts or declines a bucket without control state.
func (b *Bucket) initialise(c Call, now int64) Outcome {
	out := Outcome{Status: StatusUnknown, Now: now}
	if c.Terms == nil || c.Create == CreateNever {
		return out
	}
	var tokens, index int64
	if b.Tokens == nil && b.Index == nil {
		switch {
		case c.Version.Era > 0:
			if c.Terms.OnLoss == LossFull {
				tokens = c.Terms.Capacity
			}
		case c.Version.Era == 0 && c.Create == CreateInitial:
			tokens = c.Terms.Initial
		default:
			return out
		}
	}
	if b.Tokens != nil {
		tokens = max(0, min(*b.Tokens, c.Terms.Capacity))
	}
	if b.Index != nil {
		index = *b.Index
	}
	b.Control = &Control{Terms: *c.Terms, Era: max(now, c.Version.Era+1), Last: now}
	if c.Terms.Kind == Stepped {
		b.Control.Step, b.Control.Next = now, max(0, c.Next)
	}
	out.Status = StatusInitialised
	b.write(max(index, c.Version.Index)+1, tokens, &out)
	return out
}

func (b *Bucket) write(index, tokens int64, out *Outcome) {
	s := b.Control
	s.Index = index
	b.Index, b.Tokens = &index, &tokens
	out.Tokens = tokens
	s.tell(out)
}

// tell writes into an outcome what it says of the state.
func (s *Control) tell(out *Outcome) {
	out.Version, out.Last, out.Carry, out.Fence = Version{s.Era, s.Index}, s.Last, s.Carry, s.Terms.Fence
	out.Pool, out.FileVersion, out.PoolsVersion = s.Terms.Pool, s.Terms.FileVersion(), s.Terms.PoolsVersion
	out.Outstanding, out.Due, out.Debt = s.Outstanding, s.Due, s.Debt
	if s.Terms.Kind == Stepped {
		out.Step = s.Step
	}
}

// settle credits the stretch since the last refill under the terms in force:
// debt first, then tokens.
func (s *Control) settle(out *Outcome, tokens int64, stepDue bool, now int64) int64 {
	out.Elapsed = max(0, now-s.Last)
	var add int64
	if s.Terms.Kind == Smooth {
		el := min(out.Elapsed, s.Terms.MaxElapsed)
		granted := int64(0)
		if s.Terms.GrantEra == s.Era {
			granted = min(el, max(0, s.Terms.GrantEnd-(now-el)))
		}
		units := (el-granted)*s.Terms.Tokens + granted*s.Terms.GrantTokens + s.Carry
		add = units / s.Terms.Per
		s.Carry = units % s.Terms.Per
	} else if stepDue {
		add = s.Terms.Tokens
	}
	paid := min(add, s.Debt)
	s.Debt -= paid
	add -= paid
	after := tokens + add
	if over := after - s.room(); over >= 0 {
		out.Clamped = min(over, add)
		after, s.Carry = s.room(), 0 // a full bucket is owed nothing
	}
	out.Added = paid + max(0, after-tokens)
	return after
}

// change puts newer terms in force and returns the tokens carried over. next is the
// instant to come that the call names.
func (s *Control) change(t Terms, tokens, now, next int64) int64 {
	old := s.Terms
	switch {
	case t.Kind == Stepped && (old.Kind != Stepped || t.Per != old.Per): // its schedule begins now
		s.Carry, s.Step, s.Next = 0, max(s.Step, now), max(0, next)
	case t.Kind != Stepped && old.Kind == Stepped:
		s.Carry, s.Step, s.Next = 0, 0, 0
	case t.Per != old.Per:
		s.Carry = max(0, int64(math.Floor(float64(s.Carry)/float64(old.Per)*float64(t.Per)))-1)
	}
	switch t.CarryOver {
	case CarryProportional:
		if t.Capacity < old.Capacity && tokens > 0 {
			tokens = min(tokens, int64(math.Floor(float64(tokens)/float64(old.Capacity)*float64(t.Capacity))))
		}
	case CarryReset:
		tokens, s.Carry = min(tokens, 0), 0
	}
	s.Terms = t
	return tokens
}

// Taking is the answer to a take.
type Taking struct {
	OK     bool
	Known  bool  // false: no such bucket
	Taken  int64 // tokens taken
	Tokens int64 // tokens left
	Wait   int64 // denied: µs until the tokens asked for are due; -1 if never
}

// Take takes n tokens, all or nothing.
func (b *Bucket) Take(n, now int64) Taking { return b.TakeLeaving(n, Leave{}, now) }

// TakeLeaving is Take, which must leave some tokens.
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

// held is the number of tokens; a bucket that lost its key has none.
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

// least is the number of tokens to leave.
func (b *Bucket) least(l Leave) int64 {
	if b.Control == nil {
		return l.Of(0)
	}
	return l.Of(b.Control.Terms.Capacity)
}

// Return gives n tokens back, up to the capacity, under strict terms up to what
// is outstanding leaves of it, and reports how many the full bucket could not hold.
func (b *Bucket) Return(n int64) (clamped int64, known bool) {
	if b.Control == nil {
		return 0, false
	}
	clamped = min(n, max(0, b.held()+n-b.Control.room()))
	b.add(n - clamped)
	return clamped, true
}

// Wait is how long, in microseconds, until the bucket holds n tokens if nobody
// takes any: the refill after their credit falls due, and not before the first
// record ends if what is outstanding leaves no room for them. It is 0 if it holds
// them, half an interval if that refill is overdue, and -1 if it never will, or if
// nothing is known of its refills.
func (b *Bucket) Wait(n, now int64) int64 {
	tokens := b.held()
	if tokens >= n {
		return 0
	}
	s := b.Control
	if s == nil || n > s.Terms.Capacity {
		return -1
	}
	// Conversions keep a product from being fused with a sum, which the script's doubles aren't.
	need, interval := float64(n-tokens+s.Debt), float64(s.Terms.Interval)
	var due float64
	if s.Terms.Kind == Stepped {
		if s.Next <= s.Step {
			return -1
		}
		due = float64(s.Next) + float64((math.Ceil(need/float64(s.Terms.Tokens))-1)*float64(s.Next-s.Step))
	} else {
		units := float64(need*float64(s.Terms.Per)) - float64(s.Carry)
		granted := 0.0
		if s.Terms.GrantEra == s.Era {
			granted = float64(max(0, s.Terms.GrantEnd-s.Last))
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
		due = float64(s.Last) + float64(math.Ceil(t/interval)*interval)
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
