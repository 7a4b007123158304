package main

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/fetch"
)

// loadByFlow has the flows that take, and the numbers of tokens that they got. Its methods are safe for concurrent use.
type loadByFlow struct {
	opts [][]fetch.CallOption // by flow; empty if takes name no flow
	got  []atomic.Int64       // tokens by flow; empty unless --flows was given
}

// newLoadByFlow returns a loadByFlow. If flow isn't empty, all takes name that flow. Otherwise flows is the number of
// flows, and takes name one flow after the other. If flows is 0, too, takes name no flow.
func newLoadByFlow(flow string, flows int64) loadByFlow {
	if flow != "" {
		return loadByFlow{opts: [][]fetch.CallOption{{fetch.WithFlow(flow)}}}
	}
	l := loadByFlow{got: make([]atomic.Int64, flows)}
	for i := range flows {
		l.opts = append(l.opts, []fetch.CallOption{fetch.WithFlow("load-" + strconv.FormatInt(i+1, 10))})
	}
	return l
}

// options returns the options of a take. turn is the number of takes that began before it.
func (l *loadByFlow) options(turn int64) []fetch.CallOption {
	if len(l.opts) == 0 {
		return nil
	}
	return l.opts[turn%int64(len(l.opts))]
}

// add counts the tokens that the take with that turn got.
func (l *loadByFlow) add(turn int64, r fetch.Result) {
	if len(l.got) > 0 {
		l.got[turn%int64(len(l.got))].Add(r.Taken)
	}
}

// parts has the rates that the flows of a run got, in tokens per second.
type parts struct {
	Flows int     `json:"flows"`
	Least float64 `json:"least_per_s"`
	Mean  float64 `json:"mean_per_s"`
	Most  float64 `json:"most_per_s"`
}

// report returns the rates of the flows during the time elapsed. It returns nil unless --flows was given.
func (l *loadByFlow) report(elapsed time.Duration) *parts {
	if len(l.got) == 0 {
		return nil
	}
	least := l.got[0].Load()
	most, sum := int64(0), int64(0)
	for i := range l.got {
		n := l.got[i].Load()
		least = min(least, n)
		most = max(most, n)
		sum += n
	}
	rate := func(tokens float64) float64 { return tokens / elapsed.Seconds() }
	return &parts{len(l.got), rate(float64(least)), rate(float64(sum) / float64(len(l.got))), rate(float64(most))}
}
