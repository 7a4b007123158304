// Package engine brings what many goroutines ask of a server to it, together.
//
// A [Queue] is the way to one server. A caller adds its [Request] and waits. Calls depart by one rule: when none is
// under way, or a millisecond after the last departure, up to a number at once. A call takes along all that waits, so
// over a loopback there is one call at a time, over a round trip of 20 ms some twenty, and nobody waits for company for
// longer than that millisecond. Workers make the calls, goroutines of the Queue that end when there is nothing to do; a
// lone request's call is made by its caller where round trips are short ([Express]).
//
// # Time
//
// A caller's time is its own: it waits until its deadline or until its context is cancelled, whatever others do. One
// timer per Queue keeps the deadlines of all. Before the Queue gives a caller up it looks once more: there are 5 ms in
// which a reply that has arrived can be read. If this process was stopped or starved meanwhile, the caller gets that
// time in addition, at most as much as it had at first: the timer fires every few milliseconds and shows its own delay.
// Goroutines that are ready when the timer fires run first. The connections of [Sockets] do the same for reads.
//
// A request may allow that its deadline is put off while connections are opened ([Request.Latest]): it then has its
// whole time after the last one was opened.
//
// Package fetch decides the deadline (its budget), and the Queue enforces it when its timer looks.
//
// Requests are sent once. If the caller leaves before the departure, its request is not sent. A reply that comes within
// Grace after the last caller's time, and within a minute, is still read, and the [Sender] hears that nobody waits.
//
// # Breaker
//
// A [Breaker] judges the server: calls that it failed, and silence, which is evidence only if the call was under way
// for as long as a server has time for, and nothing else was heard from the server meanwhile. What waits in the Queue
// is none, nor, for a second, what waits for a connection. It opens when half of the recent calls failed, is probed
// while it is open, and closes when a probe is answered.
//
// After a silence [Sockets] retires the connections that exist, and after a probe without an answer it closes them: the
// network may have forgotten them without a word.
//
// The package knows nothing of buckets. [Commands] is a Queue of single Redis commands.
package engine
