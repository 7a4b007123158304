package stats_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// world has one bucket on a model server, and replicas, each with its own stats.
type world struct {
	bucket oracle.Bucket
	now    time.Time
	terms  policy.Terms
}

type replica struct {
	*stats.Stats
	w     *world
	known policy.Version
	terms policy.Terms
}

var checkout = refill.Bucket{Key: "checkout",
	Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: 100 * time.Millisecond}}

func newWorld() *world {
	return &world{now: time.Unix(1_800_000_000, 0), terms: checkout.Policy.Terms(policy.Fence{Epoch: 1})}
}

func (w *world) replica() *replica {
	r := &replica{Stats: stats.New(), w: w, terms: w.terms}
	r.Configure([]refill.Bucket{checkout})
	return r
}

// refill makes a call after some time and passes its reply to the stats.
func (r *replica) refill(after time.Duration) stats.Refill {
	r.w.now = r.w.now.Add(after)
	call := policy.Call{Version: r.known, Create: policy.CreateInitial, Terms: &r.terms}
	o := r.w.bucket.Refill(call, r.w.now.UnixMicro())
	r.known = o.Version
	return r.Observe(refill.Event{Key: "checkout", Sent: r.w.now, Replied: r.w.now, Call: call, Outcome: o})
}

func (r *replica) counts(t *testing.T) stats.Bucket {
	b, ok := r.Bucket("checkout")
	require.True(t, ok)
	return b
}

const interval = 100 * time.Millisecond

func TestCreditDueAndTakenAreCounted(t *testing.T) {
	w := newWorld()
	a := w.replica()
	require.Equal(t, stats.Refill{Won: true}, a.refill(0))
	w.bucket.Take(500, w.now.UnixMicro())
	taken := int64(500)
	for range 50 {
		w.bucket.Take(55, w.now.UnixMicro())
		taken += 55
		got := a.refill(interval + 3*time.Millisecond)
		require.Equal(t, stats.Refill{Won: true, Gap: interval + 3*time.Millisecond, Lag: 3 * time.Millisecond}, got)
	}
	b := a.counts(t)
	require.EqualValues(t, 51, b.Refills)
	require.EqualValues(t, 1, b.Created)
	require.InDelta(t, 50*0.103*500, b.Due, 0.001)
	require.EqualValues(t, 50*0.103*500, b.Credited)
	require.Zero(t, b.Clamped)
	require.Equal(t, taken, b.Taken)
	require.InDelta(t, 55/0.103, b.TakeRate, 55, "the recent rate of takes")
	require.Zero(t, b.Empty)

	w.bucket.Take(*w.bucket.Tokens, w.now.UnixMicro())
	a.refill(interval)
	require.EqualValues(t, 1, a.counts(t).Empty)
	require.Zero(t, a.counts(t).Held)
	w.bucket.Reserve("id", 7, time.Hour.Microseconds(), policy.OverrunClamp, policy.Leave{}, w.now.UnixMicro())
	a.refill(interval)
	require.EqualValues(t, 7, a.counts(t).Held)
}

func TestAFullBucketIsDueWhatItIsCredited(t *testing.T) {
	w := newWorld()
	a := w.replica()
	a.refill(0)
	for range 50 {
		a.refill(interval + time.Millisecond) // 50.5 tokens
	}
	b := a.counts(t)
	require.EqualValues(t, 50*50, b.Clamped)
	require.EqualValues(t, b.Clamped, b.Credited)
	require.EqualValues(t, b.Credited, b.Due, "a fraction above the capacity is not due")
}

func TestEachRefillIsCountedOnce(t *testing.T) {
	w := newWorld()
	a, b := w.replica(), w.replica()
	a.refill(0)
	b.refill(0)
	total := int64(0)
	for i := range 100 {
		w.bucket.Take(50, w.now.UnixMicro())
		total += 50
		winner, loser := a, b
		if i/10%2 == 1 {
			winner, loser = b, a
		}
		require.True(t, winner.refill(interval).Won)
		require.False(t, loser.refill(0).Won)
	}
	require.EqualValues(t, 101, a.counts(t).Refills+b.counts(t).Refills)
	require.Equal(t, total, a.counts(t).Taken+b.counts(t).Taken)
	require.InDelta(t, 100*0.1*500, a.counts(t).Due+b.counts(t).Due, 0.001)
}

func TestTakeoversHaveTheirGap(t *testing.T) {
	w := newWorld()
	a, b := w.replica(), w.replica()
	a.refill(0)
	b.refill(0)
	for range 3 {
		require.False(t, a.refill(interval).TookOver)
		b.refill(0)
	}
	got := b.refill(230 * time.Millisecond)
	require.True(t, got.TookOver)
	require.Equal(t, 230*time.Millisecond, got.Gap)
	require.False(t, b.refill(interval).TookOver, "a replica that goes on refilling takes nothing over")
	require.Equal(t, []stats.Takeover{{At: w.now.Add(-interval), Buckets: 1, Gap: 230 * time.Millisecond}}, b.Takeovers())
	require.Empty(t, a.Takeovers())

	a.refill(0)
	a.refill(5 * time.Second)
	b.refill(0)
	b.refill(3 * time.Second)
	require.Equal(t, 3*time.Second, b.Takeovers()[0].Gap, "the newest takeover comes first")
	for range 100 {
		a.refill(0)
		a.refill(2 * time.Second)
		b.refill(0)
		b.refill(2 * time.Second)
	}
	require.Len(t, b.Takeovers(), 20, "the number of takeovers is bounded")
}

func TestAGrantThatAnAgentBringsIsNoTakeover(t *testing.T) {
	w := newWorld()
	w.terms.Pool, w.terms.Fence.Seq = true, 1
	a, b := w.replica(), w.replica()
	a.refill(0)
	b.refill(0)
	renewed := w.terms
	for range 10 {
		for range 9 {
			require.True(t, a.refill(interval).Won)
		}
		renewed.Fence.Seq++
		grant := policy.Call{Version: a.known, Terms: &renewed}
		require.True(t, w.bucket.Refill(grant, w.now.UnixMicro()).Status.Wrote())
		require.False(t, a.refill(interval/2).Won)
		a.terms = renewed
		require.Equal(t, stats.Refill{Won: true, Gap: interval}, a.refill(interval/2))
	}
	require.Empty(t, a.Takeovers())

	b.terms = renewed
	b.refill(0)
	require.True(t, b.refill(interval).TookOver)
	a.refill(0)
	require.True(t, a.refill(interval).TookOver, "the terms are the same, so another replica has refilled")
}

func TestLossesAreDistinguished(t *testing.T) {
	w := newWorld()
	a := w.replica()
	a.refill(0)
	w.bucket = oracle.Bucket{}
	a.refill(interval)
	require.EqualValues(t, 1, a.counts(t).Lost)

	before := *w.bucket.Index
	a.refill(interval)
	*w.bucket.Index, w.bucket.Control.Index = before, before
	a.refill(interval)
	require.EqualValues(t, 1, a.counts(t).Quarantines)

	a.refill(-time.Second)
	require.EqualValues(t, 1, a.counts(t).ClockSteps)
}

func TestPoliciesOfOtherVersionsAreNoticed(t *testing.T) {
	w := newWorld()
	a, b := w.replica(), w.replica()
	a.refill(0)
	b.refill(0)
	b.terms.Fence.Epoch, b.terms.Tokens = 2, b.terms.Tokens*2
	b.refill(interval)
	a.refill(0)
	require.True(t, a.counts(t).Outdated)
	require.False(t, b.counts(t).Outdated)
	require.Equal(t, []string{"checkout"}, a.Outdated())
	a.Observe(refill.Event{Key: "checkout", Replied: time.Now(),
		Outcome: policy.Outcome{Status: policy.StatusStale, FileVersion: 2}})
	require.True(t, a.counts(t).Outdated, "a replica without terms to send is still outdated")
	a.refill(interval)
	due := a.counts(t)
	require.EqualValues(t, due.Credited, due.Due, "tokens due under unknown terms count as credited")

	b.terms.Tokens *= 2
	b.refill(0)
	b.refill(interval)
	require.True(t, b.counts(t).Conflict)
	b.Observe(refill.Event{Key: "checkout", Outcome: policy.Outcome{Status: policy.StatusUnknown}})
	require.False(t, b.counts(t).Conflict, "a bucket without a policy has no conflict")
}

func TestOtherKeysAndFailuresAreNotCounted(t *testing.T) {
	w := newWorld()
	a := w.replica()
	a.refill(0)
	before := a.counts(t)
	require.Zero(t, a.Observe(refill.Event{Key: "junk", Outcome: policy.Outcome{Status: policy.StatusApplied}}))
	require.Zero(t, a.Observe(refill.Event{Key: "checkout", Err: context.DeadlineExceeded}))
	require.Empty(t, a.Faults(), "a timeout is no fault of the bucket")
	require.Zero(t, a.Observe(refill.Event{Key: "checkout", Err: lua.ErrBadReply}))
	require.Equal(t, map[string][]string{lua.ErrBadReply.Error(): {"checkout"}}, a.Faults())
	after := a.counts(t)
	require.NotEmpty(t, after.Fault)
	after.Fault = ""
	require.Equal(t, before, after)
	a.refill(interval)
	require.Empty(t, a.Faults(), "a refill clears the fault")
	_, ok := a.Bucket("junk")
	require.False(t, ok)
	a.Configure(nil)
	_, ok = a.Bucket("checkout")
	require.False(t, ok)
}
