package election

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// The refill loop meets the simulated Redis through go-redis, whose hooks answer instead of a connection. So arguments
// and replies are those of the scripts, and policy.Bucket, which agrees with them, does their work.

var errRedisAway = errors.New("redis is away")

// fakeRedis is a Redis in memory on the bubble's clock, with an account of everything that happened to one bucket.
type fakeRedis struct {
	without mechanism

	mu      sync.Mutex
	skew    time.Duration
	away    bool
	buckets map[string]*policy.Bucket

	// Of the bucket with the account's key.
	key     string
	start   time.Time
	refills []refilled
	takes   []taken
	faults  []error
	slack   float64                 // tokens that faults may add to the bound
	minted  int                     // creations with tokens
	written map[policy.Version]bool // in this history
}

// refilled is a refill that wrote.
type refilled struct {
	at      time.Duration // since the start
	from    time.Duration // the next one credits the time since then
	by      string
	outcome policy.Outcome
}

type taken struct {
	at time.Duration
	n  int64
}

func newFakeRedis(key string, without mechanism) *fakeRedis {
	return &fakeRedis{key: key, without: without, buckets: map[string]*policy.Bucket{}, start: time.Now(), written: map[policy.Version]bool{}}
}

func (r *fakeRedis) now() int64 { return time.Now().Add(r.skew).UnixMicro() }

func (r *fakeRedis) fault(format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf(format, args...))
}

func (r *fakeRedis) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// bucket is locked.
func (r *fakeRedis) bucket(key string) *policy.Bucket {
	b := r.buckets[key]
	if b == nil {
		b = &policy.Bucket{}
		r.buckets[key] = b
	}
	return b
}

// take takes all there is.
func (r *fakeRedis) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.bucket(r.key)
	if b.Tokens == nil || *b.Tokens <= 0 {
		return
	}
	n := *b.Tokens
	b.Take(n, r.now())
	r.takes = append(r.takes, taken{time.Since(r.start), n})
}

// snapshot copies the buckets, and forgets what was there.
func (r *fakeRedis) snapshot() (restore func()) {
	copied := map[string]*policy.Bucket{}
	for key, b := range r.buckets {
		c := &policy.Bucket{}
		if b.Tokens != nil {
			c.Tokens = new(int64)
			*c.Tokens = *b.Tokens
		}
		if b.Index != nil {
			c.Index = new(int64)
			*c.Index = *b.Index
		}
		if b.Control != nil {
			s := *b.Control
			c.Control = &s
		}
		copied[key] = c
	}
	before, from := len(r.takes), time.Duration(0)
	if n := len(r.refills); n > 0 {
		from = r.refills[n-1].from
	}
	return func() {
		r.refills = append(r.refills, refilled{at: time.Since(r.start), from: from, outcome: policy.Outcome{Now: r.now(), Last: r.now()}}) // another history
		r.written = map[policy.Version]bool{}
		for _, k := range r.takes[before:] {
			r.slack += float64(k.n) // what is forgotten can be taken again
		}
		r.buckets = copied
	}
}

// refill is locked.
func (r *fakeRedis) refill(by, key string, call policy.Call) policy.Outcome {
	b, now := r.bucket(key), r.now()
	if key != r.key {
		return b.Refill(call, now)
	}
	knew, had := call.Version, policy.Version{}
	fence := policy.Fence{}
	if b.Control != nil {
		had = policy.Version{Era: b.Control.Era, Index: b.Control.Index}
		fence = b.Control.Terms.Fence
	}
	if o, done := r.without.before(b, &call, now); done {
		return o
	}
	o := b.Refill(call, now)
	r.without.after(b)
	if !o.Status.Wrote() {
		return o
	}
	r.refills = append(r.refills, refilled{time.Since(r.start), time.Since(r.start), by, o})
	if r.written[o.Version] {
		r.fault("%s: %s wrote %v again", time.Since(r.start), by, o.Version)
	}
	r.written[o.Version] = true
	switch o.Status {
	case policy.StatusInitialised:
		if o.Tokens > 0 {
			r.minted++
		}
	case policy.StatusRolledBack:
		if o.Tokens > 0 {
			r.fault("%s: a rollback was noticed and left %d tokens", time.Since(r.start), o.Tokens)
		}
	case policy.StatusApplied:
		if knew != had {
			r.fault("%s: %s wrote index %v, having expected %v", time.Since(r.start), by, o.Version, knew)
		}
	}
	if o.Fence.Before(fence) {
		r.fault("%s: %s put fence %v in the place of %v", time.Since(r.start), by, o.Fence, fence)
	}
	if knew.Before(had) && o.Status != policy.StatusClock && !fence.Before(call.Terms.Fence) {
		r.fault("%s: %s knew %v and wrote over %v", time.Since(r.start), by, knew, had)
	}
	if had.Before(knew) && o.Version.Era == had.Era {
		r.fault("%s: %s knew %v, and %v went on in its era", time.Since(r.start), by, knew, had)
	}
	return o
}

// mechanism is one that a simulated Redis can be without, to see that the account notices.
type mechanism string

const (
	nothing        mechanism = ""
	indexCheck     mechanism = "index check"
	elapsedCredit  mechanism = "credit by elapsed time"
	creditCap      mechanism = "credit cap"
	carry          mechanism = "carry"
	clockCheck     mechanism = "clock check"
	quarantine     mechanism = "quarantine"
	rollbackNotice mechanism = "notice of a rollback"
	fenceOrder     mechanism = "fence order"
	twoIntervals   mechanism = "two intervals before a bucket is created"
	trustMargin    mechanism = "trust margin"
	leadIsAwaited  mechanism = "wait before resigning"
)

// before changes the call or the bucket so that the mechanism has no effect, or answers itself.
func (m mechanism) before(b *policy.Bucket, call *policy.Call, now int64) (o policy.Outcome, done bool) {
	if m == twoIntervals && call.Version.Era == 0 && call.Create == policy.CreateLost {
		call.Create = policy.CreateInitial
	}
	if b.Control == nil {
		return o, false
	}
	s := b.Control
	stored := policy.Version{Era: s.Era, Index: *b.Index}
	switch m {
	case indexCheck:
		if call.Version.Before(stored) {
			call.Version = stored
		}
	case elapsedCredit:
		s.Last = now - s.Terms.Interval
	case creditCap:
		s.Terms.MaxElapsed = math.MaxInt32 * 1000
	case clockCheck:
		if now < s.Last-policy.ClockTolerance {
			return policy.Outcome{Status: policy.StatusEarly, Version: stored, Now: now, Last: s.Last, Tokens: *b.Tokens, Fence: s.Terms.Fence}, true
		}
	case quarantine:
		s.Terms.OnRollback = policy.RollbackKeep
	case rollbackNotice:
		if stored.Before(call.Version) {
			call.Version = stored
		}
	case fenceOrder:
		if call.Terms != nil && call.Terms.Fence.Before(s.Terms.Fence) {
			s.Terms.Fence = policy.Fence{Epoch: -1}
		}
	}
	return o, false
}

func (m mechanism) after(b *policy.Bucket) {
	if m == carry && b.Control != nil {
		b.Control.Carry = 0
	}
}

// redisLink is one replica's way to Redis.
type redisLink struct {
	*path
	redis *fakeRedis
	name  string
}

var _ redis.Hook = (*redisLink)(nil)

func (l *redisLink) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *redisLink) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return l.ProcessPipelineHook(nil)(ctx, []redis.Cmder{cmd})
	}
}

func (l *redisLink) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		var replies []any // the server's alone once the caller has given up
		err := l.carry(ctx, func() error {
			l.redis.mu.Lock()
			defer l.redis.mu.Unlock()
			if l.redis.away {
				return errRedisAway
			}
			for _, cmd := range cmds {
				replies = append(replies, l.redis.serve(l.name, cmd.Args()))
			}
			return nil
		})
		for i, cmd := range cmds {
			if err != nil {
				cmd.SetErr(err)
				continue
			}
			switch reply := replies[i].(type) {
			case []int64:
				cmd.(interface{ SetVal(v []int64) }).SetVal(reply)
			default:
				cmd.(interface{ SetVal(v any) }).SetVal(reply)
			}
		}
		return err
	}
}

// serve runs refill.lua, which has at least two arguments, or peek.lua, which has one. Locked.
func (r *fakeRedis) serve(by string, words []any) any {
	numkeys := words[2].(int)
	keys, args := words[3:3+numkeys], words[3+numkeys:]
	if len(args) == 1 {
		return r.peek(text(keys[0]))
	}
	n := numkeys / 3
	calls := make([]policy.Call, n)
	for i := range calls {
		c := &calls[i]
		c.Create = policy.CreateLost
		known, index, _ := strings.Cut(strings.TrimPrefix(text(args[i]), " "), " ")
		era, _, _ := strings.Cut(known, "#")
		if _, err := fmt.Sscan(era+" "+index, &c.Version.Era, &c.Version.Index); err != nil {
			r.fault("%s sent a bad version: %w", by, err)
		}
	}
	policies := number(args[n])
	args = args[n+1:]
	for ; policies > 0; policies-- {
		var terms *policy.Terms
		if pol := text(args[1]); pol != "-" {
			t, err := policy.DecodeTerms(pol)
			if err != nil {
				r.fault("%s sent bad terms: %w", by, err)
			}
			terms = &t
		}
		for i := number(args[0]) - 1; i < int64(n); i++ {
			calls[i].Terms = terms
		}
		args = args[3:]
	}
	for ; len(args) > 0; args = args[4:] {
		c := &calls[number(args[0])-1]
		c.Create, c.Step, c.Next = policy.Create(number(args[1])), number(args[2]), number(args[3])
	}
	// Every answer is in full.
	reply, details := []int64{r.now()}, []int64(nil)
	for i, call := range calls {
		o := r.refill(by, text(keys[2*i]), call)
		marks := int64(0)
		if o.Conflict {
			marks = 1
		}
		reply = append(reply, -5)
		details = append(details, int64(o.Status), o.Tokens, o.Added, o.Clamped, o.Elapsed, marks, o.Version.Era, o.Version.Index, o.Last,
			o.Fence.Epoch, o.Fence.Seq, o.Step, 0, o.Outstanding, o.Due, o.Debt)
	}
	return append(reply, details...)
}

// text and number read a word of a command, which may be a pointer.
func text(word any) string {
	if p, ok := word.(*string); ok {
		return *p
	}
	return word.(string)
}

func number(word any) int64 {
	switch n := word.(type) {
	case *int64:
		return *n
	case int:
		return int64(n)
	}
	return word.(int64)
}

func (r *fakeRedis) peek(key string) any {
	b := r.bucket(key)
	if b.Control == nil {
		return []any{int64(2)}
	}
	s := b.Control
	return []any{int64(1), *b.Tokens, int64(0), s.Era, *b.Index, s.Last, r.now(), s.Terms.Encode(), s.Carry, s.Step, s.Next}
}

// judge returns what was broken. The policies are by version, and the first has the highest rate and capacity.
func (r *fakeRedis) judge(policies []policy.Terms) []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	faults := slices.Clone(r.faults)
	t := policies[0]
	rate := float64(t.Tokens) / float64(t.Per) // per µs
	most := float64(t.MaxElapsed)

	if r.minted > 1 {
		faults = append(faults, fmt.Errorf("the bucket was created with its initial tokens %d times", r.minted))
	}

	// taken ≤ C + R·(t − s) + R·min(τ, e) + 1 + slack for every window from just before one take to another.
	least, sum, i, last := math.Inf(1), 0.0, 0, time.Duration(0)
	for _, k := range r.takes {
		for ; i < len(r.refills) && r.refills[i].at < k.at; i++ {
			last = r.refills[i].from
		}
		gap := k.at - last
		if i < len(r.refills) {
			gap = r.refills[i].at - last
		}
		at := float64(k.at.Microseconds())
		least = min(least, sum-rate*at+rate*min(float64(gap.Microseconds()), most))
		sum += float64(k.n)
		if over := sum - rate*at - least - float64(t.Capacity) - 1 - r.slack; over > 1e-6 {
			faults = append(faults, fmt.Errorf("%s: %.1f tokens more were taken than the bound allows", k.at, over))
			break
		}
	}

	// Refills credit the time since the one before, capped, and what is below a token is carried on: the credit of a
	// stretch of them is the stretch's, to the token.
	due, got := 0.0, 0.0
	for i := 1; i < len(r.refills); i++ {
		a, b := r.refills[i-1].outcome, r.refills[i].outcome
		terms := policies[b.Fence.Epoch]
		if b.Status != policy.StatusApplied || a.Version.Era != b.Version.Era || a.Fence != b.Fence || a.Tokens == terms.Capacity {
			due, got = 0, 0
			continue
		}
		elapsed := min(max(b.Now-a.Last, 0), terms.MaxElapsed)
		due += float64(elapsed) * float64(terms.Tokens) / float64(terms.Per)
		got += float64(b.Added + b.Clamped)
		if math.Abs(due-got) > 1+1e-6 {
			faults = append(faults, fmt.Errorf("%s: %.2f tokens fell due in a stretch of refills, %.0f were credited", r.refills[i].at, due, got))
			break
		}
	}
	return faults
}

// longest is the longest time between two refills from the instant on, to the end included.
func (r *fakeRedis) longest(from time.Duration) (gap time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	last := from
	for _, f := range r.refills {
		if f.at > from {
			gap, last = max(gap, f.at-last), f.at
		}
	}
	return max(gap, time.Since(r.start)-last)
}
