// Package engine sends the requests of many goroutines to one server, in shared round trips.
//
// A caller adds its [Request] to a [Queue] and waits. A call is one round trip with all requests that wait when it
// departs. It departs at once if no other call is under way. Otherwise it departs a millisecond after the last
// departure, if fewer calls than the maximum are under way. So there is one call at a time over a loopback, and about
// twenty over a round trip of 20 ms. A goroutine of the Queue makes a call, and then the next one if that may depart.
// If the round trip is short, the caller of a lone request makes the call itself ([Express]).
//
// # Time
//
// Each caller has its own time: it waits until its deadline or until its context is cancelled, whatever the others do.
// One timer per Queue enforces all deadlines. When a deadline has passed, the Queue waits 5 ms more, so that a reply
// that has arrived can be read. If this process was stopped or lacked processor time meanwhile, its deadline is
// postponed by that time, but at most by the length of the original wait. The timer fires every few milliseconds, so
// its own delay shows such a stop. Goroutines that are ready when the timer fires run first. The connections of
// [Sockets] extend the deadlines of reads in the same way.
//
// A request may allow its deadline to be postponed while connections are opened ([Wait]). Its whole time then
// begins when the last connection was opened.
//
// Package fetch decides the deadline of a call (its budget), and the Queue enforces it when the timer fires.
//
// Requests are sent once. If the caller leaves before the departure, its request is not sent. A reply is still read
// until [Grace] after the last caller's deadline, at most a minute after the departure. [Request.Answer] then reports
// to the [Sender] that no caller waits.
//
// # Breaker
//
// A [Breaker] decides whether the server may be called. It has two kinds of evidence: failed calls and silence. Silence
// is evidence only if the call was under way for long enough and the server sent nothing else meanwhile. Requests that
// wait in the Queue are no evidence. The silence about calls that wait for a connection is no evidence during the first
// second. The breaker opens when half of the recent calls failed. While it is open the Queue probes the server, and it
// closes when a probe is answered.
//
// After a silence no further call uses the existing connections, and after a probe without an answer they are closed.
// Otherwise calls would go on using connections that the network dropped without an error.
//
// The package knows nothing of buckets. [Commands] is a Queue of single Redis commands.
package engine
