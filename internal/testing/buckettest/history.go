package buckettest

import (
	"math/rand/v2"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// History draws random states and calls that reach every rule of a refill. It
// is a pure function of its source.
type History struct {
	rng  *rand.Rand
	seen []policy.Version // versions that callers know, some of them old by now
}

// NewHistory returns a history that draws from rng.
func NewHistory(rng *rand.Rand) *History { return &History{rng: rng, seen: []policy.Version{{}}} }

// Remember adds a version that a caller knows now.
func (h *History) Remember(v policy.Version) { h.seen = append(h.seen, v) }

// Chance returns true with a probability of so many percent.
func (h *History) Chance(percent int) bool { return h.rng.IntN(100) < percent }

func (h *History) chance(percent int) bool { return h.Chance(percent) }

// Leave returns a random number of tokens, or percentage of the capacity, for a take to leave. Mostly it is zero.
func (h *History) Leave() policy.Leave {
	switch h.rng.IntN(6) {
	case 0:
		return policy.Leave{Tokens: h.rng.Int64N(100)}
	case 1:
		return policy.Leave{Percent: h.rng.Int64N(30)}
	}
	return policy.Leave{}
}

// Terms returns random terms. There are only a few fences, so that different terms often have equal ones.
func (h *History) Terms() policy.Terms {
	rates := []policy.Rate{policy.PerSecond(500), policy.PerSecond(7), {Tokens: 1000, Per: 24 * time.Hour},
		{Tokens: 999_983, Per: time.Second}, {Tokens: 10, Per: time.Minute}}
	rate := rates[h.rng.IntN(len(rates))]
	p := policy.Policy{
		Capacity: 1 + h.rng.Int64N(2000) + rate.Over(2*time.Second), Rate: rate,
		Interval: time.Duration(1+h.rng.IntN(200)) * time.Millisecond,
		OnLoss:   policy.Loss(h.rng.IntN(2)), OnRollback: policy.Rollback(h.rng.IntN(2)),
		CarryOver: policy.CarryOver(h.rng.IntN(3)), Strict: h.chance(40), Shadow: h.chance(15),
	}
	if h.chance(20) {
		p.Rate = policy.Rate{}
		p.Steps = policy.Every(time.Minute)
		p.StepTokens = 1 + h.rng.Int64N(500)
	}
	t := p.Terms(policy.Fence{Epoch: h.rng.Int64N(4), Seq: h.rng.Int64N(3)})
	switch {
	case t.Kind == policy.Stepped:
	case h.chance(15):
		t.Template = true
	case h.chance(40):
		t.Pool = true
		t.Version = h.rng.Int64N(6)
		t.PoolsVersion = h.rng.Int64N(3)
		if t.Fence.Epoch == 0 {
			t.Fence.Seq = 0 // the pool has not granted anything yet
		} else {
			t.GrantTokens = t.Tokens * (1 + h.rng.Int64N(4))
		}
	}
	return t
}

// Call returns a random refill call for a server whose time is about now.
func (h *History) Call(now int64) policy.Call {
	c := policy.Call{Version: h.seen[h.rng.IntN(len(h.seen))], Create: policy.Create(h.rng.IntN(3))}
	if h.chance(70) {
		c.Version = h.seen[len(h.seen)-1]
	}
	if h.chance(3) {
		c.Version.Index += h.rng.Int64N(3)
	}
	if h.chance(80) {
		t := h.Terms()
		if t.GrantTokens > 0 {
			t.GrantEnd, t.GrantEra = now+h.rng.Int64N(2_000_000)-500_000, c.Version.Era
		}
		c.Terms = &t
	}
	if h.chance(50) {
		c.Step = now + h.rng.Int64N(200_000) - 190_000
		c.Next = c.Step + 60_000_000
	}
	return c
}

// moveStep lets up to three minutes pass for a schedule with a step each minute. Sometimes it makes the next step
// unknown.
func (h *History) moveStep(c *policy.Control) {
	const minute = 60_000_000
	c.Step = max(1, c.Step-h.rng.Int64N(3*minute))
	c.Next = c.Step + minute
	if h.chance(20) {
		c.Next = 0
	}
}

// Disturb changes the state of a bucket as faults and other programs do. It also changes the numbers of outstanding and
// owed tokens. The bucket has no records of reservations or leases.
func (h *History) Disturb(b *policy.Bucket) {
	h.DisturbKeys(b)
	c := b.Control
	switch {
	case c == nil:
	case h.chance(10):
		c.Outstanding = h.rng.Int64N(c.Terms.Capacity + 1)
		c.Due = max(1, c.Last+h.rng.Int64N(4_000_000)-2_000_000)
	case h.chance(10):
		c.Debt = h.rng.Int64N(c.Terms.Capacity/4 + 1)
	case h.chance(20):
		c.Outstanding = 0
		c.Due = 0
		c.Debt = 0
	}
}

// DisturbKeys changes the state of a bucket as faults and other programs do: time passes or
// steps back, keys are lost, and other programs take and add tokens.
func (h *History) DisturbKeys(b *policy.Bucket) {
	add := func(p **int64, n int64) {
		v := n
		if *p != nil {
			v += **p
		}
		*p = &v
	}
	if c := b.Control; c != nil {
		switch {
		case h.chance(60):
			ago := h.rng.Int64N(300_000)
			if h.chance(10) {
				ago *= 100
			}
			c.Last -= ago
		case h.chance(5):
			c.Last += h.rng.Int64N(200_000)
		}
		if c.Terms.Kind == policy.Smooth && h.chance(20) {
			c.Carry = h.rng.Int64N(c.Terms.Per)
		}
		if c.Terms.Kind == policy.Stepped && c.Step > 0 && h.chance(40) {
			h.moveStep(c)
		}
	}
	switch h.rng.IntN(20) {
	case 0:
		b.Tokens = nil
	case 1:
		b.Index = nil
	case 2:
		b.Control = nil
	case 3:
		*b = policy.Bucket{}
	case 4:
		add(&b.Index, 1)
		add(&b.Tokens, h.rng.Int64N(100))
	case 5:
		add(&b.Tokens, -h.rng.Int64N(3))
	case 6: // another program tried to take from a bucket that doesn't exist
		*b = policy.Bucket{}
		add(&b.Tokens, -h.rng.Int64N(2))
	case 7:
		*b = policy.Bucket{}
		add(&b.Index, 0)
	}
	if b.Tokens != nil && *b.Tokens > 0 && h.chance(60) {
		add(&b.Tokens, -h.rng.Int64N(*b.Tokens+1))
	}
}
