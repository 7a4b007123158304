package verify

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

const (
	// settles is how long after a fault, or the start, a bucket may still serve takes as they come.
	settles = 2 * time.Second
	// judged is the shortest span whose takes are counted.
	judged = 2 * time.Second
	// awake is the longest time between two samples of a machine that is not too busy to judge by.
	awake = 200 * time.Millisecond
)

// endings are operations that ask for nothing.
var endings = []string{record.Return, record.Settle, record.Lapse}

// checkFair counts what each client of a divided bucket, which is a flow, gets of what it asks for while nothing is
// wrong. A TakeAll that another bucket denies asks for nothing.
func (h *bucketHistory) checkFair(r *Result) {
	if !h.bucket.Divided() || len(h.samples) == 0 {
		return
	}
	begins := []int64{h.samples[0].Got}
	for _, f := range h.faults {
		begins = append(begins, f.End)
	}
	for _, begin := range begins {
		from, to := begin+int64(settles), h.disturbed(begin)
		if to-from >= int64(judged) && h.sampleGap(from, to) <= awake {
			h.checkParts(r, from, to)
		}
	}
}

// checkParts requires that in a span each client gets half of its max-min part of what all of them got.
func (h *bucketHistory) checkParts(r *Result, from, to int64) {
	asked, got := map[string]int64{}, map[string]int64{}
	all := int64(0)
	for _, op := range h.ops {
		if op.Call < from || op.Return > to || op.Other || slices.Contains(endings, op.Kind) {
			continue
		}
		asked[op.Client] += op.N
		got[op.Client] += op.Taken
		all += op.Taken
	}
	clients := slices.Sorted(maps.Keys(asked))
	demands := make([]policy.Bounds, len(clients))
	for i, client := range clients {
		demands[i] = policy.Bounds{Name: client, Weight: 1, Most: asked[client]}
	}
	for i, part := range policy.MaxMin(all, demands) {
		if client := clients[i]; got[client] < part/2 {
			r.violate(Fair, h.bucket.Key, "%s got %d of the %d tokens that it asked for in %s; its part is %d", client,
				got[client], asked[client], time.Duration(to-from), part)
		}
	}
}
