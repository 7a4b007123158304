package main

import (
	"strconv"
	"time"
)

// workload describes the keys from which the goroutines of a run take.
type workload struct {
	name       string
	title      string
	keys       int
	denied     bool // the keys have no tokens
	goroutines []int
	trip       time.Duration // additional time of a round trip to the server
	only       []string      // names of the contenders that run it; empty: all
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

// stalled is the workload of a process that is stopped part of the time.
var stalled = workload{name: "stalled", title: "100 keys", keys: 100, goroutines: []int{20}, only: []string{
	merged, asGiven, "fetch, leased", "EVALSHA", rueidi, baseline,
}}

const (
	// plenty is the number of tokens per hour. No run takes so many, and it isn't too large for any contender.
	plenty = 1_000_000_000
	hour   = time.Hour
)

// tokens returns the number of tokens that a key gets per hour, and has at the beginning.
func (w workload) tokens() int {
	if w.denied {
		return 1
	}
	return plenty
}

// names returns the keys.
func (w workload) names() []string {
	names := make([]string, w.keys)
	for i := range names {
		names[i] = "bench:" + w.name + ":" + strconv.Itoa(i)
	}
	return names
}

// walk goes through the numbers of all keys again and again. It starts with a different key for each goroutine.
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
