package lua

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// ErrTooManyBuckets is returned when a bucket isn't created because its template has as many buckets as its policy
// allows. Nothing was taken.
var ErrTooManyBuckets = errors.New("refiller: too many buckets of the template")

// Template is a template that is not lazy, in the form that Takes need. If the template has a schedule, the Template
// remembers the instants around the present time. It is safe for concurrent use.
type Template struct {
	prefix, terms, alive string
	sets                 [ActiveShards]string
	maxKeys              int64
	life                 time.Duration // time after which an unused bucket expires, at least
	crossSlot            bool          // its sets are in other slots than its buckets
	// The fields of a template whose buckets are budgets.
	steps    policy.Steps // nil if the buckets are no budgets
	fill     int64        // how many steps fill a budget
	instants atomic.Pointer[instants]
}

// instants are the instants of a schedule that calls send while the server's time is at least latest and before next.
// Both are in Unix microseconds.
type instants struct {
	latest, next int64
	text         string // as the scripts read them: see steps.lua
}

// NewTemplate makes a Template. crossSlot is for a Cluster, where the active set and the set of the buckets alive are
// in other slots than the buckets. Then the callers must call Enter for their buckets, and Claim before they create a
// bucket of a bounded template.
func NewTemplate(r *policy.CompiledTemplate, crossSlot bool) *Template {
	t := &Template{prefix: r.Prefix, terms: r.Text, alive: AliveKey(r.Prefix), maxKeys: r.MaxKeys,
		life: r.Terms.Lifetime(), crossSlot: crossSlot, steps: r.Policy.Steps}
	if t.steps != nil {
		t.fill = r.Terms.Fill()
		t.instants.Store(t.at(time.Now().UnixMicro(), 0))
	}
	for i := range t.sets {
		t.sets[i] = ActiveKey(r.Prefix, i)
	}
	return t
}

// leastLeft is the shortest time from the step that fills a budget to the budget's expiry.
const leastLeft = time.Minute

// at returns the instants that credit a budget when its server's time is now. These are all instants from since on or,
// if since is 0, as many as fill the budget.
func (t *Template) at(now, since int64) *instants {
	list := policy.Instants(t.steps, since, now, t.fill)
	full := policy.FullAt(t.steps, now, t.fill) + leastLeft.Microseconds()
	text := strconv.AppendInt(nil, full/1_000_000+1, 10)
	for _, instant := range list {
		text = append(text, ' ')
		text = strconv.AppendInt(text, instant, 10)
	}
	n := len(list)
	return &instants{list[n-2], list[n-1], string(text)}
}

// again returns the text of the schedule for a repeated call. now is the time of the server, from the reply to the call
// before. There are two reasons to repeat a call. If since is 0, the instants of that call were not those around now.
// Otherwise all instants from since on are needed.
func (t *Template) again(now, since int64) string {
	known := t.instants.Load()
	if now < known.latest || now >= known.next {
		known = t.at(now, 0)
		t.instants.Store(known)
	}
	if since == 0 {
		return known.text
	}
	return t.at(now, since).text
}

// schedule returns the text of the template's schedule that calls send; empty if it has none.
func (t *Template) schedule() string {
	if t.steps == nil {
		return ""
	}
	return t.instants.Load().text
}

// Period returns the latest step of the template's schedule and the next one, in Unix microseconds, by the clock of the
// last replies. Both are 0 if the template has no schedule.
func (t *Template) Period() (step, next int64) {
	if t.steps == nil {
		return 0, 0
	}
	is := t.instants.Load()
	return is.latest, is.next
}

// Enter puts a bucket into the active set of its template and, if the template is bounded, into the set of the buckets
// alive. It is for sets that are in other slots than the bucket. till is the second in which the bucket expires. A set
// expires with the last of its buckets.
func (t *Template) Enter(ctx context.Context, c Client, key string, till int64) error {
	if t.steps != nil {
		return t.count(ctx, c, key, till)
	}
	if _, err := enterScript.run(ctx, c, []string{t.sets[ActiveShard(key)]}, key, till, 0); err != nil {
		return err
	}
	return t.count(ctx, c, key, till)
}

// count puts a bucket in the set of the template's buckets alive, if the template is bounded.
func (t *Template) count(ctx context.Context, c Client, key string, till int64) error {
	if t.maxKeys == 0 {
		return nil
	}
	_, err := enterScript.run(ctx, c, []string{t.alive}, key, till, 1)
	return err
}

// mostTries is the most calls that TakeWhole makes for one bucket.
const mostTries = 4

// SweepAtOnce is the most records that a sweep of a budget ends before the takes are repeated.
const SweepAtOnce = 1000

// Open puts an existing bucket into the active set, even if no take has left it less than full. So refillers refill the
// bucket from then on. If the bucket is a budget, Open credits it instead.
func (t *Template) Open(ctx context.Context, c Client, key string) error {
	reply, err := TakeWhole(ctx, c, Takes{Key: key, Template: t, Existing: true})
	if err != nil || reply.Till == 0 {
		return err
	}
	return t.Enter(ctx, c, key, reply.Till)
}

// TakeWhole makes the takes of one bucket with Whole set, and repeats the call as its replies require.
func TakeWhole(ctx context.Context, c Client, b Takes) (TakesReply, error) {
	b.Whole = true
	for range mostTries {
		replies, err := new(TakesCall).Do(ctx, c, []Takes{b})
		if err != nil {
			return TakesReply{}, err
		}
		switch reply := replies[0]; {
		case reply.Schedule != "":
			b.Schedule = reply.Schedule
		case reply.Ended:
			if err := SweepOne(ctx, c, b.Key, SweepAtOnce); err != nil {
				return TakesReply{}, err
			}
			b.Swept = true
		default:
			return reply, reply.Err
		}
	}
	return TakesReply{}, fmt.Errorf("%w: %d schedules were of another time than the server's", ErrBadReply, mostTries)
}

// Claim counts a bucket of a bounded template that is about to be created. It returns ErrTooManyBuckets if the template
// has as many buckets as it may have. The bucket is counted until it would expire without being used. Enter then
// extends that time. Claim may be repeated.
func (t *Template) Claim(ctx context.Context, c Client, key string) error {
	return t.ClaimStep(key).Do(ctx, c)
}

// ClaimStep returns the call of Claim.
func (t *Template) ClaimStep(key string) *Step {
	args := []any{key, t.maxKeys, int64(math.Ceil(t.life.Seconds()))}
	return &Step{claimScript, words([]string{t.alive}, args), func(v any) error {
		alive, ok := v.(int64)
		if !ok {
			return fmt.Errorf("%w: %T for a number of buckets", ErrBadReply, v)
		}
		if alive > 0 {
			return t.TooMany(key, alive)
		}
		return nil
	}}
}

// TooMany returns the error of a bucket that isn't created, because the template has as many buckets as it may have.
func (t *Template) TooMany(key string, alive int64) error {
	return fmt.Errorf("%w %q: %d are alive, at most %d may be; %q is not created", ErrTooManyBuckets, t.prefix, alive,
		t.maxKeys, key)
}

// runs reads the results of the runs of a call.
func (r *Reply) runs(runs []policy.Run) []RunReply {
	replies := make([]RunReply, len(runs))
	for i, run := range runs {
		taken, wait := r.Int(), r.Int()
		if r.err == nil && (taken < 0 || taken > run.Count) {
			r.err = fmt.Errorf("%w: %d of %d takes", ErrBadReply, taken, run.Count)
		}
		replies[i] = RunReply{Taken: taken, Wait: micros(wait)}
	}
	return replies
}

// LazyReply is the reply about a bucket of a lazy template. Its Terms are nil unless the key has an override.
type LazyReply struct {
	TakesReply
	Reset time.Duration // until the bucket is full
}

// Kinds of calls of the lazy script.
const (
	lazyReturn = -1
	lazyPeek   = 0
	lazyTake   = 1
)

// LazyTake makes takes of a bucket of a lazy template, as a TakesCall does. terms are the template's.
func LazyTake(ctx context.Context, c Client, key string, terms *policy.Terms, runs []policy.Run,
	inLine bool) (LazyReply, error) {
	return lazy(ctx, c, key, lazyTake, terms, runs, inLine)
}

// LazyPeek returns the state of a bucket of a lazy template, and the time until n tokens are due.
func LazyPeek(ctx context.Context, c Client, key string, terms *policy.Terms, n int64) (LazyReply, error) {
	return lazy(ctx, c, key, lazyPeek, terms, []policy.Run{{N: n, Count: 1}}, false)
}

// LazyReturn gives n tokens back to a bucket of a lazy template, and drops those that
// it can't hold.
func LazyReturn(ctx context.Context, c Client, key string, terms *policy.Terms, n int64) error {
	_, err := lazy(ctx, c, key, lazyReturn, terms, []policy.Run{{N: n, Count: 1}}, false)
	return err
}

// lazy makes a call for a bucket of a lazy template. While a Cluster moves the slot, the two keys of the call may be on
// two servers, or one of them may be missing. The Cluster refuses such a call. Then lazy reads the override first, and
// makes a call with the bucket's key only.
func lazy(ctx context.Context, c Client, key string, what int, terms *policy.Terms, runs []policy.Run,
	inLine bool) (LazyReply, error) {
	reply, err := lazyOnce(ctx, c, key, what, terms, false, runs, inLine)
	if !IsTryAgain(err) {
		return reply, err
	}
	own, err := Override(ctx, c, key)
	if err != nil {
		return LazyReply{}, err
	}
	if own != nil {
		terms = own
	}
	reply, err = lazyOnce(ctx, c, key, what, terms, true, runs, inLine)
	reply.Terms = own
	return reply, err
}

func lazyOnce(ctx context.Context, c Client, key string, what int, terms *policy.Terms, resolved bool,
	runs []policy.Run, inLine bool) (LazyReply, error) {
	words, err := lazyWords(key, what, terms, resolved, runs, inLine)
	if err != nil {
		return LazyReply{}, err
	}
	cmd, err := send(ctx, c, lazyScript, words, command)
	if err != nil {
		return LazyReply{}, err
	}
	return decodeLazy(cmd.Val(), key, runs)
}

// lazyWords makes the words of a call. If resolved is set, an override is in terms already, and the call doesn't have
// its key.
func lazyWords(key string, what int, terms *policy.Terms, resolved bool, runs []policy.Run, inLine bool) ([]any,
	error) {
	if total, err := totalOf(runs); err != nil {
		return nil, err
	} else if total == 0 {
		return nil, fmt.Errorf("%w: no takes", ErrInvalidAmount)
	}
	words := append(noWords(2, 5+3*len(runs)), LazyKey(key))
	if resolved {
		words[firstKey-1] = 1
	} else {
		words = append(words, OverrideKey(key))
	}
	words = append(words, what, flag(inLine), terms.Tokens, terms.Per, terms.Capacity)
	return appendRuns(words, runs), nil
}

func decodeLazy(v any, key string, runs []policy.Run) (LazyReply, error) {
	r, code, err := open(v, []string{LazyKey(key)}, codeDone, codeDenied)
	if err != nil {
		return LazyReply{}, err
	}
	reply := LazyReply{TakesReply{OK: code == codeDone, Remaining: r.Int()}, micros(r.Int())}
	reply.Now = r.Int()
	reply.Last = reply.Now // it is credited up to now
	reply.Terms = r.terms()
	if !reply.OK {
		reply.Runs = r.runs(runs)
	}
	return reply, r.End()
}
