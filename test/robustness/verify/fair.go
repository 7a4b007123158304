package verify

import (
	"maps"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

const (
	// settles is how long a bucket may still be undivided after the start, or after a fault.
	settles = 2 * time.Second
	// judged is the shortest span that is judged.
	judged = 2 * time.Second
	// awake is the longest allowed time between two samples in a span. If it is longer, the machine was too busy.
	awake = 200 * time.Millisecond
)

// endings are the operations that don't ask for tokens.
var endings = []string{record.Return, record.Settle, record.Lapse}

// checkFair checks, in the spans without a fault, that each client of a divided bucket gets its part of the tokens.
// Each client is a flow.
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

// checkParts requires that in a span each client gets at least half of its max-min part of the tokens that all clients
// got. A TakeAll that another bucket denied doesn't count.
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
