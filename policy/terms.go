package policy

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"strconv"
	"strings"
	"time"
)

// ErrTerms is returned for terms that can't be read.
var ErrTerms = errors.New("policy: bad terms")

// Fence orders the terms of one bucket: terms with a later fence replace terms with an earlier fence, never the
// reverse. The fence of a plain bucket is (version of the configuration, 0). The fence of a pool's bucket is (epoch,
// seq). Two fences of different kinds are not compared.
type Fence struct{ Epoch, Seq int64 }

// Before reports whether f is older than g.
func (f Fence) Before(g Fence) bool {
	return f.Epoch < g.Epoch || f.Epoch == g.Epoch && f.Seq < g.Seq
}

// OwnEpoch is the epoch in the fence of an override, which is the policy of a single key of a template. It is above
// every version of a configuration, so no refiller replaces an override by the template's policy.
const OwnEpoch = 1 << 52

// Own reports whether the fence is that of an override. The fence of a pool never is, because its epochs are lower.
func (f Fence) Own() bool { return f.Epoch >= OwnEpoch }

// Kind is the way in which credit falls due.
type Kind int64

// Kinds of schedules.
const (
	Smooth  Kind = iota // by elapsed time
	Stepped             // Tokens at each scheduled instant that the caller names
)

// Terms is a policy as the scripts read it: whole tokens and microseconds. It
// is comparable.
type Terms struct {
	Fence      Fence
	Kind       Kind
	Capacity   int64
	Tokens     int64 // smooth: tokens per Per; stepped: tokens of a step
	Per        int64 // smooth: microseconds; stepped: a name of the schedule
	Interval   int64 // refill interval, microseconds
	MaxElapsed int64 // longest stretch that one refill credits, microseconds; computed from the others
	Initial    int64
	OnLoss     Loss
	OnRollback Rollback
	CarryOver  CarryOver
	Degraded   Degraded
	Shadow     bool // encoded with Degraded: adds shadowed to its number
	Divided    bool // among flows; encoded with Degraded: adds divided to its number

	// Template marks the buckets of a template, which expire.
	Template bool

	// Pool marks a pool's bucket. Version and PoolsVersion are then the versions in the configuration of the replica that
	// sends the terms. For other buckets they are 0, since the fence has the version. If one of two terms is a pool's and
	// the other one is not, only the versions decide which is in force.
	Pool                  bool
	Version, PoolsVersion int64

	// A grant replaces Tokens by GrantTokens until GrantEnd, an instant on the
	// bucket's own Redis clock in Unix microseconds, while the bucket is in
	// GrantEra. All are zero for a bucket of no pool.
	GrantTokens int64
	GrantEnd    int64
	GrantEra    int64

	// Strict keeps room in the bucket for the tokens that are outstanding in reservations and leases. The bucket is
	// refilled up to its capacity less these tokens.
	Strict bool
}

// Terms writes the policy in the scripts' integers under a fence. The policy
// must be valid.
func (p Policy) Terms(f Fence) Terms {
	t := Terms{
		Fence: f, Capacity: p.Capacity, Interval: p.interval().Microseconds(), Initial: p.initial(),
		OnLoss: p.OnLoss, OnRollback: p.OnRollback, CarryOver: p.CarryOver, Degraded: p.Degraded, Strict: p.Strict,
		Shadow: p.Shadow, Divided: p.Flows != nil,
	}
	if p.Steps != nil {
		t.Kind = Stepped
		t.Tokens = p.StepTokens
		t.Per = nameOf(p.Steps)
		return t
	}
	t.Tokens, t.Per = p.Rate.reduced()
	t.MaxElapsed = MaxElapsed(t.Capacity, t.Tokens, t.Per, t.Interval)
	return t
}

// Budget reports whether the terms are those of a budget: a bucket of a template with a schedule.
func (t Terms) Budget() bool { return t.Template && t.Kind == Stepped }

// FileVersion returns the version of the configuration that the terms are from.
func (t Terms) FileVersion() int64 {
	if t.Pool {
		return t.Version
	}
	return t.Fence.Epoch
}

// sameAmounts reports whether both terms have the same capacity and the same rate or schedule. Only a change of these
// makes CarryOver apply. A change of the fence, a grant or the degraded mode, for example, does not.
func (t Terms) sameAmounts(o Terms) bool {
	return t.Kind == o.Kind && t.Capacity == o.Capacity && t.Tokens == o.Tokens && t.Per == o.Per
}

// nameOf returns a number that names a schedule. Two schedules have the same number with a probability of 2^-47. It is
// at least 1, so that the scripts distinguish a schedule from none.
func nameOf(s Steps) int64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(s.String())) // it doesn't fail
	return int64(hash.Sum64()>>17) + 1
}

// MaxElapsed returns the longest stretch that one refill credits, in microseconds. This is the time to fill the bucket,
// but no more than the longer of 2 s and five intervals.
func MaxElapsed(capacity, tokens, per, interval int64) int64 {
	fill := float64(capacity) * float64(per) / float64(tokens)
	return int64(min(math.Ceil(fill), float64(max(2_000_000, 5*interval))))
}

// Numbers that the encoding adds to Degraded: shadowed in shadow mode, divided for a bucket with flows.
const (
	shadowed = 4
	divided  = 8
)

// The fewest and the most numbers that Encode writes. The first ones are always written. Those of choices, pool and
// grant follow, and are zero for most buckets.
const (
	leastNumbers = 6
	mostNumbers  = 18
)

// The kinds of terms in their encoding.
const (
	KindPlain = iota
	KindStepped
	KindTemplate
	KindPool
	KindBudget // stepped and of a template
)

// numbers returns the terms in the order of their encoding.
func (t *Terms) numbers() [mostNumbers]int64 {
	kind := int64(KindPlain)
	version := t.Fence.Epoch
	epoch := int64(0)
	switch {
	case t.Pool:
		kind = KindPool
		version = t.Version
		epoch = t.Fence.Epoch
	case t.Template && t.Kind == Stepped:
		kind = KindBudget
	case t.Template:
		kind = KindTemplate
	case t.Kind == Stepped:
		kind = KindStepped
	}
	strict, enforcement := int64(0), int64(t.Degraded)
	if t.Strict {
		strict = 1
	}
	if t.Shadow {
		enforcement += shadowed
	}
	if t.Divided {
		enforcement += divided
	}
	return [...]int64{
		version, kind, t.Capacity, t.Tokens, t.Per, t.Interval, t.Capacity - t.Initial,
		int64(t.OnLoss), int64(t.OnRollback), int64(t.CarryOver), enforcement, strict,
		t.PoolsVersion, epoch, t.Fence.Seq, t.GrantTokens, t.GrantEnd, t.GrantEra,
	}
}

// Encode writes the terms as the scripts store them: decimal integers with spaces between them. It omits zeros at the
// end, but always writes the first six numbers. Equal terms have equal texts.
func (t Terms) Encode() string { return string(t.Append(make([]byte, 0, 128))) }

// Append appends what Encode writes.
func (t Terms) Append(b []byte) []byte {
	numbers := t.numbers()
	last := len(numbers)
	for last > leastNumbers && numbers[last-1] == 0 {
		last--
	}
	for i, n := range numbers[:last] {
		if i > 0 {
			b = append(b, ' ')
		}
		b = strconv.AppendInt(b, n, 10)
	}
	return b
}

// DecodeTerms reads what Encode wrote. It returns ErrTerms for numbers that Encode never writes.
func DecodeTerms(s string) (Terms, error) {
	words := strings.Fields(s)
	if len(words) > mostNumbers {
		return Terms{}, fmt.Errorf("%w: %d numbers, want %d to %d", ErrTerms, len(words), leastNumbers, mostNumbers)
	}
	var numbers [mostNumbers]int64
	for i, word := range words {
		n, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			return Terms{}, fmt.Errorf("%w: number %d is %q", ErrTerms, i+1, word)
		}
		numbers[i] = n
	}
	return TermsOf(numbers[:len(words)])
}

// TermsOf is like DecodeTerms, but takes the numbers that DecodeTerms reads from a text.
func TermsOf(numbers []int64) (Terms, error) {
	if len(numbers) < leastNumbers || len(numbers) > mostNumbers {
		return Terms{}, fmt.Errorf("%w: %d numbers, want %d to %d", ErrTerms, len(numbers), leastNumbers, mostNumbers)
	}
	for i, n := range numbers {
		if n < 0 {
			return Terms{}, fmt.Errorf("%w: number %d is %d", ErrTerms, i+1, n)
		}
	}
	var n [mostNumbers]int64
	copy(n[:], numbers)
	t := Terms{
		Fence: Fence{n[0], n[14]}, Template: n[1] == KindTemplate || n[1] == KindBudget, Pool: n[1] == KindPool,
		Capacity: n[2], Tokens: n[3], Per: n[4], Interval: n[5], Initial: n[2] - n[6],
		OnLoss: Loss(n[7]), OnRollback: Rollback(n[8]), CarryOver: CarryOver(n[9]), Degraded: Degraded(n[10] % shadowed),
		Shadow: n[10]%divided >= shadowed, Divided: n[10] >= divided,
		Strict: n[11] == 1, GrantTokens: n[15], GrantEnd: n[16], GrantEra: n[17],
	}
	if t.Pool {
		t.Version = n[0]
		t.PoolsVersion = n[12]
		t.Fence.Epoch = n[13]
	}
	stepped := n[1] == KindStepped || n[1] == KindBudget
	switch {
	case n[1] > KindBudget, n[10] >= 2*divided, n[11] > 1, t.OnLoss > LossFull, t.OnRollback > RollbackKeep,
		t.CarryOver > CarryReset, t.Degraded > DegradedLocal,
		!t.Pool && (n[12] > 0 || n[13] > 0):
		return Terms{}, fmt.Errorf("%w: an unknown kind or choice in %d", ErrTerms, numbers)
	case t.Capacity < 1, t.Interval < 1, t.Per < 1, t.Initial < 0, stepped && t.Tokens < 1:
		return Terms{}, fmt.Errorf("%w: a capacity, interval, time or step of 0 in %d", ErrTerms, numbers)
	}
	if stepped {
		t.Kind = Stepped
	} else {
		t.MaxElapsed = MaxElapsed(t.Capacity, t.Tokens, t.Per, t.Interval)
	}
	return t, nil
}

// Granted reports whether the grant is in force in an era at an instant of the
// bucket's Redis clock, in Unix microseconds.
func (t Terms) Granted(era, now int64) bool {
	return t.GrantEra != 0 && t.GrantEra == era && now < t.GrantEnd
}

// Due returns the credit of smooth terms in an era for the time between two instants, in Unix microseconds. The credit
// is a number of whole tokens, and the carry after them.
func (t *Terms) Due(era, last, carry, now int64) (tokens, rest int64) {
	elapsed := min(max(0, now-last), t.MaxElapsed)
	granted := int64(0)
	if t.GrantEra == era {
		granted = min(elapsed, max(0, t.GrantEnd-(now-elapsed)))
	}
	units := (elapsed-granted)*t.Tokens + granted*t.GrantTokens + carry
	return units / t.Per, units % t.Per
}

// Rate returns the smooth rate of the terms without a grant; zero if stepped.
func (t Terms) Rate() Rate {
	if t.Kind != Smooth {
		return Rate{}
	}
	return Rate{Tokens: t.Tokens, Per: time.Duration(t.Per) * time.Microsecond}
}
