package main

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"
)

type bw struct {
	ch   chan int
	lead bool
	left int64
}
type bareQ struct {
	mu      sync.Mutex
	busy    bool
	wait    []*bw
	spare   []*bw
	pool    sync.Pool
	rdb     *redis.Client
	key     string
}

func (q *bareQ) take(ctx context.Context) (bool, error) {
	q.mu.Lock()
	if q.busy {
		w, ok := q.pool.Get().(*bw)
		if !ok {
			w = &bw{ch: make(chan int, 1)}
		}
		q.wait = append(q.wait, w)
		q.mu.Unlock()
		lead := <-w.ch
		left := w.left
		q.pool.Put(w)
		if lead == 0 {
			return left >= 0, nil
		}
	} else {
		q.busy = true
		q.mu.Unlock()
	}
	q.mu.Lock()
	batch := q.wait
	q.wait = q.spare[:0]
	q.mu.Unlock()
	left, err := bareTake.EvalSha(ctx, q.rdb, []string{q.key}, len(batch)+1).Int64()
	for i, w := range batch {
		w.left = left + int64(i)
		w.ch <- 0
	}
	q.mu.Lock()
	q.spare = batch
	if len(q.wait) > 0 {
		w := q.wait[0]
		q.wait = q.wait[1:]
		q.mu.Unlock()
		w.ch <- 1
	} else {
		q.busy = false
		q.mu.Unlock()
	}
	return left >= 0, err
}

func bareContender() contender {
	return contender{name: "bare", open: func(ctx context.Context, s *server, w workload, names []string) (*session, error) {
		rdb, err := openBare(ctx, s, w, names)
		if err != nil {
			return nil, err
		}
		q := &bareQ{rdb: rdb, key: names[0]}
		return &session{take: func(ctx context.Context, key int) (bool, error) { return q.take(ctx) }, close: rdb.Close}, nil
	}}
}
