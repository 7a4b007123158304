package fetch

import "time"

// plan decides how many tokens a block should hold. It divides time into halves of the hold time. Tokens that were
// unused during a whole half go back, so that no token stays unused for more than two halves.
type plan struct {
	most int64         // tokens that the block may hold
	half time.Duration // the length of a half
	ends time.Duration // when the present half ends

	size  int64         // tokens that the block should hold
	seen  int64         // tokens left when they were last observed
	fresh int64         // tokens added in this half
	used  int64         // tokens used in this half
	spent int64         // tokens used since a call last asked for some
	added time.Duration // when that call was answered; 0: the bucket gave less than it asked for
}

// low returns the number of tokens below which the block asks for more.
func (p *plan) low() int64 { return (p.size + 1) / 2 }

// observe records how many tokens are left, and how many tokens takers got from the bucket itself.
func (p *plan) observe(left, missed int64) {
	used := p.seen - left + missed
	p.used += used
	p.spent += used
	p.seen = left
}

// add records the tokens that a call added.
func (p *plan) add(now time.Duration, granted, wanted int64) {
	p.seen += granted
	p.fresh += granted
	if wanted > 0 {
		p.spent = 0
		p.added = now
	}
	if granted < wanted {
		p.added = 0
	}
}

// endHalf begins the next half. It returns how many of the tokens that are left go back, and whether the block is
// unused. If not all tokens of the block were used, the block becomes smaller.
func (p *plan) endHalf(now time.Duration, left int64) (back int64, idle bool) {
	back = max(0, left-p.fresh)
	idle = p.used == 0
	if idle {
		p.spent = 0
	}
	if p.used < p.size {
		p.size = max(p.used, p.size/2)
	}
	p.ends = now + p.half
	p.fresh = 0
	p.used = 0
	return back, idle && back == left
}

// shortfall returns how many tokens to ask for. That is 0 if no token was used since the last call that asked. The size
// of the block is doubled if half of it was used within a quarter of a half. It becomes at least the number of tokens
// that takers missed.
func (p *plan) shortfall(now time.Duration, left, missed int64) int64 {
	if p.spent == 0 || left >= p.low() && missed == 0 {
		return 0
	}
	if p.added > 0 && now-p.added < p.half/4 && 2*p.spent >= p.size {
		p.size *= 2
	}
	p.size = min(p.most, max(p.size, missed))
	return max(0, p.size-left)
}
