package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

const (
	// footprintKeys is the largest number of buckets whose memory is measured.
	footprintKeys = 1000
	// sampled is the number of takes of a fast contender that are timed together.
	sampled = 64
	// longestTake is the largest latency in the histograms. A longer latency counts as this one.
	longestTake = 10 * time.Second
)

// sample has the results of one run.
type sample struct {
	PerSecond  float64 `json:"takes_per_second"`
	P50        float64 `json:"p50_us"`
	P99        float64 `json:"p99_us"`
	ClientCPU  float64 `json:"client_cpu_s_per_million"`
	RedisCPU   float64 `json:"redis_cpu_s_per_million"`
	Commands   float64 `json:"redis_commands_per_take"`
	Reads      float64 `json:"redis_reads_per_take"`
	ErrorShare float64 `json:"error_share"`
}

// entrant is a contender in a workload.
type entrant struct {
	contender
	*session
	bytes float64 // memory per key
}

// measure runs a workload with each number of goroutines, and reports each cell as soon as it is done.
func measure(ctx context.Context, s *server, w workload, goroutines []int, o options, report func(cell)) (err error) {
	if err := s.rdb.FlushAll(ctx).Err(); err != nil {
		return err
	}
	if w.trip > 0 {
		far, stop, err := s.behind(w.trip)
		if err != nil {
			return err
		}
		defer func() { _ = stop() }()
		s = far
	}
	var entrants []*entrant
	defer func() {
		for _, e := range entrants {
			err = errors.Join(err, e.close())
		}
	}()
	bytes, err := footprints(ctx, s, w, o)
	if err != nil {
		return err
	}
	for _, c := range chosen(w, o) {
		session, err := c.open(ctx, s, w, c.keys(w))
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		entrants = append(entrants, &entrant{contender: c, session: session, bytes: bytes[c.name]})
	}
	for _, n := range goroutines {
		c := cell{Workload: w.name, Title: w.title, Goroutines: n}
		for _, e := range entrants {
			c.Contenders = append(c.Contenders, figures{Name: e.name, BytesPerKey: e.bytes})
		}
		team := newTeam(n)
		for round := range o.rounds + 1 {
			for i := range entrants {
				i = (i + round) % len(entrants)
				got, err := team.run(ctx, s, w, entrants[i], o.time)
				if err != nil {
					return fmt.Errorf("%s, %d goroutines: %w", entrants[i].name, n, err)
				}
				if round > 0 { // the first round isn't counted
					c.Contenders[i].Samples = append(c.Contenders[i].Samples, got)
				}
			}
		}
		c.summarise()
		report(c)
	}
	return nil
}

// chosen returns the contenders of a workload.
func chosen(w workload, o options) []contender {
	var out []contender
	for _, c := range contenders() {
		if (c.skip == nil || !c.skip(w)) && (len(w.only) == 0 || slices.Contains(w.only, c.name)) &&
			(c.name == baseline || o.only.MatchString(c.name)) {
			out = append(out, c)
		}
	}
	return out
}

// keys returns the workload's keys. The contender's name is their prefix, because all contenders share one server.
func (c contender) keys(w workload) []string {
	names := w.names()
	for i := range names {
		names[i] = c.name + ":" + names[i]
	}
	return names
}

// footprints measures the memory of a key, for each contender.
func footprints(ctx context.Context, s *server, w workload, o options) (map[string]float64, error) {
	out := make(map[string]float64)
	if w.trip > 0 {
		return out, nil // the same keys are measured in another workload
	}
	w.keys = min(w.keys, footprintKeys)
	for _, c := range chosen(w, o) {
		session, err := c.open(ctx, s, w, c.keys(w))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", c.name, err)
		}
		for key := range w.keys {
			if _, err := session.take(ctx, key); err != nil {
				return nil, errors.Join(fmt.Errorf("%s: %w", c.name, err), session.close())
			}
		}
		total := int64(0)
		keys := s.rdb.Scan(ctx, 0, "", 1000).Iterator()
		for keys.Next(ctx) {
			n, err := s.rdb.MemoryUsage(ctx, keys.Val(), 0).Result()
			if err != nil {
				return nil, fmt.Errorf("memory usage: %w", err)
			}
			total += n
		}
		out[c.name] = float64(total) / float64(w.keys)
		if err := errors.Join(keys.Err(), session.close(), s.rdb.FlushDB(ctx).Err()); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// team is a group of goroutines that make takes. Each has its own histogram.
type team struct {
	members []*hdrhistogram.Histogram // ns
	errors  atomic.Int64
	takes   atomic.Int64
}

func newTeam(goroutines int) *team {
	t := &team{members: make([]*hdrhistogram.Histogram, goroutines)}
	for i := range t.members {
		t.members[i] = hdrhistogram.New(100, longestTake.Nanoseconds(), 2)
	}
	return t
}

// run measures the takes that all members make during d. Before that, one token is taken from each key, and then all
// members take for d/2 to warm up.
func (t *team) run(ctx context.Context, s *server, w workload, e *entrant, d time.Duration) (sample, error) {
	// The context can be cancelled, as the context of a request to a server can.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	touch(ctx, w, e.session)
	t.takeFor(ctx, w, e.session, d/2)
	runtime.GC() // garbage of earlier runs must not slow this run
	before, err := s.usage(ctx)
	if err != nil {
		return sample{}, err
	}
	took := t.takeFor(ctx, w, e.session, d)
	after, err := s.usage(ctx)
	if err != nil {
		return sample{}, err
	}
	return t.sample(after.since(before), took.Seconds(), max(e.batch, 1)), nil
}

// touch takes once from each key. A contender may make additional calls at the first take from a key, or at the first
// take after a pause. After touch, it doesn't make these calls during the measured run.
func touch(ctx context.Context, w workload, s *session) {
	if w.trip > 0 {
		return // it would take too long
	}
	const at = 64 // number of goroutines
	var wg sync.WaitGroup
	for i := range at {
		wg.Go(func() {
			for key := i; key < w.keys; key += at {
				_, _ = s.take(ctx, key) // an error is ignored: the measured run counts errors
			}
		})
	}
	wg.Wait()
}

// takeFor makes all members take for about d, and returns the actual time.
func (t *team) takeFor(ctx context.Context, w workload, s *session, d time.Duration) time.Duration {
	t.errors.Store(0)
	t.takes.Store(0)
	for _, m := range t.members {
		m.Reset()
	}
	var (
		stop atomic.Bool
		wg   sync.WaitGroup
	)
	begin := time.Now()
	for i, m := range t.members {
		wg.Go(func() { t.take(ctx, w.walk(i), s, m, &stop) })
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	stop.Store(true)
	wg.Wait()
	return time.Since(begin)
}

// take takes until stop is set.
func (t *team) take(ctx context.Context, walk walk, s *session, histogram *hdrhistogram.Histogram, stop *atomic.Bool) {
	takes, failed := int64(0), int64(0)
	timed := 1
	if s.fast {
		timed = sampled
	}
	for !stop.Load() {
		begin := time.Now()
		for range timed {
			takes++
			if _, err := s.take(ctx, walk.next()); err != nil {
				failed++
			}
		}
		_ = histogram.RecordValue(min(time.Since(begin)/time.Duration(timed), longestTake).Nanoseconds())
	}
	t.takes.Add(takes)
	t.errors.Add(failed)
}

// sample converts the counts of a run to figures.
func (t *team) sample(spent usage, seconds float64, batch int) sample {
	all := hdrhistogram.New(100, longestTake.Nanoseconds(), 2)
	for _, m := range t.members {
		all.Merge(m)
	}
	answered := float64(t.takes.Load()-t.errors.Load()) * float64(batch)
	if answered == 0 {
		return sample{ErrorShare: 1}
	}
	const million = 1e6
	micros := func(q float64) float64 { return float64(all.ValueAtQuantile(q)) / 1e3 }
	return sample{
		PerSecond: answered / seconds, P50: micros(50), P99: micros(99),
		ClientCPU: spent.clientCPU / answered * million, RedisCPU: spent.redisCPU / answered * million,
		Commands: spent.commands / answered, Reads: spent.reads / answered,
		ErrorShare: float64(t.errors.Load()) / float64(t.takes.Load()),
	}
}
