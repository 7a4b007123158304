package main

import (
	"strconv"
	"time"
)

// workload is what the goroutines of a run take from.
type workload struct {
	name       string
	title      string
	keys       int
	denied     bool // the keys have no tokens
	goroutines []int
	trip       time.Duration // to the server and back, beside its own time
	only       []string      // contenders; empty: all
}

var workloads = []workload{
	{name: "hot", title: "hot key", keys: 1, goroutines: []int{1, 16, 64, 256, 1024}},
	{name: "many", title: "10,000 keys", keys: 10_000, goroutines: []int{1, 16, 64, 256}},
	{name: "denied", title: "denied hot key", keys: 1, denied: true, goroutines: []int{1, 16, 64, 256}},
	{name: "far", title: "10,000 keys, 20 ms away", keys: 10_000, trip: 20 * time.Millisecond, goroutines: []int{64},
		only: []string{
			merged, asGiven, "EVALSHA", piped, rueidi, baseline,
		}},
	stalled,
}

// stalled is of a process that is stopped part of the time.
var stalled = workload{name: "stalled", title: "100 keys", keys: 100, goroutines: []int{20}, only: []string{
	merged, asGiven, "fetch, leased", "EVALSHA", rueidi, baseline,
}}

const (
	// plenty is a number of tokens that no run uses up and that every contender
	// can count, an hour's worth.
	plenty = 1_000_000_000
	hour   = time.Hour
)

// tokens is how many tokens a key has for each hour, and how many at first.
func (w workload) tokens() int {
	if w.denied {
		return 1
	}
	return plenty
}

// names are the keys.
func (w workload) names() []string {
	names := make([]string, w.keys)
	for i := range names {
		names[i] = "bench:" + w.name + ":" + strconv.Itoa(i)
	}
	return names
}

// walk yields the keys of one goroutine: all of them, in an order of its own.
type walk struct{ at, step, keys int }

func (w workload) walk(goroutine int) walk {
	return walk{at: goroutine * 7919 % w.keys, step: 7, keys: w.keys} // 7 and 10,000 have no common divisor
}

func (w *walk) next() int {
	w.at += w.step
	for w.at >= w.keys {
		w.at -= w.keys
	}
	return w.at
}
