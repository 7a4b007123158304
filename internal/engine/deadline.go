package engine

import "time"

const (
	// graceRead is how much longer a caller waits when its time is over. A reply that came while this process did not run
	// can then be read.
	graceRead = 5 * time.Millisecond
	// Stall is the shortest delay of a timer that counts as a time in which this process did not run.
	Stall = time.Millisecond
)

// deadline is the end of a caller's wait for a reply.
type deadline struct {
	at       time.Time     // zero: none
	stalled  time.Duration // how much of Queue.stalled it already includes
	most     time.Duration // the value of Queue.stalled beyond which it isn't put off
	extended bool          // it was postponed by graceRead
}

// newDeadline returns the deadline of a wait from now until an instant. stalled is the value of Queue.stalled at its
// beginning.
func newDeadline(now, at time.Time, stalled time.Duration) deadline {
	return deadline{at: at, stalled: stalled, most: stalled + at.Sub(now)}
}

// expireOrExtend reports whether the time is over. stalled is the present value of Queue.stalled. When the deadline
// passes for the first time, it is postponed by graceRead. It is also postponed by the time for which this process did
// not run since the wait began, in total by no more than the original wait.
func (d *deadline) expireOrExtend(now time.Time, stalled time.Duration) bool {
	if d.at.IsZero() || now.Before(d.at) {
		return false
	}
	more := min(stalled, d.most) - d.stalled
	if d.extended && more < Stall {
		return true
	}
	d.stalled += more
	if !d.extended {
		d.extended = true
		more += graceRead
	}
	d.at = now.Add(more)
	return false
}

// earlier returns the earlier of two instants, where the zero time means never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
