// Package pacing spaces work evenly: a leaky bucket used as a queue.
//
// Takes get places at intervals of 1/rate. A take that comes when the next place is free is admitted at once. Other
// takes get a time to wait for theirs, and are denied if that is longer than [Config.MaxWait]. Nothing is ever sent in
// a burst: with 10/s, ten takes at once are spread over 0.9 seconds.
//
// A queue K is one integer at {K}:pace, the next free place, which expires when that is now. Places are exact where
// 1/rate is no whole number of microseconds. The clock is the server's; if it goes back, no take gets a place until it
// reaches its former time, or {K}:pace is deleted.
//
// [Limiter.Reserve] answers at once with the time to wait; [Limiter.Take] waits. A place whose taker gives up passes
// unused, because the takers behind it already have their times.
//
// Package limit says what its Limiter has in common with the others.
package pacing
