package lua

import (
	"context"
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
	Err error
}

const (
	refillArgs   = 6  // per bucket
	refillValues = 14 // per bucket
)

// Refill refills one bucket. A malformed bucket is an outcome as well as an
// ErrMalformedBucket.
func Refill(ctx context.Context, c Client, key string, call policy.Call) (policy.Outcome, error) {
	calls := []RefillCall{{Key: key, Call: call}}
	keys, args := refillArguments(calls)
	v, err := refillScript.run(ctx, c, keys, args...)
	if err != nil {
		return policy.Outcome{}, err
	}
	results := make([]RefillResult, 1)
	decodeRefills(v, calls, results)
	return results[0].Outcome, results[0].Err
}

// RefillBatch refills many buckets in one round trip, perCall of them in each
// script call, at least 1. On a Cluster perCall must be 1, since buckets differ
// in slot. An
// error is each bucket's own; the results are in the order of the calls.
func RefillBatch(ctx context.Context, rdb redis.UniversalClient, calls []RefillCall, perCall int) []RefillResult {
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
	var parts []part
	for from := 0; from < len(calls); from += perCall {
		to := min(from+perCall, len(calls))
		keys, args := refillArguments(calls[from:to])
		parts = append(parts, part{from, to, keys, args})
	}

	send := func(parts []part, make func(context.Context, []string, []any) once) (unknown []part) {
		pipe := rdb.Pipeline()
		cmds := []once{}
		for _, p := range parts {
			cmd := make(ctx, p.keys, p.args)
			cmds = append(cmds, cmd)
			_ = pipe.Process(ctx, cmd) // queues
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

func refillArguments(calls []RefillCall) (keys []string, args []any) {
	keys = make([]string, 0, 3*len(calls))
	args = make([]any, 0, refillArgs*len(calls))
	for _, c := range calls {
		keys = append(keys, TokensKey(c.Key), IndexKey(c.Key))
	}
	for _, c := range calls {
		terms := ""
		if c.Terms != nil {
			terms = c.Terms.Encode()
		}
		keys = append(keys, ControlKey(c.Key))
		args = append(args, c.Version.Era, c.Version.Index, int64(c.Create), terms, c.Step, c.Next)
	}
	return keys, args
}

func decodeRefills(v any, calls []RefillCall, results []RefillResult) {
	values, ok := v.([]any)
	if !ok || len(values) != refillValues*len(calls) {
		for i := range results {
			results[i].Err = fmt.Errorf("%w: %T of %d values for %d refills", ErrBadReply, v, len(values), len(calls))
		}
		return
	}
	for i := range results {
		r := &reply{values: values[refillValues*i : refillValues*(i+1)]}
		o := policy.Outcome{
			Status: policy.Status(r.int()), Conflict: r.int() == 1, Version: policy.Version{Era: r.int(), Index: r.int()},
			Now: r.int(), Last: r.int(), Tokens: r.int(), Added: r.int(), Clamped: r.int(), Elapsed: r.int(),
			Fence: policy.Fence{Epoch: r.int(), Seq: r.int()}, Step: r.int(),
		}
		key, err := r.int(), r.end()
		if err == nil && (o.Status < policy.StatusApplied || o.Status > policy.StatusMalformed) {
			err = fmt.Errorf("%w: status %d", ErrBadReply, o.Status)
		}
		if err == nil && o.Status == policy.StatusMalformed {
			err = malformed(calls[i].Key, key)
		}
		results[i] = RefillResult{Outcome: o, Err: err}
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
