package stats

import (
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

const (
	// smoothing is the time over which a bucket's rate of takes is averaged.
	smoothing = 2 * time.Second
	// burst is the longest time in which take-overs of several buckets count as a single one. It begins with the first
	// refill.
	burst = time.Second
	// maxTakeovers is the number of take-overs that are remembered.
	maxTakeovers = 20
)

// Bucket has the stats of one bucket. The counts are of the refills that this replica won.
type Bucket struct {
	Refills     int64
	Credited    int64   // tokens that the refills found due. They were added or clamped.
	Clamped     int64   // the part of Credited for which the bucket had no room
	Due         float64 // tokens that were due under the policy in force: elapsed time × rate
	Taken       int64   // tokens taken between two refills, without those returned
	Empty       int64   // refills that found no token
	Quarantines int64   // refills that found that the server had lost writes
	ClockSteps  int64   // refills that found that the server's clock stepped back
	Created     int64   // refills that created the bucket, or adopted one of a foreign client
	Lost        int64   // refills that created the bucket again, since the server had lost its state

	Seen     time.Time // when the last reply came; zero before the first one
	Won      time.Time // when this replica last won a refill; zero before the first one
	Tokens   int64     // at the last reply
	Capacity int64     // configured
	Held     int64     // tokens outstanding in reservations and leases, at the last reply
	TakeRate float64   // tokens taken per second recently, up to Won
	Dry      float64   // part of the recent refills, up to Won, that found no token

	Flows Flows // zero if the bucket isn't divided

	Fault    string // why the last call could not refill the bucket; empty if it could
	Outdated bool   // a later version than this replica's is in force. It is not set for a pool's bucket or an override.
	Conflict bool   // the policy in force differs under the same version
}

// Takeover is a period in which this replica began to refill buckets that another replica had refilled before.
type Takeover struct {
	At      time.Time
	Buckets int           // how many buckets
	Gap     time.Duration // longest time without a refill among these buckets
}

// Refill is the information that Observe derives from one reply.
type Refill struct {
	Won      bool          // this replica refilled a configured bucket
	Gap      time.Duration // since the previous refill; 0 if that isn't known
	Lag      time.Duration // how much longer the gap is than the bucket's refill interval
	TookOver bool          // another replica made the previous refill
}

// Stats has the counts of all buckets. Its methods are safe for concurrent use.
type Stats struct {
	mu        sync.Mutex
	buckets   map[string]*bucket
	takeovers []Takeover // oldest first
	active    activity   // of templates' buckets
}

type bucket struct {
	Bucket
	interval time.Duration
	known    bool              // version and tokens are from the last reply
	mine     bool              // this replica made the last refill that it knows
	version  policy.Version    // at the last reply
	fence    policy.Fence      // at the last reply
	terms    policy.Terms      // in force at the last reply; zero if this replica doesn't know them
	trend    *ring[TrendPoint] // nil: the bucket has none
	flows    *ring[flowPoint]  // nil: the bucket has none, or too many other buckets have a history
}

// New makes Stats without buckets.
func New() *Stats { return &Stats{buckets: map[string]*bucket{}} }

// Configure sets the buckets that are counted. Buckets that were counted before keep their stats.
func (t *Stats) Configure(buckets []refill.Bucket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := make(map[string]*bucket, len(buckets))
	divided := 0
	for _, c := range buckets {
		b := t.buckets[c.Key]
		if b == nil {
			b = &bucket{}
		}
		if b.trend == nil && len(next) < maxTrends {
			b.trend = newRing[TrendPoint](TrendSlot, TrendSlots)
		}
		b.remembersFlows(c.Policy.Flows != nil && divided < maxDivided)
		if b.flows != nil {
			divided++
		}
		terms := c.Policy.Terms(policy.Fence{})
		b.Capacity, b.interval = terms.Capacity, time.Duration(terms.Interval)*time.Microsecond
		next[c.Key] = b
	}
	t.buckets = next
}

// Observe records one reply.
func (t *Stats) Observe(e refill.Event) Refill {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[e.Key]
	if b == nil || e.Err != nil && !e.OwnFault() { // a fault of the server shows nothing about the bucket
		return Refill{}
	}
	b.Fault = fault(e)
	if b.Fault != "" {
		return Refill{}
	}
	if e.Outcome.Status == policy.StatusUnknown {
		b.Conflict, b.Outdated = false, false // no policy is in force
		return Refill{}
	}
	var r Refill
	o, taken := e.Outcome, b.Taken
	if o.Status.Wrote() {
		r = b.won(e)
		if r.TookOver {
			t.takeOver(e.Replied, r.Gap)
		}
	} else {
		b.mine = b.mine && (o.Version == b.version || b.granted(o))
	}
	b.fence = o.Fence
	b.known = true
	b.version = o.Version
	b.Tokens = o.Tokens
	b.Held = o.Outstanding
	b.Seen = e.Replied
	if e.Flows != nil {
		b.flowsRead(e.Flows, e.Replied)
	}
	if b.trend != nil && b.Capacity > 0 {
		b.trend.at(e.Replied).add(float64(o.Tokens)/float64(b.Capacity), b.Taken-taken)
	}
	b.Conflict = o.Differs || o.Status == policy.StatusConflict
	b.terms = policy.Terms{}
	if e.Call.Terms != nil { // a replica sends no terms if it knows that its own have an older version
		b.Outdated = !e.Call.Terms.Pool && !o.Fence.Own() && e.Call.Terms.FileVersion() < o.FileVersion
		if e.Call.Terms.Pool == o.Pool && e.Call.Terms.Fence == o.Fence && !o.Differs {
			b.terms = *e.Call.Terms
		}
	}
	return r
}

// granted reports whether the last reply differs from the one before only by new terms of a pool. Agents write these
// terms, so the difference doesn't show which replica refills.
func (b *bucket) granted(o policy.Outcome) bool {
	next := policy.Version{Era: b.version.Era, Index: b.version.Index + 1}
	return o.Pool && o.Version == next && o.Fence != b.fence
}

// fault returns the reason why a call could not refill its bucket. It is empty if the call could.
func fault(e refill.Event) string {
	switch {
	case errors.Is(e.Err, lua.ErrMalformedBucket) || e.Err == nil && e.Outcome.Status == policy.StatusMalformed:
		return "its keys hold something else" // without the bucket's name, so that equal faults have equal texts
	case e.Err != nil:
		return e.Err.Error()
	}
	return ""
}

// won counts a refill that this replica made.
func (b *bucket) won(e refill.Event) Refill {
	o := e.Outcome
	r := Refill{Won: true, Gap: time.Duration(o.Elapsed) * time.Microsecond}
	r.Lag = max(0, r.Gap-b.interval)
	b.Refills++
	b.Won = e.Replied
	switch o.Status {
	case policy.StatusRolledBack:
		b.Quarantines++
	case policy.StatusClock:
		b.ClockSteps++
	case policy.StatusInitialised:
		if e.Call.Version.Era > 0 {
			b.Lost++
		} else {
			b.Created++
		}
	case policy.StatusApplied:
		r.TookOver = b.known && !b.mine
		if b.known && o.Version.Era == b.version.Era && o.Version.Index == b.version.Index+1 && b.terms.Fence == o.Fence {
			taken := max(0, b.Tokens+o.Added-o.Tokens)
			b.Taken += taken
			smooth(&b.TakeRate, float64(taken)/r.Gap.Seconds(), r.Gap)
		}
	}
	if o.Status == policy.StatusApplied || o.Status == policy.StatusSwitched {
		credited := o.Added + o.Clamped
		b.Credited += credited
		b.Clamped += o.Clamped
		b.Due += due(b.terms, o, credited)
		dry := 0.0
		if o.Tokens-o.Added <= 0 {
			b.Empty++
			dry = 1
		}
		smooth(&b.Dry, dry, r.Gap)
	}
	b.mine = true
	return r
}

// due returns the number of tokens that fell due since the refill before. A fraction of a token for which a full bucket
// has no room is not due. If this replica doesn't know the terms, or if they have a schedule, due returns the credited
// tokens.
func due(t policy.Terms, o policy.Outcome, credited int64) float64 {
	if t.Per == 0 || t.Kind != policy.Smooth {
		return float64(credited)
	}
	units := float64(o.Elapsed) * float64(t.Tokens)
	if t.GrantEra == o.Version.Era { // the terms of a pool, with a grant
		granted := min(max(0, t.GrantEnd-(o.Now-o.Elapsed)), o.Elapsed)
		units += float64(granted) * float64(t.GrantTokens-t.Tokens)
	}
	tokens := units / float64(t.Per)
	room := t.Capacity
	if t.Strict {
		room -= o.Outstanding
	}
	if o.Tokens >= room {
		return min(tokens, float64(credited))
	}
	return tokens
}

// smooth moves an average towards a value. over is the length of the period that has this value.
func smooth(average *float64, value float64, over time.Duration) {
	if over > 0 {
		*average += (1 - math.Exp(-over.Seconds()/smoothing.Seconds())) * (value - *average)
	}
}

func (t *Stats) takeOver(at time.Time, gap time.Duration) {
	if n := len(t.takeovers); n > 0 && at.Sub(t.takeovers[n-1].At) < burst {
		last := &t.takeovers[n-1]
		last.Buckets++
		last.Gap = max(last.Gap, gap)
		return
	}
	if len(t.takeovers) == maxTakeovers {
		t.takeovers = append(t.takeovers[:0], t.takeovers[1:]...)
	}
	t.takeovers = append(t.takeovers, Takeover{At: at, Buckets: 1, Gap: gap})
}

// Bucket returns the stats of a configured bucket.
func (t *Stats) Bucket(key string) (Bucket, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buckets[key]
	if b == nil {
		return Bucket{}, false
	}
	return b.Bucket, true
}

// Each calls visit for every bucket, in no order. visit must not call the Stats.
func (t *Stats) Each(visit func(key string, b *Bucket)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, b := range t.buckets {
		visit(key, &b.Bucket)
	}
}

// Conflicts returns the keys of the buckets in conflict, in order.
func (t *Stats) Conflicts() []string { return t.those(func(b *Bucket) bool { return b.Conflict }) }

// Outdated returns the keys of the buckets that have a policy of a later version in force, in order.
func (t *Stats) Outdated() []string { return t.those(func(b *Bucket) bool { return b.Outdated }) }

func (t *Stats) those(are func(*Bucket) bool) []string {
	var keys []string
	t.Each(func(key string, b *Bucket) {
		if are(b) {
			keys = append(keys, key)
		}
	})
	slices.Sort(keys)
	return keys
}

// Faults returns the keys of the buckets that the last call could not refill, grouped by the reason.
func (t *Stats) Faults() map[string][]string {
	faults := map[string][]string{}
	t.Each(func(key string, b *Bucket) {
		if b.Fault != "" {
			faults[b.Fault] = append(faults[b.Fault], key)
		}
	})
	for _, keys := range faults {
		slices.Sort(keys)
	}
	return faults
}

// Takeovers returns the last take-overs, the newest first.
func (t *Stats) Takeovers() []Takeover {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]Takeover, 0, len(t.takeovers))
	for i := len(t.takeovers) - 1; i >= 0; i-- {
		list = append(list, t.takeovers[i])
	}
	return list
}
