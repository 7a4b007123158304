package fetch

import (
	"sync/atomic"
	"time"
)

// vigilPause is the time between two looks of a vigil. Who waits for longer than two
// of them is seen to.
const vigilPause = 2 * time.Millisecond

// vigil looks after callers who wait without a timer of their own: regularly for as
// long as there are any.
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
