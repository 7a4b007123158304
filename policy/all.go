package policy

// Demand is N tokens of a bucket; N is at least 1.
type Demand struct {
	Bucket *Bucket
	N      int64
}

// TakeAll takes tokens of several buckets, each another one, all or nothing. The
// answers are in the order of the demands: if ok, each is a take; otherwise OK
// tells of each bucket whether its tokens are there, and Taken is 0. A bucket
// without state is not known, and then nothing is taken.
func TakeAll(demands []Demand, now int64) (ok bool, answers []Taking) {
	answers = make([]Taking, len(demands))
	ok = true
	for i, d := range demands {
		tokens := int64(0)
		if d.Bucket.Tokens != nil {
			tokens = *d.Bucket.Tokens
		}
		a := Taking{Known: d.Bucket.Control != nil, OK: d.Bucket.Control != nil && tokens >= d.N, Tokens: tokens}
		if a.Known {
			a.Wait = d.Bucket.Wait(d.N, now)
		}
		answers[i], ok = a, ok && a.OK
	}
	if ok {
		for i, d := range demands {
			answers[i] = d.Bucket.Take(d.N, now)
		}
	}
	return ok, answers
}
