package traffic

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// The callers in this file are programs without the SDK. They use a bucket's tokens and index with plain commands, each
// in its own round trip. So other clients may read the state between two of the commands.

// takePlain takes single tokens with DECR. If there was no token, it undoes that with INCR.
func (c *caller) takePlain(ctx context.Context) {
	for c.pause(ctx, c.t.cfg.Pace) {
		op := record.Op{Client: c.name + "/plain", Kind: record.Take, Key: c.key, N: 1}
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.t.deadline())
		op.Call = time.Now().UnixNano()
		left, err := c.rdb.Decr(callCtx, lua.TokensKey(c.key)).Result()
		if err == nil && left < 0 {
			// The bucket lacks a token until the INCR was carried out.
			for err = c.rdb.Incr(callCtx, lua.TokensKey(c.key)).Err(); err != nil && neverRan(err) &&
				ctx.Err() == nil; {
				c.pause(ctx, 10*time.Millisecond)
				err = c.rdb.Incr(ctx, lua.TokensKey(c.key)).Err()
			}
		}
		cancel()
		if err == nil && left >= 0 {
			op.Taken, op.Left = 1, left
		}
		c.finish(&op, op.Taken == 1, err)
		c.t.ops.Add(op)
	}
}

// addPlain adds the tokens of a refill interval, one interval after each reply, if no other client has changed the
// index meanwhile. It increments the index. If the index isn't the expected one, it undoes that. Otherwise it adds the
// tokens, up to the capacity.
func (c *caller) addPlain(ctx context.Context, terms policy.Terms) {
	interval := time.Duration(terms.Interval) * time.Microsecond
	n := terms.Tokens * terms.Interval / terms.Per
	expected := int64(0)
	for timing.Sleep(ctx.Done(), interval) {
		op := record.Op{Client: c.name + "/adder", Kind: record.Add, Key: c.key, N: n}
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.t.deadline())
		op.Call = time.Now().UnixNano()
		added, index, err := plainAdd(callCtx, c.rdb, c.key, expected, n, terms.Capacity)
		cancel()
		expected = index
		c.finish(&op, added, err)
		c.t.ops.Add(op)
	}
}

func plainAdd(ctx context.Context, rdb redis.UniversalClient, key string, expected, n, limit int64) (added bool,
	index int64, err error) {
	index, err = rdb.Incr(ctx, lua.IndexKey(key)).Result()
	if err != nil {
		return false, 0, err
	}
	if index != expected+1 {
		index, err = rdb.Decr(ctx, lua.IndexKey(key)).Result()
		return false, index, err
	}
	tokens, err := rdb.IncrBy(ctx, lua.TokensKey(key), n).Result()
	if err == nil && tokens > limit {
		err = rdb.DecrBy(ctx, lua.TokensKey(key), tokens-limit).Err()
	}
	return true, index, err
}
