package verify

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// span is a number of tokens that were moved at some time between from and to.
type span struct {
	from, to int64
	n        float64
}

// giveBack is the time within which the SDK certainly has returned the tokens of an abandoned take.
const giveBack = 3 * time.Second

// checkWindow checks the number of tokens that were taken in every window [s, t]:
//
//	taken(s, t) ≤ C + G(t) − G(s) + late(s) + 1 + returned(s, t) + fault slack
//
// The terms are:
//   - taken are the tokens that were certainly taken in the window. A take counts if its call was made at or after s,
//     and its answer came by t.
//   - C is the capacity.
//   - G is the number of tokens that have fallen due: R a second, and the tokens of each scheduled instant.
//   - late(s) are the tokens that fell due before s and may have been credited after s. They are R·min(τ(s), e), and
//     the tokens of instants that were not credited yet. τ(s) is the gap between the refills around s: a refill can't
//     know that the bucket was full until a moment ago. e is the longest time that a refill credits.
//   - returned are the tokens that were perhaps added in the window.
//
// So a slow or an unknown reply never makes a violation.
func (h *bucketHistory) checkWindow(r *Result) {
	capacity, rate, e := h.limits()
	if !h.bucket.Strict() {
		capacity += float64(h.bucket.Blocks) // consumers may hold so many in leases when the window begins
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
		taken := worst + due(s) // taken tokens, less the tokens that fell due in the window
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

// moves returns the tokens that were certainly taken, and the tokens that may have been added.
func (h *bucketHistory) moves() (takes, adds []span) {
	for _, op := range h.counted() {
		if op.Taken > 0 { // for a settlement, these are the tokens used beyond the reservation
			takes = append(takes, span{op.Call, op.Return, float64(op.Taken)})
		}
		switch {
		case op.Kind == record.Add:
			// These replace a refill: see the package's README. The client increments the index, so no replica credits the
			// same time.
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
			// The SDK returns the tokens of a take if the caller has given up.
			adds = append(adds, span{op.Call, op.Return + int64(giveBack), float64(op.N)})
		}
	}
	return takes, adds
}

// counted returns the operations. It merges the operations with one request id: only one of them took the tokens.
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

// gapAt returns the time between the refills around an instant, in seconds.
func (h *bucketHistory) gapAt(s int64) float64 {
	gap := int64(0) // µs
	for i, w := range h.writes {
		elapsed := int64(0)
		if w.outcome != nil {
			elapsed = w.outcome.Elapsed
		}
		// A write between these two may be missing, because the record doesn't have the answers to a pool's agent, or because
		// an answer was lost. That write may have credited all of the time between them.
		if i > 0 && (w.outcome == nil || w.version.Index > h.writes[i-1].version.Index+1) {
			elapsed = max(elapsed, w.now-h.writes[i-1].now)
		}
		if w.from-elapsed*1000 <= s && s <= w.to {
			gap = max(gap, elapsed)
		}
	}
	return float64(gap) / 1e6
}

// faultSlack returns the tokens that each fault may add, by the formulas that the protocol states.
func (h *bucketHistory) faultSlack(rate, e float64) []span {
	var slack []span
	capacity, _, _ := h.limits()
	templated := h.bucket.Kind == record.Refilled || h.bucket.Kind == record.Lazy
	for _, f := range h.faults {
		switch f.Effect {
		case record.Clock:
			if f.Jump > 0 { // the jump is credited like time
				slack = append(slack, span{f.Start, f.End + int64(h.run.Meta.Resume), h.credited(f.Jump, rate, e)})
			}
			if templated && f.Jump > 0 { // the bucket's key expires, and the next take creates the bucket again
				slack = append(slack, span{f.Start, math.MaxInt64, capacity})
			}
		case record.Rollback: // at most the tokens of the takes that the server forgot
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
		// A lost bucket is created with its initial tokens if the caller doesn't remember the bucket. This is allowed only
		// if no caller that remembered it made a call later.
		if o := w.outcome; o != nil && o.Status == policy.StatusInitialised && w.call.Version.Era == 0 &&
			!h.rememberedAfter(w) {
			slack = append(slack, span{w.from, w.to, float64(o.Tokens)})
		}
	}
	return slack
}

// credited returns the largest number of tokens that a forward jump of the clock brings.
func (h *bucketHistory) credited(jump time.Duration, rate, e float64) float64 {
	capacity, _, _ := h.limits()
	if h.bucket.Kind == record.Lazy {
		return min(rate*jump.Seconds(), capacity)
	}
	n := 0.0
	for fence := range h.steps { // all credited instants count, because consumers take between the credits
		t := h.policies[fence]
		n = max(n, float64((t.Capacity+t.Tokens-1)/t.Tokens*t.Tokens))
	}
	return n + rate*min(jump.Seconds(), e)
}

// rememberedAfter reports whether a caller that remembered the lost bucket made a call after write w created the
// bucket. Calls without a policy don't count, because they can't create a bucket.
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

// maxTree is a segment tree of numbers. It can add to all numbers of a range, and find the largest number of a range.
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

// max returns the largest of the numbers from, ..., to−1, and its position.
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
