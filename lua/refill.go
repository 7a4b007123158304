package lua

import (
	"context"
	"errors"
	"fmt"

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

// Integers in the script's reply, as refill.lua says.
const (
	refillValues  = 5  // of every bucket
	refillDetails = 11 // of one that isn't as expected

	markConflict = 1
	markFull     = 2
)

// Statuses of the script beside those of package policy: nothing but what it
// answers differs from what the caller knows.
const (
	asExpected    = 0
	staleExpected = -int64(policy.StatusStale)
	earlyExpected = -int64(policy.StatusEarly)
)

// Refill refills one bucket. A malformed bucket is an outcome as well as an
// ErrMalformedBucket.
func Refill(ctx context.Context, c Client, key string, call policy.Call) (policy.Outcome, error) {
	calls := []RefillCall{{Key: key, Call: call}}
	keys, args := refillArguments(calls, nil)
	v, err := refillScript.run(ctx, c, keys, args...)
	if err != nil {
		return policy.Outcome{}, err
	}
	results := make([]RefillResult, 1)
	decodeRefills(v, calls, results)
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
		keys     []string
		args     []any
	}
	parts := make([]part, 0, (len(calls)+perCall-1)/perCall)
	_, cluster := rdb.(*redis.ClusterClient)
	for from, to := 0, 0; from < len(calls); from = to {
		to = min(from+perCall, len(calls))
		if cluster {
			to = from + sameSlot(calls[from:to])
		}
		keys, args := refillArguments(calls[from:to], shard)
		parts = append(parts, part{from, to, keys, args})
	}

	send := func(parts []part, command func(context.Context, []string, []any) once) (unknown []part) {
		pipe := rdb.Pipeline()
		cmds := make([]once, len(parts))
		for i, p := range parts {
			cmds[i] = command(ctx, p.keys, p.args)
			_ = pipe.Process(ctx, cmds[i]) // queues
		}
		_, execErr := pipe.Exec(ctx)
		for i, p := range parts {
			err := cmds[i].Err()
			if err == nil && execErr != nil && cmds[i].Val() == nil {
				err = execErr // the batch failed before this command was answered
			}
			if redis.HasErrorPrefix(err, "NOSCRIPT") {
				unknown = append(unknown, p)
			}
			if err != nil {
				for k := p.from; k < p.to; k++ {
					results[k] = RefillResult{Err: fmt.Errorf("refiller: refill: %w", err)}
				}
				continue
			}
			decodeRefills(cmds[i].Val(), calls[p.from:p.to], results[p.from:p.to])
		}
		return unknown
	}
	// NOSCRIPT proves that a part did not run: load the script and send that
	// part again; with its source, should the cache be flushed in between.
	unknown := send(parts, refillScript.bySHA)
	if len(unknown) > 0 && rdb.ScriptLoad(ctx, refillScript.source).Err() == nil {
		unknown = send(unknown, refillScript.bySHA)
	}
	if len(unknown) > 0 {
		send(unknown, refillScript.bySource)
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

// Texts of the argument pol that are no policy.
var (
	sameTerms = ""  // those of the bucket before
	noTerms   = "-" // none
)

// refillArguments are those of one script call; shard are the keys of the shard
// that the buckets belong to, if any. Numbers and texts go as pointers, which the
// client library writes as what they point to: that spares an allocation each.
func refillArguments(calls []RefillCall, shard []string) (keys []string, args []any) {
	n, create := len(calls), policy.CreateLost
	keys, args = make([]string, 3*n, 3*n+len(shard)), make([]any, 0, 3*n)
	if len(shard) > 0 {
		keys, create = append(keys, shard...), policy.CreateNever
	}
	for i := range calls {
		names := bucketKeys(calls[i].Key)
		keys[2*i], keys[2*i+1], keys[2*n+i] = names[0], names[1], names[2]
	}
	for i := range calls {
		c := &calls[i]
		terms := &noTerms
		switch {
		case i > 0 && sameTermsAs(c.Terms, calls[i-1].Terms):
			terms = &sameTerms
		case c.Terms != nil:
			text := c.Terms.Encode()
			terms = &text
		}
		args = append(args, &c.Version.Era, &c.Version.Index, terms)
	}
	for i := range calls {
		if c := &calls[i]; c.Create != create || c.Step != 0 || c.Next != 0 {
			args = append(args, i+1, int64(c.Create), c.Step, c.Next)
		}
	}
	return keys, args
}

func sameTermsAs(t, u *policy.Terms) bool { return t == u || t != nil && u != nil && *t == *u }

// decodeRefills reads the reply of one script call.
func decodeRefills(v any, calls []RefillCall, results []RefillResult) {
	values, _ := v.([]any)
	err := fmt.Errorf("%w: %T of %d values for %d refills", ErrBadReply, v, len(values), len(calls))
	if len(values) >= 1+refillValues*len(calls) {
		r, details := &reply{values: values[:1+refillValues*len(calls)]}, &reply{values: values[1+refillValues*len(calls):]}
		now := r.int()
		for i := range results {
			results[i] = decodeRefill(&calls[i], now, r, details)
		}
		err = errors.Join(r.err, details.end())
	}
	if err != nil {
		for i := range results {
			results[i] = RefillResult{Err: err}
		}
	}
}

// decodeRefill reads what the reply says of one bucket. A reply that can't be
// read is known from r and details.
func decodeRefill(c *RefillCall, now int64, r, details *reply) RefillResult {
	status, tokens, x, y, z := r.int(), r.int(), r.int(), r.int(), r.int()
	o := policy.Outcome{Status: policy.Status(status), Version: c.Version, Now: now, Last: now, Tokens: tokens}
	if status <= asExpected && c.Terms != nil {
		o.Fence = c.Terms.Fence
	}
	switch status {
	case asExpected:
		o.Status, o.Added, o.Clamped, o.Elapsed = policy.StatusApplied, x, y, z
		o.Version.Index++
		return RefillResult{Outcome: o, Full: c.Terms != nil && tokens >= c.Terms.Capacity}
	case staleExpected, earlyExpected:
		o.Status, o.Version.Index, o.Last = policy.Status(-status), x, y
		return RefillResult{Outcome: o}
	}
	o.Added, o.Clamped, o.Elapsed = x, y, z
	marks := details.int()
	o.Conflict, o.Version, o.Last = marks&markConflict != 0, policy.Version{Era: details.int(), Index: details.int()}, details.int()
	o.Fence, o.Step = policy.Fence{Epoch: details.int(), Seq: details.int()}, details.int()
	key := details.int()
	o.Outstanding, o.Due, o.Debt = details.int(), details.int(), details.int()
	result := RefillResult{Outcome: o, Full: marks&markFull != 0}
	switch {
	case o.Status < policy.StatusApplied || o.Status > policy.StatusMalformed:
		result.Err = fmt.Errorf("%w: status %d", ErrBadReply, status)
	case o.Status == policy.StatusMalformed:
		result.Err = malformed(c.Key, key)
	}
	return result
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
