// Package window counts the tokens in a window of time: limit, remaining, reset.
//
// # Which kind
//
// A [Fixed] window starts at a key's first take and ends its length later; then the next take starts a new one. It is
// the smallest and the easiest to explain, and it admits up to 2·Limit around an edge: with 100 tokens a minute, 100
// takes at 0:59.9 of one window and 100 at 0:00.1 of the next are 200 takes in 0.2 seconds.
//
// With [Config.Per] a fixed window is a minute, hour, day, week or month of the
// calendar in a time zone, for "1,000 a day" that begins anew at midnight. The
// server's clock decides which one it is. To reserve instants to come under such
// windows, use package schedule; to have a bucket refilled at midnight, a
// calendar (cron) in its policy.
//
// A [Sliding] window admits at most Limit tokens in any stretch of time as long
// as the window, edges or not. It counts in [Slots] slots, so a token comes back
// up to a tenth of the window later than its take is old: a caller that always
// takes all it can get has Limit tokens in 1.1 windows at the worst.
//
// A take that is denied counts for nothing in either.
//
// # A limit that changes
//
// A changed limit is in force at once, in both kinds, and earlier takes of the window count against it: raised from 5
// to 1,000 after 2 takes it leaves 998. Lowered to 10 after 50 takes it leaves none until the window ends or, in a
// sliding window, enough takes have left it.
//
// # A length that changes
//
// What was taken counts under a changed length too, also while programs with the
// old and the new one share a key, as in a rolling deployment. A fixed window then
// ends no later than the shorter length allows. Of sliding windows of several
// lengths on one key, no stretch as long as the shortest admits more than the
// largest limit: each take counts at least that long, and may be forgotten for the
// longer windows then.
//
// # What is stored
//
// A fixed window K is one integer at {K}:win, the tokens taken, which expires
// with the window. A client that knows only INCR and PTTL can use the same key:
// INCR answers what is taken, above the limit is denied, and PTTL is the time to
// the reset. Such a client asks more than once, and the key may vanish between:
// INCR then makes a key that never expires. A Limiter asks once, and takes a key
// without an expiry for none, so a window always ends.
//
// A sliding window is one short string at {K}:sld. It has the newest slot with a take, the length of slots in µs, and
// the number of tokens of this slot and of each before it. It expires when its last take no longer counts. The clock is
// the server's.
//
// Package limit says what its Limiter has in common with the others.
package window
