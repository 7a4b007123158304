package refill

import (
	"container/heap"
	"time"
)

// queue is a heap of buckets by the time at which they are due. Buckets that are due at the same time are ordered by
// slot. So buckets that can share a script call are next to each other.
//
// An entry copies the fields that order it, since a hundred thousand buckets don't fit into the processor's caches. A
// caller that changes the due times of buckets in the queue has to call order.
type queue []queued

type queued struct {
	due    time.Time
	slot   int
	bucket *bucket
}

func entryOf(b *bucket) queued { return queued{b.due, b.slot, b} }

// order makes a heap of the entries again, after the due times of their buckets have changed.
func (q *queue) order() {
	for i, entry := range *q {
		(*q)[i] = entryOf(entry.bucket)
	}
	heap.Init(q)
}

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }

// Less implements heap.Interface.
func (q queue) Less(i, j int) bool {
	if !q[i].due.Equal(q[j].due) {
		return q[i].due.Before(q[j].due)
	}
	return q[i].slot < q[j].slot
}

// Push implements heap.Interface.
func (q *queue) Push(x any) {
	*q = append(*q, entryOf(x.(*bucket)))
}

// Pop implements heap.Interface.
func (q *queue) Pop() any {
	old := *q
	b := old[len(old)-1].bucket
	old[len(old)-1] = queued{}
	*q = old[:len(old)-1]
	return b
}
