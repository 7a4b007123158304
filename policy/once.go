package policy

// Charge is what a bucket remembers of a request that took tokens.
type Charge struct {
	Run   Run   // what it asked for
	Taken int64 // tokens taken
	Left  int64 // tokens left then
	Era   int64 // in which they were taken
	Until int64 // for how long it is remembered, Unix µs
}

// TakeOnce makes the take of a run for a request, which is charged once while it is
// remembered. It returns what is remembered afterwards, nil for nothing; charged is
// what was remembered before. A request that asked for something else takes nothing
// and is reused.
func (b *Bucket) TakeOnce(charged *Charge, run Run, memory, now int64) (t Taking, after *Charge, reused bool) {
	if charged != nil && now < charged.Until {
		if charged.Run != run {
			return Taking{}, charged, true
		}
		return Taking{OK: true, Known: true, Taken: charged.Taken, Tokens: charged.Left}, charged, false
	}
	results, left, known := b.TakeMany([]Run{run}, now)
	if !known {
		return Taking{}, nil, false
	}
	t = Taking{Known: true, OK: results[0].Taken > 0, Taken: results[0].Taken * run.N, Tokens: left}
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
