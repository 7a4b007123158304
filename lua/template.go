package lua

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// ErrTooManyBuckets is returned when a bucket isn't created because as many of
// its template are alive as its policy allows. Nothing was taken.
var ErrTooManyBuckets = errors.New("refiller: too many buckets of the template")

// AliveKey is the key of the count of the template's buckets alive.
func AliveKey(prefix string) string { return "{refiller:alive:" + prefix + "}" }

// LimitKey is the key of the policy that a bucket of a template has alone.
func LimitKey(key string) string { return "{" + key + "}:limit" }

// LazyKey is the key of a bucket that is credited when it is asked.
func LazyKey(key string) string { return "{" + key + "}:lazy" }

// Template is a refilled template as takes of its buckets refer to it. It doesn't
// change and is safe for concurrent use.
type Template struct {
	prefix, terms, alive string
	sets                 [ActiveShards]string
	maxKeys              int64
	apart                bool
}

// NewTemplate makes a Template. apart is for a Cluster: the active set and the count
// of buckets are in other slots than the buckets, so callers call Enter and Count, and
// keep to the bound.
func NewTemplate(r *policy.Ruled, apart bool) *Template {
	t := &Template{prefix: r.Prefix, terms: r.Text, alive: AliveKey(r.Prefix), maxKeys: r.MaxKeys, apart: apart}
	for i := range t.sets {
		t.sets[i] = ActiveKey(r.Prefix, i)
	}
	return t
}

// TooMany is the error of a bucket that isn't created, since as many are alive as
// may be.
func (t *Template) TooMany(key string, alive int64) error {
	return TooManyBuckets(t.prefix, key, alive, t.maxKeys)
}

// TemplateCall is what a take of a template's bucket says of the template.
type TemplateCall struct {
	Prefix   string
	Terms    string // the template's, encoded; "" if the bucket is known to exist
	Capacity int64  // of the bucket, as far as the caller knows; 0 if it doesn't
	MaxKeys  int64
	// Hold is how long a script for which the bucket is opened may hold tokens; 0 if
	// it doesn't. The bucket then lives for longer than that.
	Hold time.Duration
	// Apart is set on a Cluster: the active set and the count of buckets are in
	// other slots, so the caller calls Enter and Count, and keeps to MaxKeys.
	Apart bool
}

// TemplateReply is the answer to takes of a template's bucket.
type TemplateReply struct {
	TakeManyReply
	Enter     bool  // Apart: the bucket is to be entered
	Was, Till int64 // Apart: its expiry moved from one second to another, 0 for none, or is the same
}

// TakeTemplate makes takes of a bucket of a refilled template, as TakeMany and
// TakeInLine do, and creates it if it is missing. Without runs it opens the bucket
// for another script: the bucket exists afterwards, has its expiry and is in the
// active set.
//
// The errors are those of Take; ErrUnknownBucket means that the bucket is missing
// and the call had no Terms.
func TakeTemplate(ctx context.Context, c Client, key string, t TemplateCall, runs []policy.Run, withTerms, inLine bool) (TemplateReply, error) {
	total := int64(0)
	args := make([]any, 6, 7+2*len(runs))
	for _, r := range runs {
		if r.N < 1 || r.Count < 1 || r.N > (policy.MaxTokens-total)/r.Count {
			return TemplateReply{}, fmt.Errorf("%w: %d takes of %d tokens; want at least 1 of each and %d together",
				ErrInvalidAmount, r.Count, r.N, int64(policy.MaxTokens))
		}
		total += r.N * r.Count
		args = append(args, r.N, r.Count)
	}
	if total == 0 {
		args = append(args, int64(math.Ceil(t.Hold.Seconds())))
	}
	args[0], args[1], args[2], args[3], args[4], args[5] = total, 0, 0, t.Capacity, t.Terms, t.MaxKeys
	if withTerms || total == 0 {
		args[1] = 1
	}
	if inLine {
		args[2] = 1
	}
	keys := append(make([]string, 0, 6), bucketKeys(key)...)
	keys = append(keys, LimitKey(key))
	if !t.Apart {
		keys = append(keys, ActiveKey(t.Prefix, ActiveShard(key)), AliveKey(t.Prefix))
	}
	v, err := templateScript.run(ctx, c, keys, args...)
	if err != nil {
		return TemplateReply{}, err
	}
	if left, ok := v.(int64); ok {
		return TemplateReply{TakeManyReply: TakeManyReply{OK: true, Remaining: left}}, nil
	}
	r, code, err := open(v, key, codeDone, codeDenied, codeTooMany)
	if err != nil {
		return TemplateReply{}, err
	}
	if code == codeTooMany {
		alive := r.int()
		if err := r.end(); err != nil {
			return TemplateReply{}, err
		}
		return TemplateReply{}, TooManyBuckets(t.Prefix, key, alive, t.MaxKeys)
	}
	reply := TemplateReply{TakeManyReply: TakeManyReply{OK: code == codeDone, Remaining: r.int()}, Enter: r.int() == 1, Was: r.int(), Till: r.int()}
	if reply.OK {
		reply.Terms = r.terms()
		return reply, r.end()
	}
	reply.Refilled = r.refilled()
	reply.Terms = r.terms()
	reply.Runs = r.runs(runs)
	return reply, r.end()
}

// Enter puts a bucket in the active set of its template. till is the second in which
// the bucket expires: the set expires with the last of its buckets.
func Enter(ctx context.Context, c Client, prefix, key string, till int64) error {
	if _, err := enterScript.run(ctx, c, []string{ActiveKey(prefix, ActiveShard(key))}, key, till); err != nil {
		return fmt.Errorf("refiller: enter: %w", err)
	}
	return nil
}

// Count notes that the expiry of one of a template's buckets has moved from one
// second to another, 0 for none, and tells how many of its buckets are alive.
func Count(ctx context.Context, c Client, prefix string, was, till int64) (alive int64, err error) {
	v, err := countScript.run(ctx, c, []string{AliveKey(prefix)}, was, till)
	if err != nil {
		return 0, err
	}
	alive, ok := v.(int64)
	if !ok {
		return 0, fmt.Errorf("%w: %T for a number of buckets", ErrBadReply, v)
	}
	return alive, nil
}

// TooManyBuckets is the error of a bucket that isn't created, since of its
// template as many are alive as may be.
func TooManyBuckets(prefix, key string, alive, most int64) error {
	return fmt.Errorf("%w %q: %d are alive, at most %d may be; %q is not created", ErrTooManyBuckets, prefix, alive, most, key)
}

// runs reads what became of the runs of a call.
func (r *reply) runs(runs []policy.Run) []RunReply {
	replies := make([]RunReply, len(runs))
	for i, run := range runs {
		taken, wait := r.int(), r.int()
		if r.err == nil && (taken < 0 || taken > run.Count) {
			r.err = fmt.Errorf("%w: %d of %d takes", ErrBadReply, taken, run.Count)
		}
		replies[i] = RunReply{Taken: taken, Wait: micros(wait)}
	}
	return replies
}

// LazyReply is the answer of a bucket of a lazy template.
type LazyReply struct {
	TakeManyReply               // Terms only if the bucket has a policy of its own
	Reset         time.Duration // until the bucket is full
}

// Lazy calls.
const (
	lazyReturn = -1
	lazyPeek   = 0
	lazyTake   = 1
)

// LazyTake makes takes of a bucket of a lazy template, as TakeMany and TakeInLine
// do. terms are the template's.
func LazyTake(ctx context.Context, c Client, key string, terms *policy.Terms, runs []policy.Run, inLine bool) (LazyReply, error) {
	return lazy(ctx, c, key, lazyTake, terms, runs, inLine)
}

// LazyPeek tells how a bucket of a lazy template stands and how long until n
// tokens are due.
func LazyPeek(ctx context.Context, c Client, key string, terms *policy.Terms, n int64) (LazyReply, error) {
	return lazy(ctx, c, key, lazyPeek, terms, []policy.Run{{N: n, Count: 1}}, false)
}

// LazyReturn gives n tokens back to a bucket of a lazy template; what it can't
// hold is dropped.
func LazyReturn(ctx context.Context, c Client, key string, terms *policy.Terms, n int64) error {
	_, err := lazy(ctx, c, key, lazyReturn, terms, []policy.Run{{N: n, Count: 1}}, false)
	return err
}

func lazy(ctx context.Context, c Client, key string, what int, terms *policy.Terms, runs []policy.Run, inLine bool) (LazyReply, error) {
	words, err := lazyWords(key, what, terms, runs, inLine)
	if err != nil {
		return LazyReply{}, err
	}
	v, err := lazyScript.call(ctx, c, words)
	if err != nil {
		return LazyReply{}, err
	}
	return decodeLazy(v, key, runs)
}

// LazyCommand is the command of a LazyTake, which the caller sends once, by itself or
// in a pipeline. If the answer is IsNoScript, it may be sent again with the script's
// source.
func LazyCommand(ctx context.Context, key string, terms *policy.Terms, runs []policy.Run, inLine, source bool) (redis.Cmder, error) {
	words, err := lazyWords(key, lazyTake, terms, runs, inLine)
	if err != nil {
		return nil, err
	}
	if source {
		return lazyScript.bySource(ctx, words), nil
	}
	return lazyScript.bySHA(ctx, words), nil
}

// ReadLazy reads the answer to a LazyCommand. err is the error with which it ended.
func ReadLazy(cmd redis.Cmder, err error, key string, runs []policy.Run) (LazyReply, error) {
	if err != nil {
		return LazyReply{}, fmt.Errorf("refiller: %s: %w", lazyScript.name, err)
	}
	c, ok := cmd.(once)
	if !ok {
		return LazyReply{}, fmt.Errorf("%w: %T for a command", ErrBadReply, cmd)
	}
	return decodeLazy(c.Val(), key, runs)
}

func lazyWords(key string, what int, terms *policy.Terms, runs []policy.Run, inLine bool) ([]any, error) {
	if total, err := totalOf(runs); err != nil {
		return nil, err
	} else if total == 0 {
		return nil, fmt.Errorf("%w: no takes", ErrInvalidAmount)
	}
	words := append(noWords(2, 5+3*len(runs)), LazyKey(key), LimitKey(key), what, flag(inLine), terms.Tokens, terms.Per, terms.Capacity)
	return appendRuns(words, runs), nil
}

func decodeLazy(v any, key string, runs []policy.Run) (LazyReply, error) {
	r, code, err := open(v, key, codeDone, codeDenied)
	if errors.Is(err, ErrMalformedBucket) {
		return LazyReply{}, fmt.Errorf("%w %q: the key %q does not hold an instant", ErrMalformedBucket, key, LazyKey(key))
	}
	if err != nil {
		return LazyReply{}, err
	}
	reply := LazyReply{TakeManyReply: TakeManyReply{OK: code == codeDone, Remaining: r.int()}, Reset: micros(r.int())}
	reply.Now = r.int()
	reply.Last = reply.Now // it is credited up to now
	reply.Terms = r.terms()
	if !reply.OK {
		reply.Runs = r.runs(runs)
	}
	return reply, r.end()
}
