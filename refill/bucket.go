package refill

import (
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// bucket is the replica's state of a bucket. One worker owns it at a time, and that worker's mutex guards it.
type bucket struct {
	key      string
	slot     int
	terms    *policy.Terms // nil if this replica has none: then those in Redis stay in force
	pooled   *pooledTerms  // nil unless the terms change at run time
	start    *policy.Terms // pooled: the terms by which a plain bucket becomes the pool's; nil for none
	plain    bool          // pooled: the terms in force are plain
	steps    policy.Steps
	interval time.Duration

	version  policy.Version
	state    lua.Seen      // of the same reply as version
	step     int64         // stepped: the last instant known to be credited, Unix µs
	clock    time.Duration // the server's clock less ours, by the last answer
	seen     bool          // clock and step are set
	missing  time.Time     // when it was first found missing; zero if it isn't
	due      time.Time     // when the next call is due
	failures int           // in a row, because of the bucket itself

	latest  int64   // the latest version that the server reported for it; 0 for a pooled bucket
	refusal refusal // why our terms are not in force, by the last reply

	unannounced bool // a standby has to send its terms to the server
	foreign     bool // another program has refilled it
	stepped     bool // the terms in force are stepped
	unswept     bool // its reservations could not be ended

	division  *division // nil unless it has flows
	undivided bool      // its plan could not be written

	signal bool          // it has no consumers: it is a claim or the pulse
	claim  bool          // the replica that refilled it last refills the active sets
	held   bool          // a claim: this replica refilled it last
	took   time.Duration // a claim: about the longest time of the last calls
}

// refusal is the reason why our terms of a bucket are not in force.
type refusal int

const (
	accepted   refusal = iota
	differs            // other terms came first under the same version
	older              // the server has reported a later version; this stays until our file reaches that version
	overridden         // the key has an override
	otherKind          // a pool's terms are in force and ours are plain, or the reverse
)

func newBucket(b Bucket, version int64) *bucket {
	t := b.Policy.Terms(policy.Fence{Epoch: version})
	interval := time.Duration(t.Interval) * time.Microsecond
	return &bucket{key: b.Key, slot: lua.Slot(b.Key), terms: &t, steps: b.Policy.Steps, interval: interval,
		division: newDivision(b.Policy, &t)}
}

// newSignal makes a bucket whose refills are a sign of life. It expires a minute after its last refill, as a template's
// bucket does.
func newSignal(key string, interval time.Duration, version int64) *bucket {
	p := policy.Policy{Capacity: 2, Rate: policy.Rate{Tokens: 1, Per: interval}, Interval: interval}
	b := newBucket(Bucket{Key: key, Policy: p}, version)
	b.signal = true
	b.terms.Template = true
	return b
}

// pooledTerms are the newest terms of a pooled bucket. SetTerms stores them, and the bucket's worker loads them.
type pooledTerms struct {
	atomic.Pointer[policy.Terms]
	version, poolsVersion int64 // of this replica's configuration; guarded by Refiller.mu
}

// configure sets the versions of this replica's configuration.
func (p *pooledTerms) configure(b Bucket, version int64) {
	p.version = version
	p.poolsVersion = 0
	if b.Start != nil {
		p.poolsVersion = b.Start.PoolsVersion
	}
	if t := p.Load(); t != nil {
		p.set(*t)
	}
}

// set stores terms under the versions of this replica's configuration. So Redis has the latest versions of all
// replicas.
func (p *pooledTerms) set(t policy.Terms) {
	t.Version = p.version
	t.PoolsVersion = p.poolsVersion
	p.Store(&t)
}

// newPooledBucket returns a bucket whose terms come at run time.
func newPooledBucket(b Bucket, terms *pooledTerms, version int64) *bucket {
	interval := b.Policy.Interval
	if interval == 0 {
		interval = policy.DefaultInterval
	}
	pooled := &bucket{key: b.Key, slot: lua.Slot(b.Key), pooled: terms, interval: interval}
	if b.Policy.Flows != nil {
		pooled.division = &division{flows: b.Policy.Flows, pooled: true}
	}
	if b.Start != nil {
		start := *b.Start
		start.Version = version
		pooled.start = &start
	}
	return pooled
}

// inherit copies the state that the replica recorded under an earlier policy.
func (b *bucket) inherit(old *bucket) {
	b.version = old.version
	b.step = old.step
	b.clock = old.clock
	b.seen = old.seen
	b.missing = old.missing
	b.failures = old.failures
	b.held = old.held
	b.latest = old.latest
	b.division = b.division.continues(old.division)
	b.undivided = old.undivided
	if b.outdated() {
		b.refusal = older
	}
}

// remember records the version of the configuration whose policy is in force. An override is of no version.
func (b *bucket) remember(o policy.Outcome) {
	if b.pooled == nil && o.Status != policy.StatusUnknown && !o.Fence.Own() {
		b.latest = max(b.latest, o.FileVersion)
	}
}

// outdated reports whether the server has reported a later version than that of our terms.
func (b *bucket) outdated() bool { return b.pooled == nil && b.terms.Fence.Epoch < b.latest }

// call returns the call to make now, by our clock. othersCame reports whether the server has been back for so long that
// the replicas that remember the bucket have restored it. Otherwise the call does not create a new bucket, unless the
// bucket is a claim.
func (b *bucket) call(now time.Time, othersCame bool) lua.RefillCall {
	if b.pooled != nil {
		b.terms = b.pooled.Load()
	}
	c := policy.Call{Version: b.version, Create: policy.CreateLost, Terms: b.terms}
	switch {
	case b.plain && b.start != nil: // terms with a grant can't make it the pool's
		c.Create, c.Terms = policy.CreateNever, b.start
		return lua.RefillCall{Key: b.key, Call: c}
	case b.claim:
		c.Create = policy.CreateInitial // it has no consumers, so its tokens don't matter
		if !b.held {
			c.Version = policy.Version{} // the call only reads, unless our configuration is later
		}
		return lua.RefillCall{Key: b.key, Call: c}
	case b.outdated() || b.refusal == overridden:
		// If our terms are outdated, or the key has an override, the call has no terms and creates no bucket. If the policy
		// in force has a schedule, this replica doesn't know it, so the call only reads. With the right index it could win,
		// and keep out the replicas that know the schedule.
		c.Create, c.Terms = policy.CreateNever, nil
		if b.stepped {
			c.Version = policy.Version{}
		}
		return lua.RefillCall{Key: b.key, Call: c}
	case b.unannounced: // a standby creates no bucket
		c.Create = policy.CreateNever
		return lua.RefillCall{Key: b.key, Call: c}
	}
	if othersCame && !b.missing.IsZero() && now.Sub(b.missing) >= createAfter(b.interval) {
		c.Create = policy.CreateInitial
	}
	if b.steps != nil && b.seen {
		server := now.Add(b.clock).UnixMicro()
		stored := b.step
		if stored == 0 {
			stored = server
		}
		c.Step, c.Next = policy.Due(b.steps, stored, server, (b.terms.Capacity+b.terms.Tokens-1)/b.terms.Tokens)
	}
	return lua.RefillCall{Key: b.key, Call: c, Seen: b.state}
}

// apply applies the reply to a call and sets the time of the next call. took is the duration of the round trip.
func (b *bucket) apply(o policy.Outcome, replied time.Time, took time.Duration, rng *rand.Rand) {
	b.failures = 0
	b.clock, b.seen = time.UnixMicro(o.Now).Sub(replied), true
	if o.Status == policy.StatusUnknown {
		if b.unannounced {
			b.due = replied.Add(maxBucketBackoff)
			return
		}
		if b.missing.IsZero() {
			b.missing = replied
		}
		b.due = b.missing.Add(createAfter(b.interval) + jitter(b.interval, rng))
		if b.due.Before(replied) {
			b.due = replied.Add(b.interval)
		}
		return
	}
	b.missing, b.unannounced = time.Time{}, false
	b.version = o.Version
	b.step = o.Step
	b.stepped = o.Step != 0
	b.plain = b.pooled != nil && !o.Pool
	wait := nextCall(o, b.interval, rng)
	if o.Status.Wrote() && b.older(o) {
		wait += b.interval / 5 // more than jitter, so that a replica with the later file makes the next refill
	}
	if b.claim {
		wait = b.applyClaim(o, took, rng)
	}
	b.due = replied.Add(wait)
}

// older reports whether a later file than this replica's is in force, after a call with this outcome. Only a replica
// with the later file can divide the bucket among its flows.
func (b *bucket) older(o policy.Outcome) bool {
	if b.pooled != nil {
		return o.Pool && b.terms != nil && b.terms.PoolsVersion < o.PoolsVersion
	}
	return b.outdated()
}

// doubtful reports whether the last call failed because of the bucket, or left other terms than ours in force. Terms of
// a later version don't count: they stay until our file changes.
func (b *bucket) doubtful() bool {
	return !b.signal && (b.failures > 0 || b.refusal != accepted && b.refusal != older)
}

// fail records a call that failed because of the bucket itself, and not because of its server.
func (b *bucket) fail(replied time.Time, rng *rand.Rand) {
	b.unannounced = false
	b.failures++
	// This replica can't know whether another one has the claim. It refills the active sets anyway: if two replicas do,
	// only calls are wasted.
	b.held = b.claim
	b.due = replied.Add(backoff(b.failures, maxBucketBackoff, rng))
}

// compare compares our terms with those in force, and adds a notice of each transition that an operator should know.
func (b *bucket) compare(to *notices, o policy.Outcome) {
	before := b.refusal
	b.refusal = b.refused(o)
	if b.refusal == before {
		return
	}
	switch b.refusal {
	case differs:
		to.add(hclog.Warn, "policy changed under the same version and is ignored: raise the config's version",
			"bucket", b.key, "version", b.terms.Fence.Epoch)
	case older:
		to.add(hclog.Warn, "bucket has a policy of a later version: this replica's config is old", "bucket", b.key,
			"version", b.terms.Fence.Epoch, "in-force", b.latest)
	case overridden:
		to.add(hclog.Info, "bucket has an override, which counts instead of the config", "bucket", b.key)
	case otherKind:
		to.add(hclog.Error, "bucket is not refilled: it is a pool's in force and plain in this replica's config, "+
			"or the other way round: raise the config's version", "bucket", b.key, "pool-in-force", o.Pool,
			"version-in-force", o.FileVersion)
	}
}

// refused returns why the reply leaves other terms than ours in force.
func (b *bucket) refused(o policy.Outcome) refusal {
	switch {
	case o.Status == policy.StatusConflict:
		return otherKind
	case b.pooled != nil: // the terms in Redis may be newer than this replica's for a moment
		return accepted
	case o.Status != policy.StatusUnknown && o.Fence.Own():
		return overridden
	case b.outdated():
		return older
	case o.Differs:
		return differs
	}
	return accepted
}

// report adds a notice of the reply if an operator should know of it.
func (b *bucket) report(to *notices, o policy.Outcome) {
	switch o.Status {
	case policy.StatusInitialised:
		to.add(hclog.Info, "bucket created",
			"bucket", b.key, "tokens", o.Tokens, "index", o.Version.Index, "era", o.Version.Era)
	case policy.StatusRolledBack:
		to.add(hclog.Warn, "server lost writes: bucket begins a new era",
			"bucket", b.key, "tokens", o.Tokens, "index", o.Version.Index, "era", o.Version.Era)
	case policy.StatusClock:
		to.add(hclog.Warn, "server clock stepped back: bucket begins a new era",
			"bucket", b.key, "index", o.Version.Index, "era", o.Version.Era)
	case policy.StatusForeign:
		if !b.foreign {
			b.foreign = true
			to.add(hclog.Info, "another program refills this bucket", "bucket", b.key, "index", o.Version.Index)
		}
	}
}
