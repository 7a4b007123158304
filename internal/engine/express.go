package engine

import "time"

// shortRTT is the longest round trip for which the caller of a lone request makes its call itself. To hand a call to
// another goroutine and to be woken again takes about as long as a round trip on the same machine, and much less than
// one over a network.
const shortRTT = time.Millisecond

// Express lets the caller of a lone request make its call. It is used for one call at a time. Without it one goroutine
// that takes tokens gets 0.7 times as many, and each take costs twice the processor time.
type Express[T any] struct {
	Send Sender[T]
	// Interrupt ends the call under way when its caller stops waiting. Its answer is then lost.
	Interrupt func()
}
