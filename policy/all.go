package policy

// Demand is N tokens of a bucket, which must leave what Leave says; N is at least 1.
type Demand struct {
	Bucket *Bucket
	N      int64
	Leave  Leave
}

// TakeAll takes tokens of several buckets, each another one, all or nothing. A
// bucket in shadow mode that lacks them is left out. The answers are in the order
// of the demands, and OK tells of each bucket whether its tokens are there: if ok,
// those were taken; otherwise Taken is 0. A bucket without state is not known, and
// then nothing is taken.
func TakeAll(demands []Demand, now int64) (ok bool, answers []Taking) {
	answers = make([]Taking, len(demands))
	ok = true
	for i, d := range demands {
		tokens, least := d.Bucket.held(), d.Bucket.least(d.Leave)
		a := Taking{Known: d.Bucket.Control != nil, OK: d.Bucket.Control != nil && tokens-least >= d.N, Tokens: tokens}
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
