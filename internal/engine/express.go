package engine

import "time"

// shortRTT is the longest round trip for which the caller of a lone request makes its call itself. To hand a call to
// another goroutine and to be woken again takes about as long as a round trip on the same machine. It takes much less
// than a round trip over a network.
const shortRTT = time.Millisecond

// Express lets the caller of a lone request make its call. It makes one call at a time. Without it, a single goroutine
// takes tokens at 0.7 times the rate, and each take costs twice the processor time.
type Express[T any] struct {
	Send Sender[T]
	// Interrupt ends the call under way when its caller stops waiting. The answer is then lost.
	Interrupt func()
}
