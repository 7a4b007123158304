package lua

import (
	"context"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// RefillCall is a refill of one bucket.
type RefillCall struct {
	Key string
	policy.Call
}

// RefillResult is the answer to one call of a batch: an outcome or an error.
type RefillResult struct {
	policy.Outcome
	Full bool // the refill left it full, with no reservation or lease
	Left bool // of RefillActive: the bucket isn't in the active set any more
	Err  error
}

// What a bucket's integers in the script's reply begin with, unless it is as
// expected: see refill.lua.
const (
	refillClamped = -1
	refillLearned = -2
	refillStale   = -3
	refillEarly   = -4
	refillOther   = -5
	refillChanged = -6

	refillDetails = 16 // integers of a bucket with refillOther

	markConflict = 1
	markFull     = 2
)

// Refill refills one bucket. A malformed bucket is an outcome as well as an
// ErrMalformedBucket.
func Refill(ctx context.Context, c Client, key string, call policy.Call) (policy.Outcome, error) {
	calls := []RefillCall{{Key: key, Call: call}}
	v, err := refillScript.call(ctx, c, refillWords(calls, nil))
	if err != nil {
		return policy.Outcome{}, err
	}
	values, err := integers(v)
	if err != nil {
		return policy.Outcome{}, err
	}
	results := make([]RefillResult, 1)
	decodeRefills(values, calls, results)
	return results[0].Outcome, results[0].Err
}

// RefillBatch refills many buckets in one round trip, at most perCall of them,
// which is 1 or more, in each script call. On a Cluster only neighbours of one
// slot share a call. An error is each bucket's own; the results are in the order
// of the calls.
func RefillBatch(ctx context.Context, rdb redis.UniversalClient, calls []RefillCall, perCall int) []RefillResult {
	return refillBatch(ctx, rdb, calls, nil, perCall)
}

// refillBatch is RefillBatch of buckets that belong to a shard, if its keys are
// given.
func refillBatch(ctx context.Context, rdb redis.UniversalClient, calls []RefillCall, shard []string, perCall int) []RefillResult {
	results := make([]RefillResult, len(calls))
	if perCall < 1 {
		for i := range results {
			results[i].Err = fmt.Errorf("refiller: refill: %d buckets per call; want at least 1", perCall)
		}
		return results
	}
	type part struct {
		from, to int
		words    []any
	}
	parts := make([]part, 0, (len(calls)+perCall-1)/perCall)
	_, cluster := rdb.(*redis.ClusterClient)
	for from, to := 0, 0; from < len(calls); from = to {
		to = min(from+perCall, len(calls))
		if cluster {
			to = from + sameSlot(calls[from:to])
		}
		parts = append(parts, part{from, to, refillWords(calls[from:to], shard)})
	}

	cmds, errs := pipeline(ctx, rdb, refillScript, len(parts), func(i int, verb, body string) onceIntegers {
		cmd := onceIntegers{redis.NewIntSliceCmd(ctx, withScript(parts[i].words, verb, body)...)}
		cmd.SetFirstKeyPos(firstKey)
		return cmd
	})
	for i, p := range parts {
		if errs[i] == nil {
			decodeRefills(cmds[i].Val(), calls[p.from:p.to], results[p.from:p.to])
			continue
		}
		for k := p.from; k < p.to; k++ {
			results[k] = RefillResult{Err: errs[i]}
		}
	}
	return results
}

// sameSlot is how many of the calls, from the first on, are for one slot.
func sameSlot(calls []RefillCall) int {
	slot := Slot(calls[0].Key)
	for i := 1; i < len(calls); i++ {
		if Slot(calls[i].Key) != slot {
			return i
		}
	}
	return len(calls)
}

// noTerms is the argument pol that is no policy.
const noTerms = "-"

// refillWords are those of one script call; shard are the keys of the shard that the
// buckets belong to, if any. Texts go as pointers, which the client library writes as
// what they point to: that spares an allocation each.
func refillWords(calls []RefillCall, shard []string) []any {
	n, create := len(calls), policy.CreateLost
	if len(shard) > 0 {
		create = policy.CreateNever
	}
	const policyWords = 3
	words := noWords(3*n+len(shard), n+1+policyWords)
	keys, versions := make([]string, 3*n), make([]string, n)
	for i := range calls {
		names := bucketKeys(calls[i].Key)
		keys[2*i], keys[2*i+1], keys[2*n+i] = names[0], names[1], names[2]
	}
	for i := range keys {
		words = append(words, &keys[i])
	}
	for i := range shard {
		words = append(words, &shard[i])
	}
	for i := range versions {
		words = append(words, &versions[i])
	}
	counted, policies := len(words), 0
	words = append(words, policies)
	for from, to := 0, 0; from < n; from = to {
		for to = from + 1; to < n && sameTermsAs(calls[to].Terms, calls[from].Terms); to++ {
		}
		text := noTerms
		if t := calls[from].Terms; t != nil {
			text = t.Encode()
		}
		mark := markOf(text)
		words = append(words, from+1, text, mark)
		refillVersions(calls[from:to], mark, versions[from:to])
		policies++
	}
	words[counted] = policies
	for i := range calls {
		if c := &calls[i]; c.Create != create || c.Step != 0 || c.Next != 0 {
			words = append(words, i+1, int64(c.Create), c.Step, c.Next)
		}
	}
	return words
}

// refillVersions writes the calls' versions as the script reads them: with the mark of
// their policy, so that one that is as expected ends like the bucket's state. They share
// one string.
func refillVersions(calls []RefillCall, mark string, versions []string) {
	var all strings.Builder
	all.Grow(48 * len(calls))
	var text [64]byte
	for i := range calls {
		from := all.Len()
		if v := calls[i].Version; v == (policy.Version{}) {
			all.WriteString("0 0")
		} else {
			b := strconv.AppendInt(append(text[:0], ' '), v.Era, 10)
			b = append(append(append(b, '#'), mark...), ' ')
			all.Write(strconv.AppendInt(b, v.Index, 10))
		}
		versions[i] = all.String()[from:]
	}
}

// markOf is the mark of a policy in the state of buckets: 41 bits of its text's
// FNV-1a hash. Two policies of one bucket have the same one once in 2·10¹².
func markOf(text string) string {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(text)) // it doesn't fail
	const most = 36 * 36 * 36 * 36 * 36 * 36 * 36 * 36
	return strconv.FormatUint(hash.Sum64()>>20%most, 36)
}

func sameTermsAs(t, u *policy.Terms) bool { return t == u || t != nil && u != nil && *t == *u }

// decodeRefills reads the reply of one script call.
func decodeRefills(values []int64, calls []RefillCall, results []RefillResult) {
	r := &integerReply{values: values}
	now, last := r.next(), refilled{}
	for i := range results {
		decodeOrdinary(&calls[i], now, r, &last, &results[i])
	}
	for i := range results {
		if results[i].Status == 0 {
			decodeOther(calls[i].Key, now, r, &results[i])
		}
	}
	if !r.good() {
		err := fmt.Errorf("%w: %d integers that are none for %d refills", ErrBadReply, len(values), len(calls))
		for i := range results {
			results[i] = RefillResult{Err: err}
		}
	}
}

// refilled is what the script says of a refill only where it differs from the one before.
type refilled struct {
	said           bool
	added, elapsed int64
}

// decodeOrdinary reads what the reply says of one bucket in its turn. The status stays 0 if
// that is no more than that the details come at the end.
func decodeOrdinary(c *RefillCall, now int64, r *integerReply, last *refilled, result *RefillResult) {
	*result = RefillResult{}
	first := r.next()
	if first == refillChanged {
		*last = refilled{true, r.next(), r.next()}
		first = r.next()
		r.bad = r.bad || first < 0
	}
	if first == refillOther {
		return
	}
	o := &result.Outcome
	o.Version, o.Now, o.Last = c.Version, now, now
	if c.Terms != nil {
		o.Fence = c.Terms.Fence
	}
	if first < 0 {
		o.Tokens = r.next()
	}
	switch {
	case first >= 0:
		o.Tokens, o.Added, o.Elapsed = first, last.added, last.elapsed
		r.bad = r.bad || !last.said
	case first == refillClamped:
		o.Added, o.Clamped, o.Elapsed = r.next(), r.next(), r.next()
	case first == refillLearned:
		o.Status, o.Version = policy.StatusStale, policy.Version{Era: r.next(), Index: r.next()}
		o.Last = r.next()
		return
	case first == refillStale:
		o.Status, o.Version.Index, o.Last = policy.StatusStale, r.next(), r.next()
		return
	case first == refillEarly:
		o.Status, o.Last = policy.StatusEarly, r.next()
		return
	default:
		r.bad = true
		return
	}
	o.Status = policy.StatusApplied
	o.Version.Index++
	result.Full = c.Terms != nil && o.Tokens >= c.Terms.Capacity
}

// decodeOther reads the details of one bucket.
func decodeOther(key string, now int64, r *integerReply, result *RefillResult) {
	status, tokens, added, clamped, elapsed := r.next(), r.next(), r.next(), r.next(), r.next()
	marks := r.next()
	result.Outcome = policy.Outcome{
		Status: policy.Status(status), Conflict: marks&markConflict != 0, Version: policy.Version{Era: r.next(), Index: r.next()},
		Now: now, Last: r.next(), Tokens: tokens, Added: added, Clamped: clamped, Elapsed: elapsed,
		Fence: policy.Fence{Epoch: r.next(), Seq: r.next()}, Step: r.next(),
	}
	malformedKey := r.next()
	result.Outstanding, result.Due, result.Debt = r.next(), r.next(), r.next()
	result.Full = marks&markFull != 0
	switch {
	case status < int64(policy.StatusApplied) || status > int64(policy.StatusMalformed):
		r.bad = true
	case result.Status == policy.StatusMalformed:
		result.Err = malformed(key, malformedKey)
	}
}

// Add is the two-key refill of clients that share only tokens and index: it
// adds n tokens up to limit if the index is expected, and answers the index
// after the call. The answer doesn't tell whether it added: the winner and the
// first loser both get expected+1. See add.lua.
func Add(ctx context.Context, c Client, key string, n, limit, expected int64) (int64, error) {
	v, err := addScript.run(ctx, c, []string{TokensKey(key), IndexKey(key)}, n, limit, expected)
	if err != nil {
		return 0, err
	}
	index, ok := v.(int64)
	if !ok {
		return 0, fmt.Errorf("%w: %T for an index", ErrBadReply, v)
	}
	return index, nil
}
