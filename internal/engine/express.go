package engine

import "time"

// shortRTT is the longest round trip for which the caller of a lone request makes its call itself. To hand a call to a
// worker and to be woken again takes about as long as a round trip on the same machine, and much less than one over a
// network.
const shortRTT = time.Millisecond

// Express lets the caller of a lone request make its call. It is used for one call at a time.
type Express[T any] struct {
	Send Sender[T]
	// Interrupt ends the call under way when its caller stops waiting. Its answer is then lost.
	Interrupt func()
}
