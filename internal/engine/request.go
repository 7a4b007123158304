package engine

import (
	"sync/atomic"
	"time"
)

// States of a request. Whoever changes it from waiting owns what follows.
const (
	waiting  int32 = iota
	answered       // the answer is there
	expired        // the deadline passed
	left           // the caller's context was cancelled
)

// Request is something that is asked of a server. Its caller writes Body before Do and reads it after Do returned nil;
// in between it is the Sender's.
type Request[T any] struct {
	Body T
	// Latest is how far the deadline is put off while connections are opened; zero: it is not.
	Latest time.Time

	state     atomic.Int32
	unclaimed atomic.Bool   // the answer came, and nobody waited
	signal    chan struct{} // gets one value when the state becomes answered or expired

	// The lock of the queue guards these.
	began    time.Time // the wait
	end      time.Time // its deadline as given to Do
	deadline deadline
	call     *call[T] // once it is under way
	next     *Request[T]
	uses     uint64 // how often it was given to Do
}

// Answer tells the caller that Body is complete. It reports whether the caller still waits; then the request must not
// be used any more. If not, Body is the Sender's to deal with. The request itself isn't used again: whoever gave it up
// may be about to look at its state.
func (r *Request[T]) Answer() bool {
	if !r.state.CompareAndSwap(waiting, answered) {
		r.unclaimed.Store(true)
		return false
	}
	r.signal <- struct{}{}
	return true
}
