package verify_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/verify"
)

// story is the record of a run on a simulated server: the model, with a simulated clock.
type story struct {
	record.Run
	log string // the log of replica r0
}

const start = 1_800_000_000_000_000_000

// Policies of the story's bucket.
var (
	smooth  = policy.Policy{Capacity: 300, Rate: policy.PerSecond(333)}
	stepped = policy.Policy{Capacity: 300, Steps: policy.Every(700 * time.Millisecond), StepTokens: 200}
	strict  = policy.Policy{Capacity: 300, Rate: policy.PerSecond(333), Strict: true}
	full    = policy.Policy{Capacity: 300, Rate: policy.PerSecond(33), OnLoss: policy.LossFull}
)

// simulate simulates five seconds with a replica that refills, a second replica that always comes too late, and a
// consumer that takes all tokens that it can get.
func simulate(t *testing.T, p policy.Policy) *story {
	t.Helper()
	return simulateWith(t, p, func(int64, *policy.Bucket) (int64, bool) { return 0, false })
}

// simulateWith is like simulate, but calls strange every five milliseconds. strange returns how far the server's clock
// is ahead, in µs, and whether all replies are lost. It may change the bucket, too.
func simulateWith(t *testing.T, p policy.Policy,
	strange func(ms int64, b *policy.Bucket) (ahead int64, unseen bool)) *story {
	t.Helper()
	terms, steps := p.Terms(policy.Fence{Epoch: 1}), ""
	if p.Steps != nil {
		steps = p.Steps.String()
	}
	s := &story{log: `{"@message":"leading","@timestamp":"2027-01-15T08:00:01Z","epoch":7}` + "\n" +
		`{"@message":"leading","@timestamp":"2027-01-15T08:00:02Z","epoch":9}` + "\n"}
	s.Meta = record.Meta{Name: "story", Resume: time.Second, Buckets: []record.Bucket{
		{Key: "k", Terms: []string{terms.Encode()}, Steps: []string{steps}, Linear: true},
	}}
	b, rng := &policy.Bucket{}, rand.New(rand.NewPCG(1, 1))
	known := map[string]policy.Version{}
	for ms := int64(0); ms < 5000; ms += 5 {
		now := start + ms*1_000_000
		ahead, unseen := strange(ms, b)
		for i, replica := range []string{"r0", "r1"} {
			if ms%100 != int64(10*i) {
				continue
			}
			call := policy.Call{Version: known[replica], Create: policy.CreateInitial, Terms: &terms}
			if p.Steps != nil && b.Control != nil {
				call.Step, call.Next = policy.Due(p.Steps, b.Control.Step, now/1000+ahead, 2)
			}
			o := b.Refill(call, now/1000+ahead)
			if !unseen {
				known[replica] = o.Version
			}
			e := refill.Event{Key: "k", Sent: time.Unix(0, now-200_000), Replied: time.Unix(0, now+300_000), Call: call,
				Outcome: o}
			if unseen {
				e.Outcome, e.Err = policy.Outcome{}, errors.New("timeout")
			}
			s.Refills = append(s.Refills, record.Refill{Replica: replica, Refill: history.OfEvent(e)})
		}
		if unseen {
			continue
		}
		op := record.Op{Client: "c", Kind: record.Take, Key: "k", N: 1 + rng.Int64N(9), Call: now - 100_000,
			Return: now + 400_000, Result: record.Denied}
		got := b.Take(op.N, 0)
		op.Left = got.Tokens
		if got.OK {
			op.Result, op.Taken = record.Done, op.N
		} else {
			op.Era = b.Control.Era
			op.Index = *b.Index
			op.Last = b.Control.Last
		}
		s.Ops = append(s.Ops, op)
		if ms%40 == 0 {
			s.Samples = append(s.Samples, record.Sample{
				Key: "k", Sent: now + 500_000, Got: now + 900_000, Tokens: *b.Tokens, Era: b.Control.Era,
				Index: *b.Index, Last: b.Control.Last, Policy: terms.Encode(),
			})
		}
	}
	s.Health = []record.Health{{When: "at the start", OK: true}, {When: "at the end", OK: true}}
	s.Faults = []record.Fault{{Name: "nothing", Start: start + 1e9, End: start + 2e9}}
	return s
}

func write[T any](t *testing.T, path string, records []T) {
	t.Helper()
	w, err := history.Open(path)
	require.NoError(t, err)
	for _, r := range records {
		w.Add(r)
	}
	require.NoError(t, w.Close())
}

// judge writes the files of the story and judges them.
func (s *story) judge(t *testing.T) *verify.Result {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, record.WriteMeta(dir, s.Meta))
	write(t, filepath.Join(dir, record.OpsFile), s.Ops)
	write(t, filepath.Join(dir, record.SamplesFile), s.Samples)
	write(t, filepath.Join(dir, record.FaultsFile), s.Faults)
	write(t, filepath.Join(dir, record.HealthFile), s.Health)
	for _, replica := range []string{"r0", "r1"} {
		var own []history.Refill
		for _, f := range s.Refills {
			if f.Replica == replica {
				own = append(own, f.Refill)
			}
		}
		write(t, filepath.Join(dir, record.RefillsFile(replica)), own)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, record.LogFile("r0")), []byte(s.log), 0o600))
	result, err := verify.Dir(dir)
	require.NoError(t, err)
	return result
}

// write returns the n-th refill that wrote, from 0.
func (s *story) write(n int) *record.Refill {
	for i := range s.Refills {
		if o := s.Refills[i].Outcome; o != nil && o.Status.Wrote() {
			n--
			if n < 0 {
				return &s.Refills[i]
			}
		}
	}
	return nil
}

// forbid changes the story's fault: it forbids the keys of a bucket, from one second to two seconds after the start.
func (s *story) forbid(key string) {
	s.Faults[0].Effect, s.Faults[0].Key = record.Forbid, key
}

// silence removes the refills of a span from the record.
func (s *story) silence(from, to int64) {
	s.Refills = slices.DeleteFunc(s.Refills, func(f record.Refill) bool { return f.Sent > from && f.Sent < to })
}

func TestATrueRecordPasses(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]policy.Policy{"smooth": smooth, "stepped": stepped, "strict": strict, "full": full} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			result := simulate(t, p).judge(t)
			require.Empty(t, result.Violations)
			require.Empty(t, result.Remarks)
			require.Equal(t, 1, result.Decided)
			require.Greater(t, result.Slack, 0.8,
				"the bound is tight, since a consumer that takes all tokens comes close to it")
			require.LessOrEqual(t, result.Slack, 1.0)
		})
	}
}

func TestATakeThatWasSentBeforeALossMayHaveComeAfterIt(t *testing.T) {
	t.Parallel()
	for name, answered := range map[string]int64{"answered before the loss": -1e6, "answered after the loss": 1e6} {
		s := simulate(t, full)
		lost := start + int64(1e9)
		s.Faults[0] = record.Fault{Name: "evicted", Start: lost, End: lost, Effect: record.Lose, Key: "k",
			Parts: []string{"tokens"}}
		op := s.Ops[0]
		op.Call = lost - 2e6
		op.Return = lost + answered
		op.N = full.Capacity
		op.Taken = full.Capacity
		s.Ops = append(s.Ops, op)
		require.Equal(t, answered < 0, slices.Contains(s.judge(t).Broken(), verify.Loss), name)
	}
}

// There are two hidden writes in a row, and the second begins an era. They leave no trace except a gap in the index. So
// the order of later calls is not decided.
func TestWritesThatLeaveNoTraceAreNotJudged(t *testing.T) {
	t.Parallel()
	s := simulateWith(t, smooth, func(ms int64, _ *policy.Bucket) (int64, bool) {
		if ms < 2100 || ms > 2110 {
			return 0, false
		}
		if ms < 2110 {
			return 30 * 24 * time.Hour.Microseconds(), true
		}
		return 0, true
	})
	s.Faults = []record.Fault{
		{Name: "clock", Start: start + 2_095e6, End: start + 2_096e6, Effect: record.Clock, Jump: 30 * 24 * time.Hour},
		{Name: "clock", Start: start + 2_108e6, End: start + 2_109e6, Effect: record.Clock, Jump: -30 * 24 * time.Hour},
	}
	result := s.judge(t)
	require.Empty(t, result.Violations)
	require.Equal(t, 1, result.Decided, "the order of the earlier calls is decided")
	require.Len(t, result.Remarks, 1)
}

// A rollback forgets the credit of an instant, but the bucket keeps its tokens. The instant is credited again, and then
// more than the capacity is taken. That is no violation.
func TestAnInstantWhoseCreditWasForgottenMayBeTakenAgain(t *testing.T) {
	t.Parallel()
	kept := stepped
	kept.OnRollback = policy.RollbackKeep
	var old policy.Bucket
	credits, back := 0, int64(0) // right after the fourth credit, the state goes back to right after the third credit
	s := simulateWith(t, kept, func(ms int64, b *policy.Bucket) (int64, bool) {
		if ms%100 == 5 && b.Control != nil && (old.Control == nil || old.Control.Step < b.Control.Step) && back == 0 {
			credits++
			if credits == 4 {
				*b.Tokens = *old.Tokens
				*b.Index = *old.Index
				*b.Control = *old.Control
				back = ms
				return 0, false
			}
			tokens := *b.Tokens
			index := *b.Index
			control := *b.Control
			old = policy.Bucket{Tokens: &tokens, Index: &index, Control: &control}
		}
		return 0, false
	})
	require.NotZero(t, back)
	require.Greater(t, *old.Tokens, int64(150))
	at := start + back*1_000_000
	s.Faults = []record.Fault{{Name: "rollback", Start: at - 700e6, Gone: at - 300_000, End: at - 200_000,
		Effect: record.Rollback}}
	require.Empty(t, s.judge(t).Violations)
}

func TestEachForgedRecordIsCaught(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		check string
		lie   func(s *story)
	}{
		{verify.Window, func(s *story) {
			for i := range s.Ops {
				if s.Ops[i].Taken > 0 {
					s.Ops[i].Taken++
				}
			}
		}},
		{verify.Index, func(s *story) {
			twice := *s.write(20)
			twice.Replica = "r1"
			s.Refills = append(s.Refills, twice)
		}},
		{verify.Index, func(s *story) { s.write(20).Index -= 3 }},
		{verify.Credit, func(s *story) { s.write(20).Outcome.Added++ }},
		{verify.Credit, func(s *story) { s.write(20).Outcome.Elapsed += 50_000 }},
		{verify.Quarantine,
			func(s *story) {
				s.write(20).Outcome.Status = policy.StatusRolledBack
				s.write(20).Outcome.Tokens = 5
			}},
		{verify.Quarantine, func(s *story) { s.write(20).Index += 5 }},
		{verify.Order, func(s *story) { s.write(20).Outcome.Fence.Epoch = 0 }},
		{verify.Order, func(s *story) { s.Samples[50].Index -= 10 }},
		{verify.Order, func(s *story) { s.Samples[50].Era-- }},
		{verify.Stock, func(s *story) { s.Samples[50].Tokens = -1 }},
		{verify.Stock, func(s *story) { s.Samples[50].Tokens = 301 }},
		{verify.Linear, func(s *story) { s.Ops[300].Left++ }},
		{verify.Linear, func(s *story) { s.Refills[30].Outcome.Last++ }},
		{verify.Epochs, func(s *story) {
			s.log += `{"@message":"leading","@timestamp":"2027-01-15T08:00:03Z","epoch":8}` + "\n"
		}},
		{verify.Resume, func(s *story) { s.silence(start+2e9, start+5e9) }},
		{verify.Healthy, func(s *story) { s.Health[1].OK = false }},
		{verify.Healthy, func(s *story) { s.Health = nil }},
		{verify.Substance, func(s *story) { s.Samples = nil }},
		{verify.Quarantine, func(s *story) { // a rollback is reported, but the server forgot nothing
			s.write(20).Outcome.Status = policy.StatusRolledBack
			s.write(20).Outcome.Tokens, s.write(20).Outcome.Added = 0, 0
		}},
		{verify.Expiry, func(s *story) { s.Samples[50].Expires = true }},
		{verify.Resume, func(s *story) {
			s.Faults[0].Spares = true
			s.silence(start+1e9, start+3e9)
			s.Faults[0].End = start + 4e9
		}},
		{verify.Neighbours, func(s *story) {
			s.forbid("other")
			s.log += `{"@message":"bucket can't be refilled","@timestamp":"2027-01-15T08:00:01.5Z","bucket":"k"}` + "\n"
		}},
		{verify.Neighbours, func(s *story) { s.forbid("k") }},
	} {
		t.Run(tc.check, func(t *testing.T) {
			t.Parallel()
			s := simulate(t, smooth)
			tc.lie(s)
			require.Contains(t, s.judge(t).Broken(), tc.check)
		})
	}
}

func TestAStarvedFlowIsNoticed(t *testing.T) {
	t.Parallel()
	p := smooth
	p.Flows = &policy.Flows{Headroom: 10, Most: 100}
	s := simulate(t, p)
	s.Faults = nil
	for i := range s.Ops {
		s.Ops[i].Client = []string{"quiet", "loud"}[i%2]
	}
	require.NotContains(t, s.judge(t).Broken(), verify.Fair)
	for i := range s.Ops {
		if i%2 == 0 && i%16 > 0 {
			s.Ops[i].Result, s.Ops[i].Taken = record.Denied, 0
		}
	}
	require.Contains(t, s.judge(t).Broken(), verify.Fair)
	for i := range s.Ops {
		s.Ops[i].Other = s.Ops[i].Result == record.Denied
	}
	require.NotContains(t, s.judge(t).Broken(), verify.Fair, "denials of another bucket don't count for this bucket")
}

// TestWhatTheRecordDoesNotReachIsNotJudged ends a fault shortly before the end of the record. So refills may have gone
// on in time after the record ended.
func TestWhatTheRecordDoesNotReachIsNotJudged(t *testing.T) {
	t.Parallel()
	s := simulate(t, smooth)
	s.Faults[0].End = start + 42e8
	s.silence(start+42e8, start+5e9)
	require.NotContains(t, s.judge(t).Broken(), verify.Resume)
}

// TestAFullBucketIsNoForbiddenNeighbour drops two of three refills of a template's bucket while another bucket is
// forbidden. That is a violation, unless the bucket is full: no replica refills a full one.
func TestAFullBucketIsNoForbiddenNeighbour(t *testing.T) {
	t.Parallel()
	s := simulate(t, smooth)
	s.Meta.Buckets[0].Kind = record.Refilled
	s.forbid("other")
	s.Faults[0].End = start + 4e9
	for at := int64(start + 1e9); at < start+4e9; at += 300e6 {
		s.silence(at, at+250e6)
	}
	require.Contains(t, s.judge(t).Broken(), verify.Neighbours)
	for i := range s.Samples {
		s.Samples[i].Tokens = smooth.Capacity
	}
	require.NotContains(t, s.judge(t).Broken(), verify.Neighbours)
}

// TestRefillsThatWereLateBeforeAreLateBesideAForbiddenBucket drops two of three refills while another bucket is
// forbidden. That is a violation, unless the refills were as rare before: then the machine was slow.
func TestRefillsThatWereLateBeforeAreLateBesideAForbiddenBucket(t *testing.T) {
	t.Parallel()
	for from, late := range map[int64]bool{start + 2e9: true, start: false} {
		s := simulate(t, smooth)
		s.forbid("other")
		s.Faults[0].Start, s.Faults[0].End = start+2e9, start+4e9
		for at := from; at < start+4e9; at += 300e6 {
			s.silence(at, at+250e6)
		}
		require.Equal(t, late, slices.Contains(s.judge(t).Broken(), verify.Neighbours))
	}
}

// This test is like TestEachForgedRecordIsCaught, for other kinds of buckets.
func TestEachForgedRecordOfOtherKindsIsCaught(t *testing.T) {
	t.Parallel()
	moved := func(s *story, n int) *policy.Outcome { // returns the n-th refill that credited an instant
		for i := 1; ; i++ {
			if o := s.write(i).Outcome; o.Added+o.Clamped > 0 {
				n--
				if n < 0 {
					return o
				}
			}
		}
	}
	for _, tc := range []struct {
		check string
		of    policy.Policy
		lie   func(s *story)
	}{
		{verify.Steps, stepped, func(s *story) { moved(s, 2).Added++ }},
		{verify.Steps, stepped, func(s *story) { moved(s, 2).Step += 100_000 }},
		{verify.Steps, stepped, func(s *story) { s.write(20).Outcome.Added += 200 }},
		{verify.Steps, stepped, func(s *story) { // the bucket stays at the first instant
			first := s.write(0).Outcome.Step
			for i := range 40 {
				s.write(i).Outcome.Step = first
			}
		}},
		{verify.Steps, stepped, func(s *story) { // the clock was far ahead for a moment
			for i := range 40 {
				s.write(i).Outcome.Step += 30 * 24 * time.Hour.Microseconds()
			}
		}},
		{verify.Window, stepped, func(s *story) {
			for i := range s.Ops {
				s.Ops[i].Taken += s.Ops[i].Taken / 3
			}
		}},
		{verify.Stock, strict, func(s *story) { s.Samples[0].Held = 301 - s.Samples[0].Tokens }},
		{verify.Loss, full, func(s *story) { // the tokens were evicted, and too few were added again
			s.Faults[0] = record.Fault{Name: "evicted", Start: start + 1e9, End: start + 1e9, Effect: record.Lose, Key: "k",
				Parts: []string{"tokens"}}
		}},
		{verify.Loss, full, func(s *story) {
			s.Faults[0] = record.Fault{Name: "lost", Start: start + 1e9, End: start + 1e9, Effect: record.Lose}
			s.write(12).Outcome.Status = policy.StatusInitialised
		}},
	} {
		t.Run(tc.check, func(t *testing.T) {
			t.Parallel()
			s := simulate(t, tc.of)
			tc.lie(s)
			require.Contains(t, s.judge(t).Broken(), tc.check)
		})
	}
}

// oneIsInferred judges the story. It requires that there is no violation, and that one hidden write was inferred.
func (s *story) oneIsInferred(t *testing.T) {
	t.Helper()
	result := s.judge(t)
	require.Empty(t, result.Violations)
	require.Equal(t, 1, result.Hidden)
	require.Equal(t, 1, result.Decided, fmt.Sprint(result.Remarks))
}

// credited returns the index of a refill that added tokens.
func (s *story) credited() int {
	return slices.IndexFunc(s.Refills, func(f record.Refill) bool {
		return f.Outcome != nil && f.Outcome.Status == policy.StatusApplied && f.Outcome.Added > 0 && f.Sent > start+1e9
	})
}

// The server's clock jumps over thousands of instants. As many of them are credited as fill the bucket. Here these are
// two instants of 60 tokens although the capacity is 100, because consumers take tokens between the two credits.
func TestAClockThatJumpsBringsAsManyInstantsAsFillTheBucket(t *testing.T) {
	t.Parallel()
	const jump = time.Hour + 300*time.Millisecond // no instant falls into the time that the verifier allows for the step
	small := policy.Policy{Capacity: 100, Steps: stepped.Steps, StepTokens: 60}
	s := simulateWith(t, small, func(ms int64, _ *policy.Bucket) (int64, bool) {
		if ms < 450 {
			return 0, false
		}
		return jump.Microseconds(), false
	})
	s.Faults = []record.Fault{{Name: "clock", Start: start + 446e6, End: start + 449e6, Effect: record.Clock, Jump: jump}}
	result := s.judge(t)
	require.Empty(t, result.Violations)
	require.Greater(t, result.Slack, 0.85, "the bound is tight")
}

// If a take finds that a template's bucket isn't in the active set, the bucket's credit begins anew. The entry may be
// missing because a server lost it.
func TestABucketsCreditMayBeginAnewAfterALoss(t *testing.T) {
	t.Parallel()
	s := simulateWith(t, smooth, func(ms int64, b *policy.Bucket) (int64, bool) {
		if ms == 1550 {
			b.Control.Last, b.Control.Carry = start/1000+ms*1000, 0
		}
		return 0, false
	})
	s.Meta.Buckets[0].Kind = record.Refilled
	for i := range s.Samples {
		s.Samples[i].Expires = true
	}
	require.NotEmpty(t, s.judge(t).Violations)
	s.Meta.Buckets[0].Linear = false
	s.Faults = []record.Fault{{Name: "loss", Start: start + 1.45e9, End: start + 1.5e9, Effect: record.Lose}}
	require.Empty(t, s.judge(t).Violations)
}

// A plain client takes more tokens than there are, and leaves -1 until it undoes that. Then a refill adds 300 tokens,
// and the bucket has 299. That counts as full, so the bucket keeps no carry.
func TestABucketFilledFromBelowZeroKeepsNoCarry(t *testing.T) {
	t.Parallel()
	const jump = 902123 * time.Microsecond // with 100 ms, 333.7 tokens are due
	s := simulateWith(t, smooth, func(ms int64, b *policy.Bucket) (int64, bool) {
		if ms < 500 {
			return 0, false
		}
		if ms == 500 {
			*b.Tokens = -1
		}
		return jump.Microseconds(), false
	})
	s.Meta.Buckets[0].Linear = false // the record doesn't have the plain client's take
	s.Faults = []record.Fault{{Name: "clock", Start: start + 496e6, End: start + 499e6, Effect: record.Clock, Jump: jump}}
	filled := s.write(5).Outcome
	require.Equal(t, []int64{299, 300, 0}, []int64{filled.Tokens, filled.Added, filled.Carry})
	require.Empty(t, s.judge(t).Violations)
}

func TestALostAnswerIsInferred(t *testing.T) {
	t.Parallel()
	s := simulate(t, smooth)
	f := s.write(20)
	f.Outcome, f.Error = nil, "timeout"
	for i := range s.Ops[:200] {
		if s.Ops[i].Taken > 0 && i%50 == 0 {
			s.Ops[i].Result, s.Ops[i].Taken = record.Unknown, 0
		}
	}
	s.oneIsInferred(t)
}

// A replica is killed while it credits an instant. Its last call is in no file. The write is inferred, with the
// instant.
func TestTheLastCallOfAKilledReplicaMayHaveCreditedAnInstant(t *testing.T) {
	t.Parallel()
	s := simulate(t, stepped)
	i := s.credited()
	f := s.Refills[i]
	s.Refills = slices.Delete(s.Refills, i, i+1)
	s.Faults = []record.Fault{{Name: "replica-kill", Victim: f.Replica, Start: f.Sent - 100e6, End: f.Replied + 100e6}}
	s.oneIsInferred(t)
}

// Two calls with the same version have no answer. One of them credited an instant, after its caller had given up. The
// write of that call is inferred.
func TestALateWriteIsInferredWithItsInstant(t *testing.T) {
	t.Parallel()
	s := simulate(t, stepped)
	i := s.credited()
	f := &s.Refills[i]
	made := f.Outcome.Now * 1000
	f.Sent = made - 50e6
	f.Replied = made - 20e6
	f.Outcome = nil
	f.Error = "timeout"
	early := *f
	early.Sent -= 20e6
	early.Next = early.Step
	early.Step -= 700_000
	s.Refills = slices.Insert(s.Refills, i, early)
	s.oneIsInferred(t)
}

// Three calls without a reply found no bucket. The one that may create a new bucket made the write.
func TestALateWriteThatCreatesABucketIsInferred(t *testing.T) {
	t.Parallel()
	s := simulate(t, smooth)
	f := &s.Refills[0]
	require.Equal(t, policy.StatusInitialised, f.Outcome.Status)
	f.Outcome, f.Error = nil, "timeout"
	for _, create := range []policy.Create{policy.CreateNever, policy.CreateLost} {
		early := *f
		early.Sent = f.Sent - 60e6
		early.Replied = f.Sent - 40e6
		early.Create = int64(create)
		s.Refills = slices.Insert(s.Refills, 0, early)
		f = &s.Refills[1]
	}
	s.oneIsInferred(t)
}
