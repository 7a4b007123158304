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
// [Limiter] describes a changed length and what is stored. Package limit says what its Limiter has in common with the
// others.
package window
