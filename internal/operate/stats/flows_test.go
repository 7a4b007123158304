package stats_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/stats"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
	"github.com/tokenrefill/refiller/refill/flow"
)

// dividedBuckets returns n buckets with flows.
func dividedBuckets(n int) (list []refill.Bucket) {
	for i := range n {
		b := checkout
		b.Key = fmt.Sprintf("b%d", i)
		b.Policy.Flows = &policy.Flows{Most: policy.DefaultFlows}
		list = append(list, b)
	}
	return list
}

// reads passes a reading of a bucket's flows to the stats.
func reads(s *stats.Stats, key string, at time.Time, flows ...refill.FlowUse) {
	read := &refill.FlowsRead{
		Covered: time.Second, Flows: flows, Summary: flow.Summary{Seen: len(flows), Listed: 1, Level: 19.5},
	}
	s.Observe(refill.Event{Key: key, Replied: at, Outcome: policy.Outcome{Status: policy.StatusApplied}, Flows: read})
}

func TestFlowsAreListedByWhatTheyGotInTheLastMinute(t *testing.T) {
	t.Parallel()
	s := stats.New()
	s.Configure(dividedBuckets(2))
	_, known := s.Flows("b0", 10, time.Now())
	require.False(t, known, "no flows were read yet")
	at := time.Unix(1_800_000_000, 0)
	reads(s, "b0", at, refill.FlowUse{Name: "gone", Asked: 900})
	at = at.Add(time.Minute)
	for range 4 {
		at = at.Add(time.Second)
		reads(s, "b0", at, refill.FlowUse{Name: "loud", Asked: 2500, Denied: 2450, Listed: true},
			refill.FlowUse{Name: "quiet", Asked: 60}, refill.FlowUse{Name: "team/", Asked: 3},
			refill.FlowUse{Name: "", Asked: 2})
	}
	got, known := s.Flows("b0", 2, at.Add(20*time.Second))
	require.True(t, known)
	require.Equal(t, stats.FlowsOfLate{
		Covered: 4 * time.Second,
		Flows: []stats.Flow{
			{Name: "quiet", Asked: 60, Got: 60},
			{Name: "loud", Asked: 2500, Got: 50, Denied: 2450, Listed: true},
		},
		Others: stats.Flow{Asked: 5, Got: 5},
	}, got)
	b, _ := s.Bucket("b0")
	require.Equal(t, stats.Flows{Read: at, Seen: 4, Listed: 1, Level: 19.5, DeniedListed: 4 * 2450}, b.Flows)
	_, known = s.Flows("b1", 10, at)
	require.False(t, known, "no flows of another bucket were read")
	got, _ = s.Flows("b0", 2, at.Add(2*time.Minute))
	require.Empty(t, got.Flows, "flows are forgotten after a minute")
	require.Zero(t, got.Covered)

	plain := dividedBuckets(1)
	plain[0].Policy.Flows = nil
	s.Configure(plain)
	_, known = s.Flows("b0", 10, at)
	require.False(t, known, "the bucket is no longer divided")
}

// Clients choose the names of flows, so the number of remembered flows is bounded. The flows that take the most tokens
// stay.
func TestTheFlowsThatAreRememberedAreBounded(t *testing.T) {
	t.Parallel()
	s := stats.New()
	s.Configure(dividedBuckets(stats.MaxDivided + 1))
	at := time.Unix(1_800_000_000, 0)
	const names = 20_000
	for i := range names / 100 {
		flows := []refill.FlowUse{{Name: "loud", Asked: 500}, {Name: "louder", Asked: 600, Denied: 50}}
		for n := range 100 {
			flows = append(flows, refill.FlowUse{Name: fmt.Sprint("stranger-", 100*i+n), Asked: 1})
		}
		reads(s, "b0", at, flows...)
	}
	got, known := s.Flows("b0", names, at)
	require.True(t, known)
	require.LessOrEqual(t, len(got.Flows), 2*stats.FlowsKept)
	require.Equal(t, "louder", got.Flows[0].Name)
	require.InDelta(t, 550, got.Flows[0].Got, 0.001)
	require.Equal(t, stats.Flow{Name: "loud", Asked: 500, Got: 500}, got.Flows[1])
	sum := got.Others.Asked
	for _, f := range got.Flows {
		sum += f.Asked
	}
	require.InDelta(t, 1200, sum, 0.001, "flows with forgotten names count in the sum")
	last := fmt.Sprintf("b%d", stats.MaxDivided)
	reads(s, last, at, refill.FlowUse{Name: "loud", Asked: 5, Denied: 3})
	_, known = s.Flows(last, 10, at)
	require.False(t, known, "the number of buckets with a list is bounded")
	b, _ := s.Bucket(last)
	require.EqualValues(t, 3, b.Flows.DeniedOther, "the counts are kept without a list")
}
