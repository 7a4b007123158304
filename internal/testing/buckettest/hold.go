package buckettest

import (
	"maps"
	"slices"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// HoldOp is a call about reservations and leases.
type HoldOp int

// The calls about reservations and leases.
const (
	Reserve HoldOp = iota
	Settle
	Lease
	Sweep
)

// HoldCall is a call about a reservation or lease.
type HoldCall struct {
	Op      HoldOp
	ID      string
	N       int64 // tokens to reserve, or tokens used if Op is Settle
	TTL     int64 // µs
	Overrun policy.Overrun
	Leave   policy.Leave // if Op is Reserve

	Seq, Keep, Back, Want int64 // if Op is Lease
	Most                  int   // if Op is Sweep: the largest number of records to end
}

// HoldCall draws a call about a reservation or lease of the bucket. Sometimes
// the bucket has no record of its id.
func (h *History) HoldCall(b oracle.Bucket) HoldCall {
	ids := slices.Sorted(maps.Keys(b.Held))
	c := HoldCall{
		Op: HoldOp(h.rng.IntN(4)), ID: string(rune('a' + h.rng.IntN(8))), N: 1 + h.rng.Int64N(200),
		TTL:     10_000_000 + h.rng.Int64N(10_000_000),
		Overrun: policy.Overrun(h.rng.IntN(2)), Seq: 1, Want: h.rng.Int64N(300), Most: 1 + h.rng.IntN(4),
	}
	if len(ids) > 0 && h.chance(70) {
		c.ID = ids[h.rng.IntN(len(ids))]
	}
	c.Leave = h.Leave()
	held, there := b.Held[c.ID]
	switch {
	case there && held.Kind == oracle.HoldingSettled && h.chance(70):
		c.Op = Sweep
	case there && h.chance(60): // the holder of a reservation settles it, and the holder of a lease renews it
		c.Op = Settle
		if held.Kind == oracle.HoldingLease {
			c.Op = Lease
		}
	}
	switch {
	case c.Op == Settle && h.chance(30):
		c.N = h.rng.Int64N(5000)
	case held.N > 0 && h.chance(30):
		c.N = held.N // reserve makes the same reservation again, and settle uses all of it
	}
	if held.Kind == oracle.HoldingLease {
		c.Seq = held.Seq + 1
		if h.chance(20) {
			c.Seq = held.Seq + h.rng.Int64N(3) - 1
		}
		c.Keep = h.rng.Int64N(held.N + 2)
		c.Back = h.rng.Int64N(held.N + 2 - min(c.Keep, held.N+1))
		if h.chance(30) {
			c.Keep, c.Want = 0, 0
		}
	}
	return c
}

// DisturbHeld changes the records of reservations and leases as time and faults do. It lets time pass for some of them,
// and makes some end exactly now. It changes the eras of some. And it loses the keys that keep them, one or several at
// once. now is the server's time, which may not advance before the next call.
func (h *History) DisturbHeld(b *oracle.Bucket, now int64) {
	c := b.Control
	known := c != nil && c.Due == first(b.Ends)
	for _, id := range slices.Sorted(maps.Keys(b.Held)) {
		held := b.Held[id]
		if h.chance(20) {
			held.Until -= 10_000_000 + h.rng.Int64N(70_000_000)
		}
		if h.chance(8) {
			held.Until = now
		}
		if h.chance(8) {
			held.Era--
		}
		b.Held[id] = held
		if _, there := b.Ends[id]; there {
			b.Ends[id] = held.Until
		}
	}
	if known {
		c.Due = first(b.Ends)
	}
	if c != nil && h.chance(10) {
		c.Debt = h.rng.Int64N(c.Terms.Capacity + 1)
	}
	lost := h.rng.IntN(60)
	if lost < 4 && h.chance(50) || lost == 4 { // {K}:ctl was evicted, perhaps with the tokens and the index
		b.Control = nil
		if h.chance(30) {
			b.Bucket = policy.Bucket{}
		}
	}
	if lost == 0 || lost == 1 { // {K}:outstanding was evicted
		b.Held = nil
	}
	if lost == 1 || lost == 2 { // {K}:due was evicted
		b.Ends = nil
	}
}

// first returns the earliest of the ends, or 0 if there is none.
func first(ends map[string]int64) int64 {
	until := int64(0)
	for _, end := range ends {
		if until == 0 || end < until {
			until = end
		}
	}
	return until
}
