package election

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// account records what happened to one bucket, and which promises were broken for it.
type account struct {
	key      string
	prefix   string          // of the template that it belongs to; empty for a configured bucket
	foreign  bool            // programs with plain commands use it too
	policies []policy.Policy // by version of the configuration

	redis      *fakeRedis
	writes     []write
	takes      []taken
	faults     []error
	slack      float64                 // tokens that faults may add to the bound
	minted     int                     // creations with initial tokens
	written    map[policy.Version]bool // versions that the server has written and not forgotten
	instants   map[int64]bool          // instants that were credited
	forgotten  map[int64]bool          // credited instants that the server forgot; no replica has detected that yet
	putBack    bool                    // the clock was put back
	ahead      time.Duration           // when the last instant began to be over three periods ahead; 0 if it isn't
	forgot     bool                    // the server forgot something
	whole      int64                   // tokens that the next refill must restore, less sinceWhole; 0 for none
	sinceWhole int64                   // tokens taken since whole was set
	reserved   int
	allowed    time.Duration // when the last fault that forbids access to the bucket ended, since the start
}

// write is a refill that changed its bucket.
type write struct {
	at      time.Duration // since the start
	from    time.Duration // the next refill credits the time since then
	by      string
	outcome policy.Outcome
}

type taken struct {
	at time.Duration
	n  int64
}

const interval = 100 * time.Millisecond

// allAccounts returns an account for each bucket that a schedule may have.
func allAccounts() []*account {
	steps := func(every time.Duration, tokens int64, capacity int64) policy.Policy {
		return policy.Policy{Capacity: capacity, Steps: policy.Every(every), StepTokens: tokens, Interval: interval}
	}
	rate := func(capacity int64, perSecond int64, change func(*policy.Policy)) policy.Policy {
		p := policy.Policy{Capacity: capacity, Rate: policy.PerSecond(perSecond), Interval: interval}
		if change != nil {
			change(&p)
		}
		return p
	}
	keep := func(p *policy.Policy) { p.OnRollback = policy.RollbackKeep }
	full := func(p *policy.Policy) { p.OnLoss = policy.LossFull }
	strict := func(p *policy.Policy) { p.Strict = true }
	return []*account{
		{key: "checkout", policies: []policy.Policy{rate(150, 497, nil), rate(100, 211, nil)}},
		{key: "stepped", policies: []policy.Policy{steps(300*time.Millisecond, 60, 150), steps(700*time.Millisecond,
			100, 150)}},
		{key: "changed", policies: []policy.Policy{rate(150, 300, nil), steps(500*time.Millisecond, 50, 150)}},
		{key: "kept", policies: []policy.Policy{rate(150, 397, keep), rate(100, 97, keep)}},
		{key: "whole", policies: []policy.Policy{rate(150, 97, full), rate(100, 53, full)}},
		{key: "strict", policies: []policy.Policy{rate(150, 497, strict), rate(100, 211, strict)}},
		{key: "foreign", foreign: true, policies: []policy.Policy{rate(150, 490, nil), rate(150, 490, nil)}},
		{key: "user:1", prefix: "user:", policies: []policy.Policy{rate(150, 497, nil), rate(100, 211, nil)}},
	}
}

func (a *account) terms(version int64) policy.Terms {
	t := a.policies[version].Terms(policy.Fence{Epoch: version})
	t.Template = a.prefix != ""
	return t
}

func (a *account) fault(format string, args ...any) {
	a.faults = append(a.faults, fmt.Errorf("%s: %s: %w", time.Since(a.redis.start), a.key, fmt.Errorf(format, args...)))
}

// took records n tokens that were taken. n is negative for tokens that were returned.
func (a *account) took(n int64) {
	a.takes = append(a.takes, taken{time.Since(a.redis.start), n})
	a.sinceWhole += max(0, n)
}

func (a *account) returned(n int64) {
	if n > 0 {
		a.took(-n)
	}
}

// lost records that the bucket was lost.
func (a *account) lost() {
	a.forgot, a.forgotten = true, nil
	if a.putBack { // an era may be repeated once the clock was put back
		a.written = nil
	}
	if t := a.terms(0); t.OnLoss == policy.LossFull || a.prefix != "" {
		a.slack += float64(t.Capacity)
	}
}

// stepped records that the clock stepped by jump.
func (a *account) stepped(jump time.Duration) {
	a.putBack = a.putBack || jump < 0
	if jump > 0 {
		if t := a.terms(0); t.Kind == policy.Smooth {
			a.slack += float64(min(jump.Microseconds(), t.MaxElapsed)) * float64(t.Tokens) / float64(t.Per)
		}
	}
}

// mark returns a function forget. forget records that the server forgot everything since the call of mark.
func (a *account) mark() (forget func()) {
	before, from := len(a.takes), time.Duration(0)
	if n := len(a.writes); n > 0 {
		from = a.writes[n-1].from
	}
	there := a.redis.buckets[a.key] != nil && a.redis.buckets[a.key].Control != nil
	credited := maps.Clone(a.instants)
	return func() {
		now := a.redis.now()
		// This entry separates the refills before the loss from the refills after it.
		a.writes = append(a.writes, write{at: time.Since(a.redis.start), from: from, outcome: policy.Outcome{Now: now,
			Last: now}})
		a.written = nil
		a.forgot = true
		a.whole = 0
		a.instants, a.forgotten = credited, a.instants
		for _, k := range a.takes[before:] {
			a.slack += math.Abs(float64(k.n)) // these takes and returns can happen a second time
		}
		if !there {
			a.slack += float64(a.terms(0).Capacity) // it is created again
		}
	}
}

// evict deletes the bucket's tokens and leaves the rest of its state.
func (a *account) evict(b *oracle.Bucket) {
	if b.Control == nil || b.Tokens == nil {
		return
	}
	b.Tokens = nil
	a.forgot = true
	if b.Control.Terms.OnLoss == policy.LossFull {
		a.slack += float64(b.Control.Terms.Capacity)
		a.whole, a.sinceWhole = b.Control.Terms.Capacity, 0
	}
}

// refilled records and judges a refill that changed its bucket. before is the bucket's state before the refill.
func (a *account) refilled(by string, call policy.Call, before, b *oracle.Bucket, o policy.Outcome) {
	a.writes = append(a.writes, write{time.Since(a.redis.start), time.Since(a.redis.start), by, o})
	if a.written[o.Version] {
		a.fault("%s wrote version %v a second time", by, o.Version)
	}
	if a.written == nil {
		a.written = map[policy.Version]bool{}
	}
	a.written[o.Version] = true
	if s := b.Control; s.Terms.Strict && o.Tokens > max(0, s.Terms.Capacity-s.Outstanding) {
		a.fault("%d tokens and %d outstanding exceed the capacity, %d", o.Tokens, s.Outstanding, s.Terms.Capacity)
	}
	least := min(a.whole, b.Control.Terms.Capacity)
	if o.Status != policy.StatusRolledBack && a.whole > 0 && o.Tokens+a.sinceWhole < least {
		a.fault("the tokens were lost, and of %d only %d were restored", least, o.Tokens+a.sinceWhole)
	}
	a.whole = 0
	if before.Control == nil {
		a.created(call, before, o)
		return
	}
	a.ordered(by, call, before, o)
	if o.Status == policy.StatusRolledBack {
		a.rolledBack(before, o)
	}
	a.credited(before.Control, call, o)
}

// created judges the creation of a bucket.
func (a *account) created(call policy.Call, before *oracle.Bucket, o policy.Outcome) {
	switch {
	case before.Tokens != nil || before.Index != nil: // adopted
	case call.Version.Era == 0:
		if o.Tokens > 0 {
			a.minted++
		}
	default:
		want := int64(0)
		if call.Terms.OnLoss == policy.LossFull {
			want = call.Terms.Capacity
		}
		if o.Tokens != want {
			a.fault("the lost bucket was created with %d tokens, want %d", o.Tokens, want)
		}
	}
}

// ordered judges whether the refill may replace the version and the policy that the bucket had before.
func (a *account) ordered(by string, call policy.Call, before *oracle.Bucket, o policy.Outcome) {
	s := before.Control
	knew, had := call.Version, policy.Version{Era: s.Era, Index: s.Index}
	if o.Fence.Before(s.Terms.Fence) {
		a.fault("%s wrote fence %v over the later fence %v", by, o.Fence, s.Terms.Fence)
	}
	newer := call.Terms != nil && s.Terms.Fence.Before(call.Terms.Fence)
	if o.Status == policy.StatusApplied && knew != had {
		a.fault("%s wrote index %v although it expected %v", by, o.Version, knew)
	}
	if knew.Before(had) && o.Status != policy.StatusClock && !newer {
		a.fault("%s expected %v and replaced the later version %v", by, knew, had)
	}
	if had.Before(knew) && o.Version.Era == had.Era {
		a.fault("%s expected %v, and the earlier version %v continued its era", by, knew, had)
	}
}

// rolledBack judges the begin of an era after the server forgot something.
func (a *account) rolledBack(before *oracle.Bucket, o policy.Outcome) {
	if !a.forgot {
		a.fault("era %d begins as after a rollback, but there was no rollback", o.Version.Era)
	}
	t := before.Control.Terms
	want := t.Capacity
	if t.OnRollback != policy.RollbackKeep { // the forgotten instants aren't credited again
		want = 0
		maps.Copy(a.instants, a.forgotten)
	}
	a.forgotten = nil
	if before.Tokens != nil && o.Tokens != min(*before.Tokens, want) && o.Fence == t.Fence {
		a.fault("a detected rollback left %d tokens, want %d", o.Tokens, min(*before.Tokens, want))
	}
}

// credited judges what a refill of a stepped bucket credited.
func (a *account) credited(before *policy.Control, c policy.Call, o policy.Outcome) {
	steps := a.policies[o.Fence.Epoch].Steps
	if steps == nil {
		return
	}
	next := after(steps, o.Now)
	period := max(next-after(steps, o.Now-1), after(steps, next)-next)
	knows := c.Terms != nil && c.Terms.Per == before.Terms.Per && c.Next > 0
	switch { // a bucket that has a schedule for the first time may not know its period yet
	case o.Step <= o.Now+3*period: // up to three periods ahead is not corrected: the clock soon reaches the instant
		a.ahead = 0
	case !knows: // a replica that doesn't know the schedule can't correct or credit anything
	case a.ahead == 0:
		a.ahead = time.Since(a.redis.start)
	case time.Since(a.redis.start)-a.ahead > 3*interval:
		a.fault("the last instant credited is %dµs ahead", o.Step-o.Now)
	}
	if o.Fence != before.Terms.Fence || o.Status != policy.StatusApplied && o.Status != policy.StatusSwitched {
		return
	}
	want := int64(0)
	if o.Step < before.Step && before.Step > o.Now+period {
		return // the last instant was put back
	}
	if o.Step != before.Step {
		want = before.Terms.Tokens
		if o.Step < before.Step || o.Step > o.Now || after(steps, o.Step-1) != o.Step {
			a.fault("the instant %d is followed by %d, which is in the future or no instant of %s", before.Step, o.Step, steps)
		}
		if a.instants[o.Step] && !a.putBack {
			a.fault("the instant %d is credited a second time", o.Step)
		}
		a.instants[o.Step] = true
	}
	if got := o.Added + o.Clamped; got != want {
		a.fault("%d tokens for the instants from %d to %d, want %d", got, before.Step, o.Step, want)
	}
}

func after(s policy.Steps, at int64) int64 { return s.Next(time.UnixMicro(at)).UnixMicro() }

// judge returns the promises that were broken. The first policy has the highest rate and capacity. calm is the time
// since the start after which no fault occurred.
func (a *account) judge(calm time.Duration) []error {
	faults := slices.Clone(a.faults)
	if a.minted > 1 {
		faults = append(faults, fmt.Errorf("%s was created with its initial tokens %d times", a.key, a.minted))
	}
	if a.terms(0).Kind == policy.Smooth && a.policies[1].Steps == nil {
		faults = append(faults, a.judgeWindows()...)
		if !a.foreign {
			faults = append(faults, a.judgeCredit()...)
		}
	}
	const bucketBackoff = 5 * time.Second // the longest back-off after a failure of a single bucket
	if gap := a.longest(calm); gap > 3*interval && (a.allowed == 0 || calm-a.allowed > bucketBackoff) {
		faults = append(faults, fmt.Errorf("%s: no refill for %s after the storm", a.key, gap))
	}
	if n := len(a.writes); n > 0 {
		o := a.writes[n-1].outcome
		if steps := a.policies[o.Fence.Epoch].Steps; steps != nil && after(steps,
			o.Step) < o.Now-3*interval.Microseconds() {
			faults = append(faults, fmt.Errorf("%s: the instant %d is not credited at %d", a.key, after(steps, o.Step),
				o.Now))
		}
	}
	return faults
}

// judgeWindows checks that the takes of every window are within the bound C + R·(t − s) + R·min(τ, e) + 1 + slack. A
// window begins just before one take and ends with another.
func (a *account) judgeWindows() []error {
	t := a.terms(0)
	rate := float64(t.Tokens) / float64(t.Per) // per µs
	slack := 1 + a.slack
	if a.foreign { // a foreign add that restores the index after a refill of ours may credit two intervals too much
		slack += 2 * rate * float64(t.Interval)
	}
	least := math.Inf(1)
	sum := 0.0
	i := 0
	last := time.Duration(0)
	for _, k := range a.takes {
		for ; i < len(a.writes) && a.writes[i].at < k.at; i++ {
			last = a.writes[i].from
		}
		gap := k.at - last
		if i < len(a.writes) {
			gap = a.writes[i].at - last
		}
		at := float64(k.at.Microseconds())
		least = min(least, sum-rate*at+rate*min(float64(gap.Microseconds()), float64(t.MaxElapsed)))
		sum += float64(k.n)
		if over := sum - rate*at - least - float64(t.Capacity) - slack; over > 1e-6 {
			return []error{fmt.Errorf("%s: %s: %.1f tokens more were taken than the bound allows", k.at, a.key, over)}
		}
	}
	return nil
}

// judgeCredit checks that successive refills credited the time that they cover, to the token. Each refill credits the
// time since the one before, up to a cap, and carries a fraction of a token on to the next one.
func (a *account) judgeCredit() []error {
	due, got := 0.0, 0.0
	for i := 1; i < len(a.writes); i++ {
		before, o := a.writes[i-1].outcome, a.writes[i].outcome
		t := a.terms(o.Fence.Epoch)
		room := t.Capacity
		if t.Strict {
			room -= before.Outstanding
		}
		if o.Status != policy.StatusApplied || before.Version.Era != o.Version.Era || before.Fence != o.Fence ||
			before.Tokens >= room || a.prefix != "" && o.Elapsed < o.Now-before.Last {
			// The last condition: a take found the bucket outside the active set. Only full buckets are outside.
			due, got = 0, 0
			continue
		}
		due += float64(min(max(o.Now-before.Last, 0), t.MaxElapsed)) * float64(t.Tokens) / float64(t.Per)
		got += float64(o.Added + o.Clamped)
		if math.Abs(due-got) > 1+1e-6 {
			return []error{fmt.Errorf("%s: %s: %.2f tokens fell due in a stretch of refills, %.0f were credited",
				a.writes[i].at, a.key, due, got)}
		}
	}
	return nil
}

// longest returns the longest time without a refill, between the instant from and the end.
func (a *account) longest(from time.Duration) (gap time.Duration) {
	last := from
	for _, f := range a.writes {
		if f.at > from {
			gap, last = max(gap, f.at-last), f.at
		}
	}
	return max(gap, time.Since(a.redis.start)-last)
}
