package fetch

import (
	"sync/atomic"
	"time"
)

// vigilPause is the time between two looks of a vigil. Who waits for longer than two
// of them is seen to.
const vigilPause = 2 * time.Millisecond

// sleeper is who waits without a timer of its own.
type sleeper struct {
	signal  chan struct{} // there may be news: of somebody who is used again it may be old news
	stirred atomic.Bool   // it is to look after its deadline and context
}

func newSleeper() sleeper { return sleeper{signal: make(chan struct{}, 1)} }

// wake tells it that there is news.
func (s *sleeper) wake() { nudge(s.signal) }

// nudge tells whoever reads from a channel with room for one that there is news.
func nudge(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // it has not heard of the last ones yet
	}
}

// stir has it wait with a timer of its own.
func (s *sleeper) stir() {
	if !s.stirred.Swap(true) {
		s.wake()
	}
}

// vigil looks after sleepers, regularly for as long as there are any.
type vigil struct {
	on    atomic.Bool
	timer *time.Timer
}

// newVigil makes a vigil that calls look, which reports whether somebody waits.
func newVigil(look func() bool) *vigil {
	v := &vigil{}
	v.timer = time.AfterFunc(time.Hour, func() {
		v.on.Store(false) // before the look: who then begins to wait unseen starts the next one
		if look() {
			v.begin()
		}
	})
	v.timer.Stop()
	return v
}

// begin is called by who is about to wait, once a look would see that.
func (v *vigil) begin() {
	if !v.on.Load() && v.on.CompareAndSwap(false, true) {
		v.timer.Reset(vigilPause)
	}
}

// end is called when nobody will wait any more.
func (v *vigil) end() { v.timer.Stop() }
