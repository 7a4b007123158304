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

// Wait is the time that a caller has for an answer.
type Wait struct {
	Began    time.Time
	Deadline time.Time // no later than that of the caller's context; zero: none
	// Latest is the latest instant to which the deadline is postponed while connections are opened; zero: it is not
	// postponed.
	Latest time.Time
}

// Request is one request to a server. The caller writes Body before it calls Do, and reads Body after Do has returned
// nil. In between only the Sender may use Body.
type Request[T any] struct {
	Body T

	state     atomic.Int32
	unclaimed atomic.Bool   // the reply came after the caller had left
	signal    chan struct{} // gets one value when the state becomes answered or expired

	// The lock of the queue guards these.
	wait     Wait
	deadline deadline
	call     *call[T]    // the call that sends it, once that has departed
	prev     *Request[T] // in the list of requests that wait for a departure
	next     *Request[T]
	uses     uint64 // how often it was given to Do
}

// Answer wakes the caller when Body is complete. It reports whether the caller was still waiting. If it was, the Sender
// must not use the request any more. If it was not, the Sender has to handle the reply in Body, for example return its
// tokens. Such a request is not reused for another call, because the goroutine that gave it up may still read its
// state.
func (r *Request[T]) Answer() bool {
	if !r.state.CompareAndSwap(waiting, answered) {
		r.unclaimed.Store(true)
		return false
	}
	r.signal <- struct{}{}
	return true
}
