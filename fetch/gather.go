package fetch

import (
	"runtime"
	"sync"
)

const (
	// gatherYields is how often a crowd is given way to in vain before its next
	// round trip: other processors may be quicker to run who gives way than the
	// crowd.
	gatherYields = 3
	// gatherMost is how many takes of one bucket are waited for: to see to so many
	// takes as long as a round trip, and who comes after them goes with the next one.
	gatherMost = 32
)

// gather waits while callers who were answered together, can run and are about to call
// again come back, until want of them are there. The lock is held, and given away
// meanwhile.
func gather(mu *sync.Mutex, there *int, want int) {
	for idle := 0; *there < want && idle < gatherYields; idle++ {
		before := *there
		mu.Unlock()
		runtime.Gosched()
		mu.Lock()
		if *there > before {
			idle = -1
		}
	}
}
