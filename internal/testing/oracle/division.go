package oracle

import (
	"maps"
	"math"
	"slices"

	"github.com/tokenrefill/refiller/policy"
)

// Division says how a bucket is divided among its flows. It has the plan that a refiller wrote last, and the demand of
// the flows since then. Only the right to take tokens is divided: all tokens stay in the bucket.
type Division struct {
	Version  policy.Version // version of the bucket that the refill with the plan wrote
	Clock    int64          // µs; it advances with time, but more slowly while the bucket has few tokens
	At       int64          // when the clock was last advanced, Unix µs
	Floor    int64          // number of tokens that a flow without a right leaves in the bucket
	Unlisted int64          // tokens per period that an unlisted flow may take as if it had a right
	Most     int64          // number of entries of Asked and Denied from which on new names are counted by team
	Span     int64          // µs of the clock: the longest time for which a flow saves its right
	Since    int64          // when the period of Asked began, Unix µs; 0 if nothing is counted
	Ends     int64          // when the plan ends, Unix µs

	Teams map[string]*TeamPart // policy.RootTeam, the teams of listed flows, and the teams with a rest
	Parts map[string]*Part     // listed flows
	// Asked has the number of tokens that each flow asked for in this period, and Denied the number that was denied.
	// If there are too many flows, some are counted under the name of their team.
	Asked, Denied map[string]int64
}

// Part is the part of a listed flow in a bucket. The flow has a right to the time of the clock since Used. A token
// costs the Price of the flow's team, divided by Weight.
type Part struct {
	Used   int64 // µs of the clock
	Weight int64
}

// TeamPart has the common numbers of all flows of a team.
type TeamPart struct {
	Price float64 // µs of the clock that a token costs a flow of weight 1
	Rest  float64 // µs of the clock that a token costs the rest, the common right of unlisted flows; 0: no rest
	Used  int64   // µs of the clock up to which the rest is used, as in a Part
}

const (
	leastSaved        = 5    // a flow may save the right to at least so many tokens
	takesSaved        = 4    // a flow may save the right to at least so many takes of the present size
	overdueDivisor    = 20   // a denied caller of an overdue plan waits for an interval divided by this
	upToDivisor       = 10   // a flow with any right gets the floor divided by this from a take of up to some tokens
	teamEntriesFactor = 1.1  // teams that the plan doesn't have are counted up to Most times this many entries
	fullAbove         = 1.25 // the clock has full speed while the bucket has at least the floor divided by this
)

// right is the right of a flow or a rest to take tokens.
type right struct {
	used  *int64  // Used of the Part or TeamPart; nil if there is no right
	left  int64   // µs of the clock that may be spent
	price float64 // µs of the clock that a token costs
}

// rightOf returns the right with which a flow pays for n tokens. There is none if the flow isn't listed and none of its
// teams has a rest.
func (d *Division) rightOf(flow string, n int64) right {
	teams := policy.TeamsOf(flow)
	if p := d.Parts[flow]; p != nil {
		if t := d.Teams[teams[len(teams)-1]]; t != nil {
			return d.saved(&p.Used, t.Price/float64(p.Weight), n)
		}
	}
	for i := len(teams) - 1; i > 0; i-- {
		if t := d.Teams[teams[i]]; t != nil && t.Rest > 0 {
			return d.saved(&t.Used, t.Rest, n)
		}
	}
	return right{}
}

// saved returns the right for a take of n tokens, given the time of the clock up to which the right was used.
func (d *Division) saved(used *int64, price float64, n int64) right {
	return right{used: used, left: min(d.Clock-*used, saving(d.Span, price, n)), price: price}
}

// saving returns how many µs of the clock may be saved at a price, for a take of n tokens.
func saving(span int64, price float64, n int64) int64 {
	return max(span, int64(math.Ceil(float64(max(leastSaved, takesSaved*n))*price)))
}

// pay spends the price of n tokens.
func (d *Division) pay(r *right, n int64) {
	r.left -= int64(math.Floor(float64(float64(n)*r.price) + 0.5))
	*r.used = d.Clock - r.left
}

// count adds n tokens to the demand of a flow in this period. It returns the name under which they are counted, and the
// demand of that name.
func (d *Division) count(flow string, n int64) (string, int64) {
	if d.Since == 0 {
		return "", n
	}
	name := d.counted(flow)
	if d.Asked == nil {
		d.Asked = map[string]int64{}
	}
	d.Asked[name] += n
	return name, d.Asked[name]
}

// counted returns the name under which a flow is counted: its own name, or a team's name if there are too many names.
func (d *Division) counted(flow string) string {
	if d.Asked[flow] > 0 || d.Parts[flow] != nil || d.entriesBeside(flow) < d.Most {
		return flow
	}
	teams := policy.TeamsOf(flow)
	slices.Reverse(teams)
	for _, team := range teams {
		others := float64(d.entriesBeside(team))
		if d.Asked[team] > 0 || d.Teams[team] != nil || others+1 <= teamEntriesFactor*float64(d.Most) {
			return team
		}
	}
	return policy.RootTeam
}

// entriesBeside returns the number of entries of Asked and Denied. It first drops the entry of name in Asked if that
// has no demand.
func (d *Division) entriesBeside(name string) int64 {
	if d.Asked[name] == 0 {
		delete(d.Asked, name)
	}
	return int64(len(d.Asked) + len(d.Denied))
}

// deny counts denied tokens of a flow.
func (d *Division) deny(name string, n int64) {
	if d == nil || d.Since == 0 {
		return
	}
	if d.Denied == nil {
		d.Denied = map[string]int64{}
	}
	d.Denied[name] += n
}

// FlowTaking is the result of a run of takes of a flow.
type FlowTaking struct {
	policy.RunTaking
	Paid int64 // number of tokens, the first ones, for which the flow paid with its right
}

// Divided takes runs of tokens, one after the other, from a bucket that is divided. If inLine is set, a take that
// doesn't fit ends the takes of its flow. If d is nil or its plan has ended, the bucket is undivided.
func Divided(b *policy.Bucket, d *Division, runs []policy.FlowRun, inLine bool, now int64) []FlowTaking {
	taken := make([]FlowTaking, len(runs))
	names := make([]string, len(runs))
	closed := map[string]bool{}
	if d != nil && now >= d.Ends {
		d = nil
	}
	for i, run := range runs {
		if d == nil {
			taken[i].Taken = inOrder(b, run.Run, closed[run.Flow])
		} else {
			names[i], taken[i].Taken, taken[i].Paid = byRight(b, d, run, closed[run.Flow])
		}
		closed[run.Flow] = closed[run.Flow] || inLine && taken[i].Taken < run.Count
	}
	for i, run := range runs {
		if taken[i].Taken < run.Count {
			d.deny(names[i], (run.Count-taken[i].Taken)*run.N)
			taken[i].Wait = dividedWait(b, d, run, now)
		}
	}
	return taken
}

// inOrder takes a run of tokens of an undivided bucket.
func inOrder(b *policy.Bucket, run policy.Run, closed bool) int64 {
	if closed {
		return 0
	}
	fit := fits(run.Count, run.N, tokensOf(b)-leastOf(b, run.Leave))
	add(b, -fit*run.N)
	return fit
}

// fits returns how many of count takes of n tokens each can be made from a number of tokens.
func fits(count, n, tokens int64) int64 { return min(count, max(0, tokens)/n) }

// byRight counts and takes a run of tokens for a flow. While the flow has a right, or has asked for little in this
// period, it may take all tokens of the bucket. After that it takes only tokens above the floor. byRight returns the
// name under which the run was counted, the number of takes made, and the number of tokens that the flow paid for.
func byRight(b *policy.Bucket, d *Division, run policy.FlowRun, closed bool) (name string, taken, paid int64) {
	name, asked := d.count(run.Flow, run.N*run.Count)
	if closed {
		return name, 0, 0
	}
	taken, paid = served(b, d, run, asked-run.N*run.Count)
	return name, taken, paid
}

// served takes a run of tokens for a flow. before is the number of tokens that the flow has asked for in this period
// before the run. served returns the number of takes made, and the number of tokens that the flow paid for.
func served(b *policy.Bucket, d *Division, run policy.FlowRun, before int64) (taken, paid int64) {
	keep := leastOf(b, run.Leave)
	r := d.rightOf(run.Flow, d.sizeOf(run.Run))
	first := int64(0)
	switch {
	case r.used != nil && r.left > 0:
		first = fits(min(run.Count, d.lasts(&r, run.Run)), run.N, tokensOf(b)-keep)
		if first > 0 {
			d.pay(&r, first*run.N)
			paid = first * run.N
		}
	case r.used == nil:
		first = fits(d.spared(before, run.Run), run.N, tokensOf(b)-keep)
	}
	add(b, -first*run.N)
	above := fits(run.Count-first, run.N, tokensOf(b)-max(keep, d.Floor))
	add(b, -above*run.N)
	return first + above, paid
}

// Lend adds up to want tokens to the block of a flow. The added tokens count as demand of the flow. The second result
// is the number of tokens that the flow paid for.
func Lend(b *policy.Bucket, d *Division, flow string, want int64) (granted, paid int64) {
	want = min(want, max(0, tokensOf(b))/2)
	if d == nil || want == 0 {
		add(b, -want)
		return want, 0
	}
	run := policy.FlowRun{Flow: flow, Run: policy.Run{N: 1, Count: want, UpTo: true}}
	_, before := d.count(flow, 0)
	granted, paid = served(b, d, run, before)
	d.count(flow, granted)
	return granted, paid
}

// Refuse counts a take of n tokens as denied. The bucket may have the tokens, but another bucket of the same call lacks
// them.
func (d *Division) Refuse(flow string, n int64) {
	name, _ := d.count(flow, n)
	d.deny(name, n)
}

// PayBack gives a flow back the right to n tokens, but not more than the flow may save.
func (d *Division) PayBack(flow string, n int64) {
	r := d.rightOf(flow, 0)
	if r.used == nil {
		return
	}
	left := d.Clock - *r.used
	most := saving(d.Span, r.price, n)
	if left < most {
		*r.used = d.Clock - min(most, left+int64(math.Floor(float64(float64(n)*r.price)+0.5)))
	}
}

// Charge counts n tokens as demand of a flow, and makes the flow pay for them. The tokens were taken without a check of
// the flow's right.
func (d *Division) Charge(flow string, n int64) {
	d.count(flow, n)
	if r := d.rightOf(flow, n); r.used != nil {
		d.pay(&r, n)
	}
}

// sizeOf returns the number of tokens of a take, for which a flow may save its right. For a take of up to some tokens,
// it is the number that the flow gets at least.
func (d *Division) sizeOf(run policy.Run) int64 {
	if run.UpTo {
		return min(run.Count, max(1, d.Floor/upToDivisor))
	}
	return run.N
}

// lasts returns the number of takes of a run for which a right suffices. r.left must be above zero. The last of these
// takes may cost more than is left.
func (d *Division) lasts(r *right, run policy.Run) int64 {
	each := float64(float64(run.N) * r.price)
	if run.UpTo {
		return max(d.sizeOf(run), int64(math.Floor(float64(r.left)/r.price)))
	}
	return int64(math.Ceil(float64(r.left) / each))
}

// spared returns the number of takes of a run that an unlisted flow makes as if it had a right. These are the takes
// within Unlisted. The flow's first take of the period is always among them if it is for at most half of the floor.
// before is the number of tokens that the flow has asked for in this period before the run.
func (d *Division) spared(before int64, run policy.Run) int64 {
	spared := fits(run.Count, run.N, d.Unlisted-before)
	if before == 0 && spared == 0 && run.N <= d.Floor/2 {
		return 1
	}
	return spared
}

// dividedWait returns the time until a take of a run fits, if no other flow takes tokens meanwhile. A take fits once
// the bucket has that many tokens above the floor. If the flow has a right, the floor doesn't matter.
func dividedWait(b *policy.Bucket, d *Division, run policy.FlowRun, now int64) int64 {
	n := run.N + leastOf(b, run.Leave)
	if d == nil {
		return b.Wait(n, now)
	}
	above := b.Wait(run.N+max(leastOf(b, run.Leave), d.Floor), now)
	within := b.Wait(n, now)
	if within < 0 {
		return within
	}
	s := b.Control
	earned := int64(0) // refills until the flow has a right
	if r := d.rightOf(run.Flow, d.sizeOf(run.Run)); r.used != nil && r.left <= 0 {
		earned = (-r.left)/s.Terms.Interval + 1
	} else if r.used == nil && within == 0 {
		earned = 1
	}
	if earned > 0 {
		due := d.At + earned*s.Terms.Interval - now
		if due < 1 {
			due = s.Terms.Interval / overdueDivisor
		}
		within = max(within, due)
	}
	if above >= 0 && above < within {
		return above
	}
	return within
}

// Advance advances the clock of a division to now. tokens is the number of tokens in the bucket. If these are fewer
// than most of the floor, the clock runs more slowly. Otherwise the flows would get rights to more tokens than the
// bucket has.
func (d *Division) Advance(tokens, now int64) {
	full := 1.0
	if tokens < d.Floor {
		full = min(1, float64(max(0, tokens))*fullAbove/float64(d.Floor))
	}
	d.Clock += int64(math.Floor(float64(max(0, now-d.At)) * full * full))
	d.At = now
}

// Apply writes a plan into the division of a bucket, and returns the division and the demand of the flows. d is nil if
// the bucket isn't divided yet. tokens is the number of tokens in the bucket.
//
// Apply reports false and writes nothing in two cases. In the first, the division has the plan of the same or of a
// later refill. In the second, p isn't whole but changes the plan of version base, and the division doesn't have that
// plan.
func (d *Division) Apply(p policy.Plan, base policy.Version, tokens, now int64) (*Division, policy.Use, bool) {
	if d != nil && now >= d.Ends {
		d = nil
	}
	if d != nil && !d.Version.Before(p.Version) || !p.Whole && (d == nil || d.Version != base) {
		return d, policy.Use{}, false
	}
	if d == nil {
		d = &Division{Clock: now, At: now}
	}
	d.Version = p.Version
	d.Advance(tokens, now)
	d.Ends = now + p.Lasts
	if !p.Kept || d.Teams == nil {
		d.Floor = p.Floor
		d.Unlisted = p.Unlisted
		d.Most = p.Most
		d.Span = p.Span
		d.putTeams(p)
		d.putFlows(p)
	}
	use := policy.Use{}
	if p.Read || d.Since == 0 {
		if d.Since > 0 {
			use = policy.Use{Asked: d.Asked, Denied: d.Denied, Covered: now - d.Since}
		}
		d.Asked = nil
		d.Denied = nil
		d.Since = now
	}
	return d, use, true
}

// putTeams writes the teams of a plan. A rest that the team had before keeps its used time. A new rest begins with all
// the time that it may save.
func (d *Division) putTeams(p policy.Plan) {
	before := d.Teams
	d.Teams = map[string]*TeamPart{}
	if !p.Whole {
		maps.Copy(d.Teams, before)
	}
	for _, name := range p.Dropped {
		delete(d.Teams, name)
	}
	for _, t := range p.Teams {
		part := &TeamPart{Price: t.Price, Rest: t.Rest}
		if t.Rest > 0 {
			part.Used = d.Clock - saving(d.Span, t.Rest, 0)
			if old := before[t.Name]; old != nil && old.Rest > 0 {
				part.Used = max(old.Used, part.Used)
			}
		}
		d.Teams[t.Name] = part
	}
}

// putFlows writes the listed flows of a plan. A flow that was listed before keeps its used time. A new flow begins with
// the right to a part of the floor, less the tokens that it has taken.
func (d *Division) putFlows(p policy.Plan) {
	before := d.Parts
	if p.Whole || d.Parts == nil {
		d.Parts = map[string]*Part{}
	}
	for _, name := range p.Dropped {
		delete(d.Parts, name)
	}
	for _, f := range p.Listed {
		if old := before[f.Name]; old != nil && p.Whole {
			d.Parts[f.Name] = &Part{Used: old.Used, Weight: f.Weight}
			continue
		}
		teams := policy.TeamsOf(f.Name)
		price := d.Teams[teams[len(teams)-1]].Price / float64(f.Weight)
		begins := float64(float64(max(leastSaved, d.Floor/upToDivisor)-f.Took) * price)
		d.Parts[f.Name] = &Part{Used: d.Clock - int64(math.Floor(begins+0.5)), Weight: f.Weight}
	}
}
