package refill

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/lua"
)

// trip is a round trip of refills: the calls and their replies.
type trip struct {
	calls         []lua.RefillCall
	perCall       int // buckets that share a script call
	results       []lua.RefillResult
	sent, replied time.Time
	swept         []swept
	divided       []divided
}

// refillFunc refills buckets, perCall of them in a script call: see store.
type refillFunc func(ctx context.Context, calls []lua.RefillCall, perCall int) []lua.RefillResult

// newTrip returns a trip with room for n calls. It reuses a trip that has ended, if there is one.
func (w *worker) newTrip(n, perCall int) *trip {
	t := &trip{}
	if last := len(w.ended) - 1; last >= 0 {
		t, w.ended = w.ended[last], w.ended[:last]
	}
	*t = trip{calls: slices.Grow(t.calls[:0], n)[:n], perCall: perCall}
	return t
}

// run refills the buckets through refill. Then it ends expired reservations and writes the plans of flows. Each of
// these three steps may take as long as within. If a script call fails half-way, run calls the script once for each
// bucket of that call. A bucket that was refilled already is not refilled again, because its index has changed.
func (t *trip) run(ctx context.Context, within time.Duration, store store, refill refillFunc) {
	refillCtx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	t.sent = time.Now()
	t.results = lua.EachAlone(t.calls, t.perCall, func(calls []lua.RefillCall, perCall int) []lua.RefillResult {
		return refill(refillCtx, calls, perCall)
	}, func(r *lua.RefillResult) error { return r.Err })
	t.replied = time.Now()
	sweepCtx, cancelSweep := context.WithTimeout(ctx, within)
	defer cancelSweep()
	t.sweep(sweepCtx, store)
	planCtx, cancelPlan := context.WithTimeout(ctx, within)
	defer cancelPlan()
	t.plan(planCtx, store)
}

// event returns the event of the i-th reply, for observers.
func (t *trip) event(i int) Event {
	call, result := &t.calls[i], &t.results[i]
	return Event{
		Key: call.Key, Sent: t.sent, Replied: t.replied, Call: call.Call, Outcome: result.Outcome, Err: result.Err,
		Flows: t.flowsRead(i),
	}
}

// serverError returns why the server answered none of the calls; nil if it answered at least one, even with a refusal.
func (t *trip) serverError() (err error) {
	for i := range t.results {
		if t.results[i].Err == nil || ownFault(t.results[i].Err) {
			return nil
		}
		err = t.results[i].Err
	}
	return err
}

// ownFault reports whether the cause of an error is the bucket, and not its server.
func ownFault(err error) bool {
	return errors.Is(err, lua.ErrMalformedBucket) || errors.Is(err, lua.ErrBadReply) || lua.Refuses(err)
}

const (
	// sweptOfBucket is the most records of a bucket that one script call ends. More would block the server for long.
	sweptOfBucket = 100
	// sweptAtOnce is the most records that one round trip ends, unless it has more buckets: each bucket ends at least one.
	// Otherwise takes would wait for long, because a server runs the commands of a pipeline one after the other.
	sweptAtOnce = 1000
)

// swept is the result of an attempt to end a bucket's reservations and leases.
type swept struct {
	index int // in the trip
	err   error
}

// sweep ends expired reservations and leases in the buckets that the trip refilled. So they end even if no consumer is
// alive. The sweep after the next refill ends those that remain.
func (t *trip) sweep(ctx context.Context, s store) {
	var keys []string
	for i := range t.results {
		if o := &t.results[i]; o.Err == nil && o.Due != 0 && o.Due <= o.Now && o.Status.Wrote() {
			t.swept, keys = append(t.swept, swept{index: i}), append(keys, t.calls[i].Key)
		}
	}
	if len(keys) == 0 {
		return
	}
	for k, result := range s.sweep(ctx, keys, max(1, min(sweptOfBucket, sweptAtOnce/len(keys)))) {
		t.swept[k].err = result.Err
	}
}
