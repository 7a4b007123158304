// Package pacing spaces work evenly. It is a leaky bucket that is used as a queue. It is not for work that may come in
// bursts: see packages lazy and window.
//
// Takes get places at intervals of 1/rate. A take that comes when the next place is free is admitted at once. Any other
// take has to wait for its place. If the wait would be longer than [Config.MaxWait], the take is denied. So the work
// never comes in a burst: with 10/s, ten takes at once are spread over 0.9 seconds.
//
// A queue K is one integer at {K}:pace: the instant of the next free place. The key expires at that instant. Places are
// exact even if 1/rate is no whole number of microseconds. The clock is the server's. If it goes back, no take gets a
// place until the clock reaches its former time, or {K}:pace is deleted.
//
// [Limiter.Reserve] returns at once, with the time to wait. [Limiter.Take] waits. If a caller gives up, its place stays
// unused, because later callers already have their times.
//
// The documentation of package limit applies to this Limiter, too.
package pacing
