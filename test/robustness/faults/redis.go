package faults

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/system"
)

// rollBack makes Redis forget all that happens while the fault lasts. A fail-over to a lagging replica does the same,
// but here all clients meet the older state at the same time.
func rollBack(e *env) func() {
	e.what.Effect = record.Rollback
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	rdb := e.Redis.Client()
	keys, err := rdb.Keys(ctx, "*").Result()
	e.must(err)
	dumps, expiries := make([]*redis.StringCmd, len(keys)), make([]*redis.DurationCmd, len(keys))
	_, err = rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		for i, key := range keys {
			dumps[i], expiries[i] = p.Dump(ctx, key), p.PExpireTime(ctx, key)
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) { // Nil: a key has expired since it was listed
		e.must(err)
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		var at *redis.TimeCmd
		_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
			at = p.Time(ctx)
			p.FlushAll(ctx)
			for i, key := range keys {
				if dump := dumps[i].Val(); dump != "" {
					p.Do(ctx, "restore", key, max(0, expiries[i].Val().Milliseconds()), dump, "absttl")
				}
			}
			return nil
		})
		e.must(err)
		e.what.Gone, e.what.At = time.Now().UnixNano(), at.Val().UnixMicro()
	}
}

// forbid sets an access list that refuses all clients the keys of one bucket.
func forbid(e *env) func() {
	forbidden := e.bucket(func(b system.Bucket) bool { return b.Kind == record.Configured })
	e.what.Effect, e.what.Key = record.Forbid, forbidden
	rules := []any{"acl", "setuser", "default", "resetkeys", "~refiller:*", "~{refiller:*"}
	for _, b := range e.Buckets {
		if b.Key != forbidden {
			rules = append(rules, "~"+b.Key, "~{"+b.Key+"}*")
		}
	}
	set := func(rules []any) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		e.must(e.Redis.Client().Do(ctx, rules...).Err())
	}
	set(rules)
	return func() { set([]any{"acl", "setuser", "default", "allkeys"}) }
}

// spoilPulse pauses etcd, so that after a while there is no leader. It also replaces the pulse by a key that can't be
// read as one.
func spoilPulse(e *env) func() {
	rdb := e.Redis.Client()
	call := func(do func(ctx context.Context) error) {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second) // longer than any fault lasts
		defer cancel()
		err := do(ctx)
		for ; err != nil && ctx.Err() == nil; err = do(ctx) { // another fault may make the server refuse writes
			time.Sleep(50 * time.Millisecond)
		}
		e.must(err)
	}
	for _, m := range e.Etcd.Members() {
		m.Pause()
	}
	var pulses []string
	call(func(ctx context.Context) error {
		keys, err := rdb.Keys(ctx, "refiller:pulse:*").Result()
		for _, key := range keys {
			if !strings.HasPrefix(key, "{") {
				pulses = append(pulses, key)
			}
		}
		return err
	})
	for _, key := range pulses {
		call(func(ctx context.Context) error {
			_, err := rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
				p.Del(ctx, key)
				p.LPush(ctx, key, "spoilt")
				return nil
			})
			return err
		})
	}
	return func() {
		if len(pulses) > 0 { // there may be none if another fault made the server forget its keys
			call(func(ctx context.Context) error { return rdb.Del(ctx, pulses...).Err() })
		}
		for _, m := range e.Etcd.Members() {
			m.Resume()
		}
	}
}
