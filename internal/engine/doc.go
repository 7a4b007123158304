// Package engine brings what many goroutines ask of a server to it, together.
//
// A [Queue] sends calls to one server. A caller adds its [Request] and waits. Calls depart by one rule: when no call is
// under way, or a millisecond after the last departure, up to a number at once. A call takes along all waiting
// requests. So over a loopback there is one call at a time, over a round trip of 20 ms there are about twenty, and no
// request waits for others for longer than that millisecond. A goroutine of the Queue makes a call, and then the next
// one if that may depart. If the round trip is short, the caller of a lone request makes the call itself ([Express]).
//
// # Time
//
// Each caller has its own time: it waits until its deadline or until its context is cancelled, whatever the others do.
// One timer per Queue keeps all deadlines. Before the Queue gives up a caller it waits 5 ms more, in which a reply that
// has arrived can be read. If this process was stopped or lacked processor time meanwhile, the caller gets that time in
// addition, at most as much as it had at first. The timer fires every few milliseconds, so its own delay shows such a
// stop. Goroutines that are ready when the timer fires run first. The connections of [Sockets] do the same for reads.
//
// A request may allow that its deadline is put off while connections are opened ([Request.Latest]): it then has its
// whole time after the last one was opened.
//
// Package fetch decides the deadline (its budget), and the Queue enforces it when its timer fires.
//
// Requests are sent once. If the caller leaves before the departure, its request is not sent. A reply that comes within
// Grace after the last caller's time, and within a minute, is still read. Then [Request.Answer] reports to the [Sender]
// that no caller waits.
//
// # Breaker
//
// A [Breaker] judges the server by two kinds of evidence: calls that the server failed, and silence. Silence is
// evidence only if the call was under way for long enough and the server sent nothing else meanwhile. Requests that
// wait in the Queue are no evidence, and for a second neither are those that wait for a connection. The breaker opens
// when half of the recent calls failed. It is probed while it is open, and closes when a probe is answered.
//
// After a silence [Sockets] retires the connections that exist, and after a probe without an answer it closes them: the
// network may have forgotten them without a word.
//
// The package knows nothing of buckets. [Commands] is a Queue of single Redis commands.
package engine
