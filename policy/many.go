package policy

// Run is Count takes of N tokens each that follow one another; both are at least
// 1. Each must leave what Leave says.
type Run struct {
	N, Count int64
	Leave    Leave
	// UpTo makes it one take of as many tokens as there are, up to Count; N is 1. It is
	// denied if there is none.
	UpTo bool
}

// RunTaking is what became of a run.
type RunTaking struct {
	Taken int64 // how many of its takes were taken: the first ones
	Wait  int64 // as in Taking, after the last run; 0 if all were taken
}

// TakeMany makes takes one after the other, each all or nothing, and reports
// what became of each run and the tokens left.
func (b *Bucket) TakeMany(runs []Run, now int64) (results []RunTaking, tokens int64, known bool) {
	if b.Tokens == nil && b.Control == nil {
		return nil, 0, false
	}
	results = make([]RunTaking, len(runs))
	for i, r := range runs {
		for results[i].Taken < r.Count && b.TakeLeaving(r.N, r.Leave, now).OK {
			results[i].Taken++
		}
	}
	for i, r := range runs {
		if results[i].Taken < r.Count {
			results[i].Wait = b.Wait(r.N+b.least(r.Leave), now)
		}
	}
	return results, b.held(), true
}
