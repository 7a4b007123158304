package oracle

import "github.com/tokenrefill/refiller/policy"

// TakeMany makes the takes of all runs, one after the other; each take is all or nothing. It returns the result of each
// run and the remaining tokens. known is false, and no take is made, if the bucket doesn't exist.
func TakeMany(b *policy.Bucket, runs []policy.Run, now int64) (results []policy.RunTaking, tokens int64, known bool) {
	if b.Tokens == nil && b.Control == nil {
		return nil, 0, false
	}
	results = make([]policy.RunTaking, len(runs))
	for i, r := range runs {
		for results[i].Taken < r.Count && b.TakeLeaving(r.N, r.Leave, now).OK {
			results[i].Taken++
		}
	}
	for i, r := range runs {
		if results[i].Taken < r.Count {
			results[i].Wait = b.Wait(r.N+leastOf(b, r.Leave), now)
		}
	}
	return results, tokensOf(b), true
}

// Charge is the record that a bucket keeps of a request that took tokens.
type Charge struct {
	Run   policy.Run // the take of the request
	Taken int64      // tokens taken
	Left  int64      // tokens that remained
	Era   int64      // era in which they were taken
	Until int64      // until when the record is kept, Unix µs
}

// TakeOnce makes the take of a run for a request. The request is charged once while its record is kept. charged is the
// record before the take, and after is the record after it; nil means no record. If charged is of another take, nothing
// is taken, and reused is true.
func TakeOnce(
	b *policy.Bucket, charged *Charge, run policy.Run, memory, now int64,
) (t policy.Taking, after *Charge, reused bool) {
	if charged != nil && now < charged.Until {
		if charged.Run != run {
			return policy.Taking{}, charged, true
		}
		return policy.Taking{OK: true, Known: true, Taken: charged.Taken, Tokens: charged.Left}, charged, false
	}
	results, left, known := TakeMany(b, []policy.Run{run}, now)
	if !known {
		return policy.Taking{}, nil, false
	}
	t = policy.Taking{Known: true, OK: results[0].Taken > 0, Taken: results[0].Taken * run.N, Tokens: left}
	if !t.OK {
		t.Wait = results[0].Wait
		return t, nil, false
	}
	after = &Charge{Run: run, Taken: t.Taken, Left: left, Until: now + memory}
	if b.Control != nil {
		after.Era = b.Control.Era
	}
	return t, after, false
}

// Demand is a demand for N tokens of a bucket. N is at least 1. The take must leave the tokens of Leave.
type Demand struct {
	Bucket *policy.Bucket
	N      int64
	Leave  policy.Leave
}

// TakeAll takes tokens from several different buckets, all or nothing. A bucket in shadow mode that lacks the tokens is
// left out. The answers are in the order of the demands. OK of an answer reports whether the bucket has the tokens. If
// ok is true, these were taken; otherwise Taken of every answer is 0. If a bucket has no state, its answer isn't Known,
// and nothing is taken.
func TakeAll(demands []Demand, now int64) (ok bool, answers []policy.Taking) {
	answers = make([]policy.Taking, len(demands))
	ok = true
	for i, d := range demands {
		tokens, least := tokensOf(d.Bucket), leastOf(d.Bucket, d.Leave)
		a := policy.Taking{Known: d.Bucket.Control != nil, OK: d.Bucket.Control != nil && tokens-least >= d.N, Tokens: tokens}
		if a.Known {
			a.Wait = d.Bucket.Wait(d.N+least, now)
		}
		answers[i], ok = a, ok && (a.OK || a.Known && d.Bucket.Control.Terms.Shadow)
	}
	if ok {
		for i, d := range demands {
			answers[i] = d.Bucket.TakeLeaving(d.N, d.Leave, now)
		}
	}
	return ok, answers
}

// TakeTemplate makes a take from a bucket of a refilled template with terms t. It creates the bucket if it is missing.
// It replaces the bucket's terms by t if t is of a later version. active reports whether the bucket is in the active
// set before the take, and the second result whether it is after the take. The take doesn't add the bucket to the set
// if the bucket is still full, or if it isn't created because it could never hold n tokens.
func TakeTemplate(b *policy.Bucket, t policy.Terms, n, now int64, active bool) (policy.Taking, bool) {
	created := b.Control == nil
	switched := follow(b, t, now)
	if created {
		held := tokensOf(b)
		if n > t.Capacity && held <= 0 && (b.Index == nil || *b.Index == 0) {
			return policy.Taking{Known: true, Tokens: t.Capacity + held, Wait: -1}, active
		}
		b.Refill(policy.Call{Terms: &t, Create: policy.CreateInitial}, now)
	}
	before := tokensOf(b)
	taking := b.Take(n, now)
	s := b.Control
	if tokensOf(b) >= s.Terms.Capacity && !created && !switched {
		return taking, active
	}
	if (before >= s.Terms.Capacity || !active) && s.Last < now {
		s.Last, s.Carry = now, 0 // the bucket was full until now, so no tokens were due
		if !taking.OK {
			taking.Wait = b.Wait(n, now)
		}
	}
	return taking, true
}

// follow replaces the terms of a bucket by those of its template, as a refill would, if the bucket's terms are of an
// earlier version. It reports whether it replaced them.
func follow(b *policy.Bucket, t policy.Terms, now int64) bool {
	if b.Control == nil || b.Control.Terms.Pool || b.Control.Terms.Fence.Epoch >= t.Fence.Epoch {
		return false
	}
	b.Refill(policy.Call{Terms: &t}, max(now, b.Control.Last))
	return true
}
