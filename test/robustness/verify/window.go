package verify

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// span is a number of tokens and when they were moved: somewhere between from and to.
type span struct {
	from, to int64
	n        float64
}

// giveBack is when the SDK has given back what an abandoned take got, with time to spare.
const giveBack = 3 * time.Second

// checkWindow bounds the tokens taken in every window [s, t]:
//
//	taken in it for certain ≤ C + G(t) − G(s) + late(s) + 1 + returned in it perhaps + fault slack
//
// G is what falls due: R a second, and the tokens of each scheduled instant. late(s) is what fell due before s and may
// have been credited after: R·min(τ(s), e), with τ(s) the gap between refills that s falls into, since a refill cannot
// know that the bucket was full until a moment ago, and the instants that had not been credited.
//
// A take counts if it was called at or after s and answered by t. Tokens that are added count if they may have been
// added in the window. So a slow reply never makes a violation, and an unknown one never hides that others are too
// many.
func (h *bucketHistory) checkWindow(r *Result) {
	capacity, rate, e := h.limits()
	if !h.bucket.Strict() {
		capacity += float64(h.bucket.Blocks) // what consumers held in leases when the window began
	}
	takes, adds := h.moves()
	adds = append(adds, h.faultSlack(rate, e)...)
	if len(takes) == 0 {
		return
	}
	ends := make([]int64, len(takes)) // the candidates for t
	for i, t := range takes {
		ends[i] = t.to
	}
	slices.Sort(ends)
	ends = slices.Compact(ends)
	instants := h.crossings(ends[0]-int64(time.Minute), ends[len(ends)-1])
	due := func(at int64) float64 { // G
		n := rate * float64(at-ends[0]) / float64(time.Second)
		for _, c := range instants {
			if c.at <= at {
				n += c.n
			}
		}
		return n
	}
	tree := newMaxTree(len(ends))
	for i, t := range ends {
		tree.add(i, i+1, -due(t))
	}
	position := func(at int64) int {
		i, _ := slices.BinarySearch(ends, at)
		return i
	}

	slices.SortFunc(takes, func(a, b span) int { return cmp.Compare(b.from, a.from) })
	slices.SortFunc(adds, func(a, b span) int { return cmp.Compare(b.to, a.to) })
	next := 0
	for i, take := range takes { // s moves from the last call to the first
		s := take.from
		tree.add(position(take.to), len(ends), take.n)
		for ; next < len(adds) && adds[next].to >= s; next++ {
			tree.add(position(adds[next].from), len(ends), -adds[next].n)
		}
		if i+1 < len(takes) && takes[i+1].from == s {
			continue
		}
		worst, at := tree.max(position(s), len(ends))
		taken := worst + due(s) // less what fell due in the window
		late := rate*min(h.gapAt(s), e) + h.uncredited(instants, s)
		allowed := capacity + late + 1
		r.Slack = max(r.Slack, taken/allowed)
		if taken > allowed {
			r.violate(Window, h.bucket.Key,
				"in %s from %s: %.1f tokens beyond what fell due were taken; %.1f are allowed (capacity %.0f, due before %.1f)",
				time.Duration(ends[at]-s), time.Unix(0, s).UTC().Format(time.RFC3339Nano), taken, allowed, capacity,
				late)
		}
	}
}

// moves are the tokens that were taken for certain, and those that may have come back.
func (h *bucketHistory) moves() (takes, adds []span) {
	for _, op := range h.counted() {
		if op.Taken > 0 { // of a settlement, what was used beyond the reservation
			takes = append(takes, span{op.Call, op.Return, float64(op.Taken)})
		}
		switch {
		case op.Kind == record.Add:
			// By the index no other client adds for that time: see the package's README.
		case op.Kind == record.Lapse:
			adds = append(adds, span{op.Call, math.MaxInt64, float64(op.N)})
		case op.Kind == record.Return || op.Kind == record.Settle || op.Kind == record.Grant || op.Kind == record.Reset:
			back := span{op.Call, op.Return, float64(op.N - op.Clamped)}
			if op.Result == record.Unknown {
				back.to = math.MaxInt64
			}
			if op.Result == record.Done || op.Result == record.Unknown {
				adds = append(adds, back)
			}
		case op.Result == record.Unknown && !h.bucket.Linear:
			// The SDK returns the tokens of a take without a waiting caller.
			adds = append(adds, span{op.Call, op.Return + int64(giveBack), float64(op.N)})
		}
	}
	return takes, adds
}

// counted are the operations, those of one request id as one: its tokens were taken at one of them.
func (h *bucketHistory) counted() (ops []record.Op) {
	first := map[string]int{}
	for _, op := range h.ops {
		i, again := first[op.Request]
		switch {
		case op.Request == "":
			ops = append(ops, op)
		case !again:
			first[op.Request] = len(ops)
			ops = append(ops, op)
		case ops[i].Taken == 0 && op.Taken > 0:
			ops[i].Taken = op.Taken
			ops[i].Return = op.Return
			ops[i].Result = op.Result
		}
	}
	return ops
}

// gapAt is the time between the refills around an instant, in seconds.
func (h *bucketHistory) gapAt(s int64) float64 {
	gap := int64(0) // µs
	for i, w := range h.writes {
		elapsed := int64(0)
		if w.outcome != nil {
			elapsed = w.outcome.Elapsed
		}
		// The answer to a pool's agent is in no record, and some were lost: the writes between these two may have been
		// one that credited all of the time between.
		if i > 0 && (w.outcome == nil || w.version.Index > h.writes[i-1].version.Index+1) {
			elapsed = max(elapsed, w.now-h.writes[i-1].now)
		}
		if w.from-elapsed*1000 <= s && s <= w.to {
			gap = max(gap, elapsed)
		}
	}
	return float64(gap) / 1e6
}

// faultSlack is what each fault may add, by the formula that the protocol states for it.
func (h *bucketHistory) faultSlack(rate, e float64) []span {
	var slack []span
	capacity, _, _ := h.limits()
	templated := h.bucket.Kind == record.Refilled || h.bucket.Kind == record.Lazy
	for _, f := range h.faults {
		switch f.Effect {
		case record.Clock:
			if f.Jump > 0 { // the jump is credited as if it were time, up to the cap; instants, one a call
				slack = append(slack, span{f.Start, f.End + int64(h.run.Meta.Resume), h.credited(f.Jump, rate, e)})
			}
			if templated && f.Jump > 0 { // its time is over, and it is created again
				slack = append(slack, span{f.Start, math.MaxInt64, capacity})
			}
		case record.Rollback: // only what was taken and is forgotten
			forgotten := 0.0
			for _, op := range h.ops {
				if op.Kind != record.Return && op.Return >= f.Start && op.Call <= f.End {
					if op.Result == record.Unknown {
						forgotten += float64(op.N)
					}
					forgotten += float64(op.Taken)
				}
			}
			slack = append(slack, span{f.Start, f.End, min(forgotten, capacity)})
		case record.Lose:
			if t := h.anyPolicy(); t.OnLoss == policy.LossFull || templated {
				slack = append(slack, span{f.Start, math.MaxInt64, capacity})
			}
		}
	}
	if templated {
		return slack
	}
	for _, w := range h.writes[min(1, len(h.writes)):] {
		// A bucket that was lost is new again, with its initial tokens, if every caller is: no caller that remembered it
		// called later.
		if o := w.outcome; o != nil && o.Status == policy.StatusInitialised && w.call.Version.Era == 0 &&
			!h.rememberedAfter(w) {
			slack = append(slack, span{w.from, w.to, float64(o.Tokens)})
		}
	}
	return slack
}

// credited is what a clock that jumps forward brings at most.
func (h *bucketHistory) credited(jump time.Duration, rate, e float64) float64 {
	capacity, _, _ := h.limits()
	if h.bucket.Kind == record.Lazy {
		return min(rate*jump.Seconds(), capacity)
	}
	n := 0.0
	for fence := range h.steps { // as many instants as fill the bucket, of which consumers take between the credits
		t := h.policies[fence]
		n = max(n, float64((t.Capacity+t.Tokens-1)/t.Tokens*t.Tokens))
	}
	return n + rate*min(jump.Seconds(), e)
}

// rememberedAfter reports whether a caller that had known the bucket before came after it was created as a new one. One
// whose configuration is older than the bucket's was brings no policy, and creates nothing.
func (h *bucketHistory) rememberedAfter(w write) bool {
	for _, f := range h.refills {
		if f.Era > 0 && f.Terms != "" && f.Era < w.version.Era && f.Sent > w.from {
			return true
		}
	}
	return false
}

func (h *bucketHistory) anyPolicy() policy.Terms {
	for _, t := range h.policies {
		return t
	}
	return policy.Terms{}
}

// maxTree holds numbers to which ranges can add, and knows the largest of a range.
type maxTree struct {
	n         int
	most, lag []float64
	at        []int
}

func newMaxTree(n int) *maxTree {
	size := 1
	for size < n {
		size *= 2
	}
	t := &maxTree{n: size, most: make([]float64, 2*size), lag: make([]float64, 2*size), at: make([]int, 2*size)}
	for i := range size {
		t.at[size+i] = i
	}
	for i := size - 1; i > 0; i-- {
		t.at[i] = t.at[2*i]
	}
	return t
}

// add adds v to the numbers from, ..., to−1.
func (t *maxTree) add(from, to int, v float64) {
	if from < to {
		t.addIn(1, 0, t.n, from, to, v)
	}
}

func (t *maxTree) addIn(node, lo, hi, from, to int, v float64) {
	if to <= lo || hi <= from {
		return
	}
	if from <= lo && hi <= to {
		t.most[node] += v
		t.lag[node] += v
		return
	}
	mid := (lo + hi) / 2
	t.addIn(2*node, lo, mid, from, to, v)
	t.addIn(2*node+1, mid, hi, from, to, v)
	best := 2 * node
	if t.most[best+1] > t.most[best] {
		best++
	}
	t.most[node], t.at[node] = t.most[best]+t.lag[node], t.at[best]
}

// max is the largest of the numbers from, ..., to−1, and where it is.
func (t *maxTree) max(from, to int) (float64, int) { return t.maxIn(1, 0, t.n, from, to) }

func (t *maxTree) maxIn(node, lo, hi, from, to int) (float64, int) {
	if to <= lo || hi <= from {
		return math.Inf(-1), 0
	}
	if from <= lo && hi <= to {
		return t.most[node], t.at[node]
	}
	mid := (lo + hi) / 2
	best, at := t.maxIn(2*node, lo, mid, from, to)
	if other, where := t.maxIn(2*node+1, mid, hi, from, to); other > best {
		best, at = other, where
	}
	return best + t.lag[node], at
}
