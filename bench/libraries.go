package main

import (
	"context"
	"fmt"

	"github.com/go-redis/redis_rate/v10"
	"github.com/gomodule/redigo/redis"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislimiter"
	"github.com/sethvargo/go-redisstore"
	"github.com/throttled/throttled/v2"
	throttledredis "github.com/throttled/throttled/v2/store/goredisstore.v9"
	"github.com/ulule/limiter/v3"
	limiterredis "github.com/ulule/limiter/v3/drivers/store/redis"
	"github.com/zeromicro/go-zero/core/limit"
	"github.com/zeromicro/go-zero/core/logx"
	zeroredis "github.com/zeromicro/go-zero/core/stores/redis"
)

// libraries returns other rate limiters that keep their state in Redis. Each has the workload's tokens per hour, or the
// nearest rate that it supports. Each creates its keys itself.
func libraries() []contender {
	return []contender{
		{name: baseline, open: openRedisRate},
		{name: "throttled", open: openThrottled},
		{name: "ulule/limiter", open: openUlule},
		{name: "go-zero token", open: openZeroToken},
		{name: "go-zero period", open: openZeroPeriod},
		{name: "rueidislimiter", open: openRueidis},
		{name: "go-redisstore", open: openRedisStore},
	}
}

func openRedisRate(_ context.Context, s *server, w workload, names []string) (*session, error) {
	rdb := goredis.NewClient(s.clientOptions())
	limiter := redis_rate.NewLimiter(rdb)
	limit := redis_rate.Limit{Rate: w.tokens(), Burst: w.tokens(), Period: hour}
	take := func(ctx context.Context, key int) (bool, error) {
		r, err := limiter.Allow(ctx, names[key], limit)
		if err != nil {
			return false, err
		}
		return r.Allowed > 0, nil
	}
	return &session{take: take, close: rdb.Close}, nil
}

func openThrottled(_ context.Context, s *server, w workload, names []string) (*session, error) {
	rdb := goredis.NewClient(s.clientOptions())
	store, err := throttledredis.NewCtx(rdb, "throttled:")
	if err != nil {
		return nil, err
	}
	limiter, err := throttled.NewGCRARateLimiterCtx(store,
		throttled.RateQuota{MaxRate: throttled.PerDuration(w.tokens(), hour), MaxBurst: w.tokens() - 1})
	if err != nil {
		return nil, err
	}
	take := func(ctx context.Context, key int) (bool, error) {
		limited, _, err := limiter.RateLimitCtx(ctx, names[key], 1)
		return !limited, err
	}
	return &session{take: take, close: rdb.Close}, nil
}

func openUlule(_ context.Context, s *server, w workload, names []string) (*session, error) {
	rdb := goredis.NewClient(s.clientOptions())
	store, err := limiterredis.NewStoreWithOptions(rdb, limiter.StoreOptions{Prefix: "ulule"})
	if err != nil {
		return nil, err
	}
	l := limiter.New(store, limiter.Rate{Limit: int64(w.tokens()), Period: hour})
	take := func(ctx context.Context, key int) (bool, error) {
		r, err := l.Get(ctx, names[key])
		return !r.Reached, err
	}
	return &session{take: take, close: rdb.Close}, nil
}

// openZeroToken opens a limiter of go-zero, which supports only rates per second. go-zero has one client for each
// address, and never closes it.
func openZeroToken(_ context.Context, s *server, w workload, names []string) (*session, error) {
	logx.Disable()
	rdb, err := zeroredis.NewRedis(zeroredis.RedisConf{Host: s.addr, Type: zeroredis.NodeType})
	if err != nil {
		return nil, err
	}
	limiters := make([]*limit.TokenLimiter, len(names))
	for i, name := range names {
		limiters[i] = limit.NewTokenLimiter(min(w.tokens(), 1_000_000), w.tokens(), rdb, "zero-token:"+name)
	}
	take := func(ctx context.Context, key int) (bool, error) { return limiters[key].AllowCtx(ctx), nil }
	return &session{take: take, close: nothing}, nil
}

func openZeroPeriod(_ context.Context, s *server, w workload, names []string) (*session, error) {
	logx.Disable()
	rdb, err := zeroredis.NewRedis(zeroredis.RedisConf{Host: s.addr, Type: zeroredis.NodeType})
	if err != nil {
		return nil, err
	}
	limiter := limit.NewPeriodLimit(int(hour.Seconds()), w.tokens(), rdb, "zero-period:")
	take := func(ctx context.Context, key int) (bool, error) {
		code, err := limiter.TakeCtx(ctx, names[key])
		return code == limit.Allowed || code == limit.HitQuota, err
	}
	return &session{take: take, close: nothing}, nil
}

func openRueidis(_ context.Context, s *server, w workload, names []string) (*session, error) {
	client, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{s.addr}})
	if err != nil {
		return nil, err
	}
	limiter, err := rueidislimiter.NewRateLimiter(rueidislimiter.RateLimiterOption{
		ClientBuilder: func(rueidis.ClientOption) (rueidis.Client, error) { return client, nil },
		Limit:         w.tokens(), Window: hour,
	})
	if err != nil {
		return nil, err
	}
	take := func(ctx context.Context, key int) (bool, error) {
		r, err := limiter.Allow(ctx, names[key])
		return r.Allowed, err
	}
	return &session{take: take, close: func() error {
		client.Close()
		return nil
	}}, nil
}

// openRedisStore opens a limiter of go-redisstore with a connection pool like go-redis' pool. With its default pool it
// would open a connection for each take, and fail with more than a hundred takes at once.
func openRedisStore(_ context.Context, s *server, w workload, names []string) (*session, error) {
	size := s.rdb.Options().PoolSize
	pool := &redis.Pool{
		MaxIdle: size, MaxActive: size, Wait: true,
		Dial: func() (redis.Conn, error) { return redis.Dial("tcp", s.addr) },
	}
	store, err := redisstore.NewWithPool(&redisstore.Config{Tokens: uint64(w.tokens()), Interval: hour}, pool)
	if err != nil {
		return nil, fmt.Errorf("redisstore: %w", err)
	}
	prefixed := make([]string, len(names))
	for i, name := range names {
		prefixed[i] = "redisstore:" + name
	}
	take := func(ctx context.Context, key int) (bool, error) {
		_, _, _, ok, err := store.Take(ctx, prefixed[key])
		return ok, err
	}
	return &session{take: take, close: func() error { return store.Close(context.Background()) }}, nil
}

func nothing() error { return nil }
