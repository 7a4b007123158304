package oracle

import (
	"github.com/tokenrefill/refiller/policy"
)

// Bucket is a bucket with the records of its reservations and leases. An empty map is nil. Without a fault, both maps
// have the same ids.
type Bucket struct {
	policy.Bucket
	Held map[string]Holding // records by id
	Ends map[string]int64   // when each record ends, by id, Unix µs
}

// sweptBeside is the largest number of overdue records that a call for another record ends.
const sweptBeside = 16

// HoldingKind is the kind of a record of a bucket.
type HoldingKind int64

// Kinds of records. Only the first two hold tokens.
const (
	HoldingLease       HoldingKind = iota + 1 // a consumer's block of tokens
	HoldingReservation                        // a reservation that isn't settled yet
	HoldingSettled                            // a reservation that was settled
	HoldingRunOut                             // a reservation whose time ended
)

// Holding is the record of a reservation or lease.
type Holding struct {
	Kind  HoldingKind
	N     int64 // tokens held
	Until int64 // when the record ends, Unix µs
	Era   int64 // era in which the tokens were taken

	Overrun policy.Overrun    // of a reservation, before and after it ran out
	Void    int64             // number of tokens that were not returned when the reservation ran out
	Answer  policy.Settlement // of a settled reservation

	// Number and results of the last call for a lease.
	Seq, Granted, Clamped int64
}

// Held is the answer to a call about a reservation or lease.
type Held int

// Answers about reservations and leases.
const (
	HeldDone    Held = iota // the call was carried out, or it was denied for lack of tokens
	HeldUnknown             // the bucket doesn't exist, or has no policy
	HeldInUse               // the id belongs to a different record, or the call doesn't fit to the record's last call
	HeldNot                 // there is no record of the id
	HeldOther               // the lease is of an earlier era of the bucket, so it has ended
)

// Reserve takes n tokens, all or nothing, and holds them under the id for ttl microseconds. It must leave the tokens of
// leave in the bucket.
func (b *Bucket) Reserve(
	id string, n, ttl int64, o policy.Overrun, leave policy.Leave, now int64,
) (policy.Taking, Held) {
	s := b.Control
	if s == nil {
		return policy.Taking{}, HeldUnknown
	}
	b.restore()
	if h, there := b.Held[id]; there {
		if h.Kind != HoldingReservation || h.N != n || h.Until <= now || h.Era != s.Era {
			return policy.Taking{}, HeldInUse
		}
		return policy.Taking{OK: true, Known: true, Taken: n, Tokens: tokensOf(&b.Bucket)}, HeldDone
	}
	swept := s.Due > 0 && s.Due <= now
	_, lost := b.end(sweptBeside, now)
	least := leastOf(&b.Bucket, leave)
	if tokensOf(&b.Bucket)-least < n {
		if swept {
			b.countEnded(lost)
		}
		return policy.Taking{Known: true, Tokens: tokensOf(&b.Bucket), Wait: b.Wait(n+least, now)}, HeldDone
	}
	add(&b.Bucket, -n)
	s.Outstanding += n
	b.put(id, Holding{Kind: HoldingReservation, N: n, Until: now + ttl, Era: s.Era, Overrun: o})
	if swept { // the new record may have the id of an end without a record
		b.countEnded(lost)
	} else if s.Due == 0 || now+ttl < s.Due {
		s.Due = now + ttl
	}
	return policy.Taking{OK: true, Known: true, Taken: n, Tokens: tokensOf(&b.Bucket)}, HeldDone
}

// Settle ends a reservation. used is the number of its tokens that were used. If the reservation was settled before,
// Settle changes nothing and returns the same answer, and again is true.
func (b *Bucket) Settle(id string, used, now int64) (answer policy.Settlement, again bool, held Held) {
	s := b.Control
	if s == nil {
		return policy.Settlement{}, false, HeldUnknown
	}
	b.restore()
	h, there := b.Held[id]
	switch {
	case !there:
		return policy.Settlement{}, false, HeldNot
	case h.Kind == HoldingLease:
		return policy.Settlement{}, false, HeldInUse
	case h.Kind == HoldingSettled:
		return h.Answer, true, HeldDone
	}
	s.Outstanding = max(0, s.Outstanding-h.N)
	n := h.N
	if h.Kind == HoldingRunOut {
		n = h.Void
	}
	answer.Returned, answer.Clamped, answer.Void = b.giveBack(max(0, n-used), h.Era)
	over := max(0, used-n)
	answer.Charged = min(over, max(0, tokensOf(&b.Bucket)))
	add(&b.Bucket, -answer.Charged)
	if h.Overrun == policy.OverrunDebt {
		answer.Owed = min(over-answer.Charged, max(0, s.Terms.Capacity-s.Debt))
	}
	s.Debt += answer.Owed
	answer.Forgiven = over - answer.Charged - answer.Owed
	b.put(id, Holding{Kind: HoldingSettled, Until: now + policy.HoldMemory.Microseconds(), Era: h.Era, Answer: answer})
	b.sweep(sweptBeside, now)
	b.findDue()
	return answer, false, HeldDone
}

// Lease settles a consumer's block of tokens. keep is the number of tokens that the block still holds, and back the
// number that the consumer returns. Lease then adds up to want tokens to the block, at most half of the bucket's
// tokens. seq is the number of the call. A call with the number of the last call changes nothing.
func (b *Bucket) Lease(id string, seq, keep, back, want, ttl, now int64) (granted, clamped int64, held Held) {
	s := b.Control
	if s == nil {
		return 0, 0, HeldUnknown
	}
	b.restore()
	h, there := b.Held[id]
	switch {
	case there && (h.Kind != HoldingLease || seq != h.Seq && (seq != h.Seq+1 || keep+back > h.N)):
		return 0, 0, HeldInUse
	case !there && seq != 1:
		return 0, 0, HeldNot
	case !there && keep+back > 0:
		return 0, 0, HeldInUse
	case there && h.Era != s.Era:
		s.Outstanding = max(0, s.Outstanding-h.N)
		b.drop(id)
		b.sweep(sweptBeside, now)
		b.findDue()
		return 0, 0, HeldOther
	case there && h.Seq == seq:
		return h.Granted, h.Clamped, HeldDone
	}
	s.Outstanding = max(0, s.Outstanding-h.N) + keep
	_, clamped, _ = b.giveBack(back, s.Era)
	granted = min(want, max(0, tokensOf(&b.Bucket))/2)
	add(&b.Bucket, -granted)
	s.Outstanding += granted
	if keep+granted > 0 {
		b.put(id, Holding{Kind: HoldingLease, N: keep + granted, Until: now + ttl, Era: s.Era, Seq: seq, Granted: granted,
			Clamped: clamped})
	} else if there {
		b.drop(id)
	}
	b.sweep(sweptBeside, now)
	b.findDue()
	return granted, clamped, HeldDone
}

// Sweep ends reservations and leases whose time is over, at most as many as most, the earliest ones first. The tokens
// of a lease count as spent, since it is unknown how many of them were spent.
func (b *Bucket) Sweep(most int, now int64) policy.Swept {
	if b.Control == nil {
		return policy.Swept{}
	}
	b.restore()
	return b.sweep(most, now)
}

func (b *Bucket) sweep(most int, now int64) policy.Swept {
	sum, lost := b.end(most, now)
	if b.Control.Due > 0 && b.Control.Due <= now {
		b.countEnded(lost)
	}
	return sum
}

// end ends records whose time is over. It reports whether an end without a record was dropped. The caller calls
// countEnded afterwards.
func (b *Bucket) end(most int, now int64) (sum policy.Swept, lost bool) {
	s := b.Control
	if s.Due == 0 || s.Due > now {
		return sum, false
	}
	for range most {
		id, until := b.earliest()
		if id == "" || until > now {
			break
		}
		h, there := b.Held[id]
		s.Outstanding = max(0, s.Outstanding-h.N)
		if h.Kind == HoldingReservation {
			returned, clamped, void := b.giveBack(h.N, h.Era)
			sum.Returned += returned
			sum.Clamped += clamped
			sum.Void += void
			b.put(id, Holding{Kind: HoldingRunOut, Until: now + policy.HoldMemory.Microseconds(), Era: h.Era,
				Overrun: h.Overrun, Void: void})
			continue
		}
		sum.Dropped += h.N
		lost = lost || !there
		b.drop(id)
	}
	return sum, lost
}

// countEnded updates the outstanding tokens and the first end after records have ended.
func (b *Bucket) countEnded(lost bool) {
	if lost {
		b.recount()
	}
	b.findDue()
}

// restore counts the outstanding tokens if the bucket's state and Ends disagree about the first end. That means that
// the state or the ends were lost. Under strict terms, it also removes the tokens for which the capacity has no room
// beside the outstanding ones.
func (b *Bucket) restore() {
	s := b.Control
	if _, first := b.earliest(); first == s.Due {
		return
	}
	b.recount()
	b.findDue()
	if s.Terms.Strict {
		add(&b.Bucket, min(0, max(0, s.Terms.Capacity-s.Outstanding)-tokensOf(&b.Bucket)))
	}
}

// recount counts the outstanding tokens after a key was lost, and restores missing ends from the records. An end
// without a record holds an unknown number of tokens. While there is such an end, the count doesn't fall.
func (b *Bucket) recount() {
	sum := int64(0)
	for id, h := range b.Held {
		sum += h.N
		b.put(id, h)
	}
	if len(b.Ends) > len(b.Held) {
		sum = max(sum, b.Control.Outstanding)
	}
	b.Control.Outstanding = sum
}

func (b *Bucket) put(id string, h Holding) {
	if b.Held == nil {
		b.Held = make(map[string]Holding)
	}
	if b.Ends == nil {
		b.Ends = make(map[string]int64)
	}
	b.Held[id] = h
	b.Ends[id] = h.Until
}

func (b *Bucket) drop(id string) {
	delete(b.Held, id)
	delete(b.Ends, id)
	if len(b.Held) == 0 {
		b.Held = nil
	}
	if len(b.Ends) == 0 {
		b.Ends = nil
	}
}

// earliest returns the id of the record that ends first, and the time of its end. The id is empty if there is no end.
func (b *Bucket) earliest() (first string, until int64) {
	for id, end := range b.Ends {
		if first == "" || end < until || end == until && id < first {
			first, until = id, end
		}
	}
	return first, until
}

// findDue sets the time at which the first record ends. If there is no end, no tokens are outstanding.
func (b *Bucket) findDue() {
	_, b.Control.Due = b.earliest()
	if b.Control.Due == 0 {
		b.Control.Outstanding = 0
		b.Held = nil
	}
}

// giveBack returns n tokens that were taken during an era. It returns none of them if that era is over.
func (b *Bucket) giveBack(n, era int64) (returned, clamped, void int64) {
	if era != b.Control.Era {
		return 0, 0, n
	}
	clamped, _ = b.Return(n)
	return n - clamped, clamped, 0
}
