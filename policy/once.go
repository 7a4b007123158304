package policy

// Charge is what a bucket remembers of a request that took tokens.
type Charge struct {
	N     int64 // tokens taken
	Left  int64 // tokens left then
	Until int64 // for how long it is remembered, Unix µs
}

// TakeOnce is Take for a request, which is charged once while it is remembered.
// It returns what is remembered afterwards, nil for nothing; charged is what was
// remembered before. A request that took another number of tokens takes nothing
// and is reused.
func (b *Bucket) TakeOnce(charged *Charge, n, memory, now int64) (t Taking, after *Charge, reused bool) {
	if charged != nil && now < charged.Until {
		if charged.N != n {
			return Taking{}, charged, true
		}
		return Taking{OK: true, Known: true, Taken: n, Tokens: charged.Left}, charged, false
	}
	t = b.Take(n, now)
	if !t.OK {
		return t, nil, false
	}
	return t, &Charge{N: n, Left: t.Tokens, Until: now + memory}, false
}
