package engine

import (
	"sync/atomic"
	"time"
)

// States of a request. The goroutine that changes it from waiting owns the next step.
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
	unclaimed atomic.Bool   // the reply came after the caller had left
	signal    chan struct{} // gets one value when the state becomes answered or expired

	// The lock of the queue guards these.
	began    time.Time // the wait
	end      time.Time // its deadline as given to Do
	deadline deadline
	call     *call[T] // once it is under way
	next     *Request[T]
	uses     uint64 // how often it was given to Do
}

// Answer wakes the caller when Body is complete. It reports whether the caller still waits. If so, the request must not
// be used any more. If not, the Sender has to use Body. The request itself isn't used again, because the goroutine that
// gave it up may be about to read its state.
func (r *Request[T]) Answer() bool {
	if !r.state.CompareAndSwap(waiting, answered) {
		r.unclaimed.Store(true)
		return false
	}
	r.signal <- struct{}{}
	return true
}
