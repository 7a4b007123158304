package lua

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// RefillCall is a refill of one bucket.
type RefillCall struct {
	Key string
	policy.Call
	// Seen is the Seen of the last RefillResult for the bucket. It makes the call cheaper on the server, and may be left
	// out.
	Seen Seen
}

// Seen is the part of a bucket's state that a caller remembers beside its Version. It is set if the terms of the caller
// were in force and nothing was outstanding. Otherwise it is the zero Seen.
type Seen struct {
	Terms       *policy.Terms // the terms of the caller; they must not change
	Last, Carry int64         // as in policy.Outcome
}

// RefillResult is the reply to one call of a batch: an outcome or an error.
type RefillResult struct {
	policy.Outcome
	Seen Seen
	// Idle reports whether the bucket may leave the active set: it is full, nothing is outstanding, and its capacity was
	// not lowered recently.
	Idle bool
	Left bool // of RefillActive: the bucket isn't in the active set any more
	Err  error

	ofTemplate bool // the terms in force are a template's
	switched   bool // the call put other terms in force
}

// Flags in the script's reply about a bucket whose state was not the remembered one: see refill.lua.
const (
	flagDiffers  = 1
	flagIdle     = 2
	flagSwitched = 4
)

// Refill refills one bucket. For a malformed bucket it returns both an outcome and ErrMalformedBucket.
func Refill(ctx context.Context, c Client, key string, call policy.Call) (policy.Outcome, error) {
	calls := []RefillCall{{Key: key, Call: call}}
	cmd, err := send(ctx, c, refillScript, refillWords(calls, nil), integersCommand)
	if err != nil {
		return policy.Outcome{}, err
	}
	results := make([]RefillResult, 1)
	decodeRefills(cmd.Val(), calls, results)
	return results[0].Outcome, results[0].Err
}

// RefillBatch refills many buckets in one round trip. Each script call is for at most perCall buckets; perCall is at
// least 1. On a Cluster only neighbours of one slot share a script call. The results are in the order of the calls.
// Each bucket has its own error.
func RefillBatch(ctx context.Context, rdb redis.UniversalClient, calls []RefillCall, perCall int) []RefillResult {
	return refillBatch(ctx, rdb, calls, nil, perCall)
}

// refillBatch does the work of RefillBatch. If the keys of a shard are given, the buckets belong to that shard.
func refillBatch(ctx context.Context, rdb redis.UniversalClient, calls []RefillCall, shard []string,
	perCall int) []RefillResult {
	results := make([]RefillResult, len(calls))
	if perCall < 1 {
		for i := range results {
			results[i].Err = fmt.Errorf("refiller: refill: %d buckets per call; want at least 1", perCall)
		}
		return results
	}
	spans := spansOf(rdb, len(calls), perCall, func(i int) string { return calls[i].Key })
	words := make([][]any, len(spans))
	for i, p := range spans {
		words[i] = refillWords(calls[p.from:p.to], shard)
	}
	cmds, errs := pipeline(ctx, rdb, refillScript, len(spans), func(i int, verb, body string) onceIntegers {
		return integersCommand(ctx, withScript(words[i], verb, body))
	})
	for i, p := range spans {
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

// refillWords returns the words of one script call; shard has the keys of the buckets' shard, if they belong to one.
// Texts are passed as pointers, which spares an allocation for each: the client library sends the text to which a
// pointer points.
func refillWords(calls []RefillCall, shard []string) []any {
	n, create := len(calls), policy.CreateLost
	if len(shard) > 0 {
		create = policy.CreateNever
	}
	const policyWords = 2
	words := noWords(3*n+len(shard), n+1+policyWords)
	keys, seen := make([]string, 3*n), make([]string, n)
	for i := range calls {
		names := bucketKeys(calls[i].Key)
		keys[i] = names[0]
		keys[n+i] = names[1]
		keys[2*n+i] = names[2]
	}
	for i := range keys {
		words = append(words, &keys[i])
	}
	for i := range shard {
		words = append(words, &shard[i])
	}
	writeSeen(calls, seen)
	for i := range seen {
		words = append(words, &seen[i])
	}
	counted, policies := len(words), 0
	words = append(words, policies)
	for from, to := 0, 0; from < n; from = to {
		for to = from + 1; to < n && sameTermsAs(calls[to].Terms, calls[from].Terms); to++ {
		}
		text := ""
		if t := calls[from].Terms; t != nil {
			text = t.Encode()
		}
		words = append(words, from+1, text)
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

// stateLen is the approximate length of a smooth bucket's state: see shared/bucket.lua.
const stateLen = 48

// writeSeen writes what the caller remembers of the state of each bucket, in the form that the script expects. It is
// the complete state if Seen is set for the terms of the call. The texts share one string.
func writeSeen(calls []RefillCall, seen []string) {
	var all strings.Builder
	all.Grow(stateLen * len(calls))
	for i := range calls {
		c, from := &calls[i], all.Len()
		if c.Version != (policy.Version{}) {
			writePadded(&all, c.Version.Era, 16)
			writePadded(&all, c.Seen.Last, 17)
			all.WriteByte(' ')
			writePadded(&all, c.Version.Index, 0)
			if c.Terms != nil && c.Seen.Terms == c.Terms {
				all.WriteByte(' ')
				writePadded(&all, c.Seen.Carry, 0)
			}
		}
		seen[i] = all.String()[from:]
	}
}

// writePadded writes a number, with spaces in front of it up to the width.
func writePadded(b *strings.Builder, n int64, width int) {
	var text [20]byte
	digits := strconv.AppendInt(text[:0], n, 10)
	for range width - len(digits) {
		b.WriteByte(' ')
	}
	b.Write(digits)
}

func sameTermsAs(t, u *policy.Terms) bool { return t == u || t != nil && u != nil && *t == *u }

// decodeRefills reads the reply of one script call.
func decodeRefills(values []int64, calls []RefillCall, results []RefillResult) {
	r := &integerReply{values: values}
	now := r.next()
	for i := range results {
		if first := r.next(); first >= 0 {
			decodeAsSeen(&calls[i], now, first, r, &results[i])
		} else {
			decodeOther(&calls[i], now, -first, r, &results[i])
		}
	}
	if !r.good() {
		err := fmt.Errorf("%w: %d integers that are none for %d refills", ErrBadReply, len(values), len(calls))
		for i := range results {
			results[i] = RefillResult{Err: err}
		}
	}
}

// decodeAsSeen reads the result for a bucket whose state was the one that the caller remembered. tokens is the number
// of its tokens now.
func decodeAsSeen(c *RefillCall, now, tokens int64, r *integerReply, result *RefillResult) {
	*result = RefillResult{}
	if c.Terms == nil || c.Seen.Terms != c.Terms {
		r.bad = true
		return
	}
	o, t := &result.Outcome, c.Terms
	o.Status = policy.StatusApplied
	o.Now = now
	o.Last = now
	o.Elapsed = now - c.Seen.Last
	o.Version = policy.Version{Era: c.Version.Era, Index: c.Version.Index + 1}
	o.Tokens = tokens
	o.Added, o.Carry = t.Due(c.Version.Era, c.Seen.Last, c.Seen.Carry, now)
	if tokens >= t.Capacity { // a full bucket keeps no carry
		due := o.Added
		o.Added = r.next()
		result.Idle = o.Added >= 0
		if !result.Idle {
			o.Added = -1 - o.Added
		}
		o.Clamped, o.Carry = due-o.Added, 0
	}
	o.Pool = t.Pool
	o.FileVersion = t.FileVersion()
	o.PoolsVersion = t.PoolsVersion
	o.Fence = t.Fence
	result.Seen = Seen{t, now, o.Carry}
	result.ofTemplate = t.Template
}

// decodeOther reads the result for any other bucket.
func decodeOther(c *RefillCall, now, status int64, r *integerReply, result *RefillResult) {
	tokens := r.next()
	added := r.next()
	clamped := r.next()
	elapsed := r.next()
	flags := r.next()
	*result = RefillResult{Idle: flags&flagIdle != 0, switched: flags&flagSwitched != 0}
	result.Outcome = policy.Outcome{
		Status: policy.Status(status), Differs: flags&flagDiffers != 0,
		Version: policy.Version{Era: r.next(), Index: r.next()}, Now: now, Last: r.next(), Carry: r.next(),
		Tokens: tokens, Added: added, Clamped: clamped, Elapsed: elapsed,
	}
	o := &result.Outcome
	kind := r.next()
	o.Pool, result.ofTemplate = kind == policy.KindPool, kind == policy.KindTemplate
	o.FileVersion, o.PoolsVersion = r.next(), r.next()
	o.Fence = policy.Fence{Epoch: r.next(), Seq: r.next()}
	if !o.Pool {
		o.Fence.Epoch = o.FileVersion
	}
	o.Step = r.next()
	malformedKey := r.next()
	o.Outstanding = r.next()
	o.Due = r.next()
	o.Debt = r.next()
	switch {
	case status < int64(policy.StatusApplied) || status > int64(policy.StatusConflict):
		r.bad = true
	case o.Status == policy.StatusMalformed:
		result.Err = malformed(bucketKeys(c.Key), malformedKey)
	case o.Status != policy.StatusUnknown && c.inForce(o):
		result.Seen = Seen{c.Terms, o.Last, o.Carry}
	}
}

// inForce reports whether the terms of the call are smooth and in force after the call, and nothing is outstanding.
func (c *RefillCall) inForce(o *policy.Outcome) bool {
	t := c.Terms
	return t != nil && t.Kind == policy.Smooth && !o.Differs && t.Pool == o.Pool && t.Fence == o.Fence &&
		t.FileVersion() == o.FileVersion && t.PoolsVersion == o.PoolsVersion &&
		o.Outstanding == 0 && o.Due == 0 && o.Debt == 0
}

// Add refills a bucket for clients that use only its tokens and its index. If the index is expected, it adds n tokens,
// up to limit. It returns the index after the call. The index doesn't show whether tokens were added: the winner and
// the first loser both get expected+1. See add.lua.
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
