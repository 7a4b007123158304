package main

import (
	"context"

	"github.com/redis/go-redis/v9"
	"golang.org/x/time/rate"
)

// floors returns the contenders that show the lowest possible cost: a minimal script, bare commands, and a limiter
// without a server.
func floors() []contender {
	return []contender{
		{name: "EVALSHA", open: openEvalsha(direct)},
		{name: "EVALSHA, auto-pipelined", open: openEvalsha(autoPipelined)},
		{name: "DECR", open: openDecr, skip: neverDenied},
		{name: "DECR, 100 a pipeline", open: openPipelinedDecr, skip: neverDenied},
		{name: "x/time/rate", open: openTimeRate},
	}
}

// bareTake is a minimal script for a take.
var bareTake = redis.NewScript(`local left = redis.call('DECRBY', KEYS[1], ARGV[1])
if left < 0 then redis.call('INCRBY', KEYS[1], ARGV[1]) end
return left`)

func direct(rdb *redis.Client) (redis.Scripter, error) { return rdb, nil }

func autoPipelined(rdb *redis.Client) (redis.Scripter, error) { return rdb.AutoPipeline() }

func openEvalsha(way func(*redis.Client) (redis.Scripter, error)) opener {
	return func(ctx context.Context, s *server, w workload, names []string) (*session, error) {
		rdb, err := openBare(ctx, s, w, names)
		if err != nil {
			return nil, err
		}
		scripter, err := way(rdb)
		if err != nil {
			return nil, err
		}
		take := func(ctx context.Context, key int) (bool, error) {
			left, err := bareTake.EvalSha(ctx, scripter, []string{names[key]}, 1).Int64()
			return left >= 0, err
		}
		return &session{take: take, close: rdb.Close}, nil
	}
}

func openDecr(ctx context.Context, s *server, w workload, names []string) (*session, error) {
	rdb, err := openBare(ctx, s, w, names)
	if err != nil {
		return nil, err
	}
	take := func(ctx context.Context, key int) (bool, error) {
		left, err := rdb.Decr(ctx, names[key]).Result()
		return left >= 0, err
	}
	return &session{take: take, close: rdb.Close}, nil
}

func openPipelinedDecr(ctx context.Context, s *server, w workload, names []string) (*session, error) {
	rdb, err := openBare(ctx, s, w, names)
	if err != nil {
		return nil, err
	}
	const batch = 100
	take := func(ctx context.Context, key int) (bool, error) {
		pipe := rdb.Pipeline()
		for i := range batch {
			pipe.Decr(ctx, names[(key+i)%len(names)])
		}
		_, err := pipe.Exec(ctx)
		return true, err
	}
	return &session{take: take, batch: batch, close: rdb.Close}, nil
}

// openBare makes a client and creates the keys for the bare commands.
func openBare(ctx context.Context, s *server, w workload, names []string) (*redis.Client, error) {
	rdb := redis.NewClient(s.clientOptions())
	if err := bareTake.Load(ctx, rdb).Err(); err != nil {
		return nil, err
	}
	tokens := w.tokens()
	if w.denied {
		tokens = 0
	}
	_, err := rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, name := range names {
			p.Set(ctx, name, tokens, 0)
		}
		return nil
	})
	return rdb, err
}

func openTimeRate(_ context.Context, _ *server, w workload, names []string) (*session, error) {
	limiters := make([]*rate.Limiter, len(names))
	for i := range limiters {
		limiters[i] = rate.NewLimiter(rate.Every(hour), w.tokens())
	}
	take := func(_ context.Context, key int) (bool, error) { return limiters[key].Allow(), nil }
	return &session{take: take, fast: true, close: nothing}, nil
}
