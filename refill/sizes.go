package refill

import (
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// scriptBudget is the time for which a script call may block its server, if its buckets are in the state that the
	// caller remembers. If all of them need the script's complete rules, for example after a change of policies, the call
	// may take 1 ms, four times as long.
	scriptBudget = 250 * time.Microsecond
	// firstPerCall is the number of buckets that share a script call before the server's speed is known. maxPerCall is the
	// highest number, because more buckets in a call would save the server nothing.
	firstPerCall = 20
	maxPerCall   = 50
	// batchShare is a divisor of a batch's timeout. A batch may keep the server busy for that part of the timeout.
	batchShare = 10
)

// sizes limits the script calls to one server, so that no call blocks it for long. It also limits the batches, so that
// a slow server answers in time. Every reply has the server's time at the beginning of its script call. So the replies
// to a batch show how long each of its calls took, however slow the network is.
type sizes struct {
	most    int           // buckets in a batch
	timeout time.Duration // of a batch
	cost    time.Duration // per bucket, smoothed; 0 while unknown
	limit   int           // buckets in a batch, less than most after failures
}

func newSizes(most int, timeout time.Duration) *sizes {
	return &sizes{most: most, timeout: timeout, limit: most}
}

// perCall returns how many buckets may share a script call.
func (s *sizes) perCall() int {
	if s.cost == 0 {
		return firstPerCall
	}
	return int(min(max(scriptBudget/s.cost, 1), maxPerCall))
}

// batch returns how many buckets may go in one round trip.
func (s *sizes) batch() int {
	if s.cost == 0 {
		return s.limit
	}
	return min(s.limit, int(max(s.timeout/batchShare/s.cost, 1)))
}

// failed records that a batch of n buckets got no reply. The next batch has half as many buckets, because the server
// may have been too slow.
func (s *sizes) failed(n int) { s.limit = max(1, min(s.limit, n)/2) }

// answered applies the replies to a batch.
func (s *sizes) answered(results []lua.RefillResult) {
	s.limit = min(s.most, 2*s.limit)
	cost := costOf(results)
	switch {
	case cost == 0:
	case s.cost == 0:
		s.cost = cost
	default:
		// One measurement changes the cost by a limited amount, because the server may only have lacked processor time.
		s.cost += (min(max(cost, s.cost/2), 2*s.cost) - s.cost) / 4
	}
}

// costOf returns the median time per bucket of the batch's script calls; 0 if there was only one call. The buckets of
// one call have the same time.
func costOf(results []lua.RefillResult) time.Duration {
	var costs []time.Duration
	from := 0
	for i := 1; i < len(results); i++ {
		before, now := &results[i-1], &results[i]
		switch {
		case before.Err != nil || now.Err != nil:
			from = i // the time of a failed call is unknown
		case now.Now != before.Now:
			if d := time.Duration(now.Now-before.Now) * time.Microsecond; d > 0 {
				costs = append(costs, max(d/time.Duration(i-from), 1))
			}
			from = i
		}
	}
	if len(costs) == 0 {
		return 0
	}
	slices.Sort(costs)
	return costs[len(costs)/2]
}
