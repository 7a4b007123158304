// Package window counts the tokens taken in a window of time: limit, remaining,
// reset.
//
// # Which kind
//
// A [Fixed] window starts at a key's first take and ends its length later;
// then the next take starts a new one. It is the smallest and the easiest to
// explain, and it admits up to 2·Limit around an edge: with 100 tokens a
// minute, 100 takes at 0:59.9 of one window and 100 at 0:00.1 of the next are
// 200 takes in 0.2 seconds.
//
// A [Sliding] window admits at most Limit tokens in any stretch of time as long
// as the window, edges or not. It counts in [Slots] slots, so a token comes back
// up to a tenth of the window later than its take is old: a caller that always
// takes all it can get has Limit tokens in 1.1 windows at the worst.
//
// A take that is denied counts for nothing in either.
//
// # What is stored
//
// A fixed window K is one integer at {K}:win, the tokens left, which expires
// with the window. A client that knows only DECR and PTTL can use the same key:
// DECR answers what is left, below zero is denied, and PTTL is the time to the
// reset. Such clients ask twice, and the key may vanish between: their DECR then
// makes a key of -1 that never expires. A Limiter asks once, takes a number below
// zero for zero, and a key without an expiry for none, so a window always ends.
//
// A sliding window is one short string at {K}:sld, which expires when its last
// take no longer counts. The clock is the server's.
//
// # Use
//
// [New] makes a Limiter on Redis, single, Sentinel or Cluster; [NewLocal] one
// for a single process, which behaves alike. All methods are safe for
// concurrent use. A call costs one script call, which is sent once: after an
// error that is [fetch.ErrUnavailable] the tokens may have been taken. A call
// ends when its context does, whatever the options of the Redis client.
package window
