package engine

import "time"

const (
	// shortTrip is how long round trips are at most whose lone requests are sent by their callers: to hand a call to a
	// worker and to be woken again takes about as long as a round trip on the same machine, and nothing beside one over
	// a network.
	shortTrip = time.Millisecond
	// enough is how long such a server may take for an answer: after that it is silent.
	enough = 10 * time.Millisecond
	// mostStarved is how much longer than secondLook a caller who has left goes on reading while this process is starved.
	mostStarved = 100 * time.Millisecond
)

// Express lets the caller of a lone request make its call. It is used for one call at a time.
type Express[T any] struct {
	Send Sender[T]
	// Interrupt ends the call under way, whose caller stops waiting. Its answer is then lost.
	Interrupt func()
}
