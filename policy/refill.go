package policy

import "math"

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
	switches := after != s.Terms
	out := Outcome{Differs: rank == differs, Now: now}

	least := int64(0) // the new index must be higher than this
	switch {
	case stored.Before(c.Version):
		out.Status, least = StatusRolledBack, c.Version.Index
		tokens = s.rollBack(c, after.OnRollback, tokens, now)
	case now < s.Last-ClockTolerance:
		out.Status = StatusClock
		if span := s.span(c); span > 0 && s.Step > now+span {
			s.Step, s.Next = now+span, now+2*span
		}
		s.Last = now
		s.Era = nextEra(max(s.Era, c.Version.Era), now)
	default:
		out.Status = b.judge(c, rank, switches, now)
		if !out.Status.Wrote() {
			out.Tokens = tokens
			s.fill(&out)
			return out
		}
		tokens = s.proceed(c, switches, tokens, now, &out)
	}
	if switches {
		old := s.Terms
		tokens = s.change(after, tokens, now, c.Next)
		s.presume(&old, tokens)
	}
	tokens = min(tokens, s.room()) // a foreign client may have left more
	s.Index = max(s.Index, least)
	if b.Index != nil {
		s.Index = max(s.Index, *b.Index)
	}
	b.write(s.Index+1, tokens, &out)
	return out
}

// judge returns the status of a call on a server that has lost nothing and whose clock is right.
func (b *Bucket) judge(c Call, rank rank, switches bool, now int64) Status {
	s := b.Control
	stale := c.Version.Before(Version{s.Era, s.Index})
	switch {
	case stale && !switches:
		return StatusStale
	case rank == conflicts:
		return StatusConflict
	case !switches && !s.due(c, switches, now) && now-s.Last < s.Terms.Interval/2:
		return StatusEarly
	case b.Index != nil && *b.Index != 0 && *b.Index != s.Index:
		return StatusForeign
	case stale:
		return StatusSwitched
	}
	return StatusApplied
}

// due reports whether the instant that a call may credit has come and has not been credited yet.
func (s *Control) due(c Call, switches bool, now int64) bool {
	instant := s.instant(c, switches)
	return s.Terms.Kind == Stepped && s.Step < instant && instant <= now
}

// proceed credits what is due, unless another client has credited it. It returns the tokens then held.
func (s *Control) proceed(c Call, switches bool, tokens, now int64, out *Outcome) int64 {
	due := s.due(c, switches, now)
	if out.Status == StatusForeign {
		s.Carry = 0
	} else {
		tokens = s.settle(out, tokens, due, now)
	}
	if due {
		s.Step, s.Next = s.instant(c, switches), 0
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
	return tokens
}

// rank is how the terms that a call brings compare with those in force.
type rank int

const (
	older     rank = iota // older or the same: at most the versions of a pool's terms rise
	newer                 // newer: they replace those in force
	differs               // different under the same fence: they are ignored
	conflicts             // plain terms for a pool's bucket or the reverse, and not of a later configuration
)

// meet returns the terms after a call that brings others (nil for none), and how the two compare.
func (t Terms) meet(brought *Terms) (Terms, rank) {
	switch {
	case brought == nil:
		return t, older
	case t.Pool != brought.Pool:
		// The versions decide. But terms from a coordinator, whose epoch is above 0, never turn a plain bucket into a pool's.
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

// instant returns the scheduled instant that a call may credit. If the call has the schedule in force, it is the
// instant that the call names. If the call switches to another schedule, it is the next instant of the schedule in
// force.
func (s *Control) instant(c Call, switches bool) int64 {
	switch {
	case s.scheduled(c):
		return c.Step
	case switches:
		return s.Next
	}
	return 0
}

// span returns the present period of the schedule in force; 0 if it isn't known.
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

// rollBack handles a server that has lost a write which the caller knows. rule is that of the terms after the call,
// because the server may have lost later terms, too. rollBack returns the tokens left.
func (s *Control) rollBack(c Call, rule Rollback, tokens, now int64) int64 {
	if rule == RollbackKeep {
		tokens = min(tokens, s.Terms.Capacity)
	} else {
		tokens = min(tokens, 0)          // below 0, a plain client is about to undo its try
		if span := s.span(c); span > 0 { // otherwise the step that the server forgot would be credited again
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
	s.Era = nextEra(max(s.Era, c.Version.Era), now)
	return tokens
}

// initialise creates or adopts a bucket without control state, if the call may do so.
func (b *Bucket) initialise(c Call, now int64) Outcome {
	out := Outcome{Status: StatusUnknown, Now: now}
	if c.Terms == nil || c.Create == CreateNever {
		return out
	}
	tokens, index := b.held(), int64(0)
	if b.Index != nil {
		index = *b.Index
	}
	// A plain client that tries to take from a missing bucket leaves the key with 0 tokens and nothing else. A number
	// below 0 is a try that the client is about to undo.
	adopted := tokens > 0 || index > 0 // a foreign client's bucket
	switch {
	case adopted:
		tokens = min(tokens, c.Terms.Capacity)
	case c.Version.Era > 0: // it was lost
		if c.Terms.OnLoss == LossFull {
			tokens += c.Terms.Capacity
		}
	case c.Create == CreateInitial:
		tokens += c.Terms.Initial
	default:
		return out
	}
	terms := *c.Terms
	if o := b.Override; o != nil && o.Kind == Smooth && !terms.Pool { // it stays in force when its key is configured
		terms = *o
		tokens = min(tokens, o.Capacity)
	}
	b.Control = &Control{Terms: terms, Era: nextEra(c.Version.Era, now), Last: now}
	if terms.Kind == Stepped {
		b.Control.Step, b.Control.Next = now, max(0, c.Next)
	}
	if adopted || c.Version.Era > 0 {
		b.Control.Due = Uncounted // there was a state before
	}
	b.Control.presume(nil, tokens)
	out.Status = StatusInitialised
	b.write(max(index, c.Version.Index)+1, tokens, &out)
	return out
}

// presume sets Outstanding while records are uncounted. It is called when a bucket that holds tokens gets new terms.
// old are the terms before; nil if the bucket begins without state.
//
// Under strict terms all tokens that the bucket lacks count as outstanding, so that no refill replaces tokens that are
// held. A bucket whose terms weren't strict may have lost its state without a count of its records. So if its new terms
// are strict, presume sets Due to Uncounted.
func (s *Control) presume(old *Terms, tokens int64) {
	strict := s.Terms.Strict
	if strict && (old == nil || !old.Strict) && s.Due == 0 {
		s.Due = Uncounted
	}
	if s.Due == Uncounted {
		s.Outstanding = 0
		if strict {
			s.Outstanding = s.Terms.Capacity - min(max(0, tokens), s.Terms.Capacity)
		}
	}
}

// nextEra returns the era that follows another one: the present time. If the present is not later than that era,
// because the clock was ahead, it returns a later number that depends on the present. Otherwise two callers that know
// the same era could begin two histories with the same next era.
func nextEra(era, now int64) int64 {
	if now > era {
		return now
	}
	return era + 1 + now%1_000_000
}

func (b *Bucket) write(index, tokens int64, out *Outcome) {
	s := b.Control
	s.Index = index
	b.Index, b.Tokens = &index, &tokens
	out.Tokens = tokens
	s.fill(out)
}

// fill copies the state to the fields of an outcome.
func (s *Control) fill(out *Outcome) {
	out.Version = Version{s.Era, s.Index}
	out.Last = s.Last
	out.Carry = s.Carry
	out.Fence = s.Terms.Fence
	out.Pool = s.Terms.Pool
	out.FileVersion = s.Terms.FileVersion()
	out.PoolsVersion = s.Terms.PoolsVersion
	out.Outstanding = s.Outstanding
	out.Due = s.Due
	out.Debt = s.Debt
	if s.Terms.Kind == Stepped {
		out.Step = s.Step
	}
}

// settle credits the time since the last refill under the terms in force. The credit first pays debt, and then adds
// tokens.
func (s *Control) settle(out *Outcome, tokens int64, stepDue bool, now int64) int64 {
	out.Elapsed = max(0, now-s.Last)
	var add int64
	if s.Terms.Kind == Smooth {
		add, s.Carry = s.Terms.Due(s.Era, s.Last, s.Carry, now)
	} else if stepDue {
		add = s.Terms.Tokens
	}
	paid := min(add, s.Debt)
	s.Debt -= paid
	add -= paid
	room := s.room() + min(tokens, 0) // below 0, plain clients are about to undo their tries, which adds tokens
	after := tokens + add
	if over := after - room; over >= 0 {
		out.Clamped = min(over, add)
		after, s.Carry = room, 0 // a full bucket keeps no fraction of a token
	}
	out.Added = paid + max(0, after-tokens)
	return after
}

// change puts newer terms in force and returns the tokens that are carried over. If the amounts are the same, these are
// all tokens. next is the next instant of the schedule, as the call gives it.
func (s *Control) change(t Terms, tokens, now, next int64) int64 {
	old := s.Terms
	s.Terms = t
	switch {
	case t.sameAmounts(old):
		return tokens
	case t.Kind == Stepped && (old.Kind != Stepped || t.Per != old.Per): // its schedule begins now
		s.Carry = 0
		s.Step = max(s.Step, now)
		s.Next = max(0, next)
	case t.Kind != Stepped && old.Kind == Stepped:
		s.Carry = 0
		s.Step = 0
		s.Next = 0
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
	return tokens
}
