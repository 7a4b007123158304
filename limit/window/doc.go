// Package window limits the tokens that are taken in a window of time.
//
// # Which kind
//
// A [Fixed] window starts at a key's first take and ends its length later. The next take after that starts a new one.
// It needs the least memory and is the easiest to explain, but it admits up to 2·Limit around the end of a window. For
// example, with 100 tokens a minute, 100 takes at 0:59.9 of one window and 100 takes at 0:00.1 of the next are 200
// takes within 0.2 seconds.
//
// With [Config.Per] a fixed window is a minute, hour, day, week or month of the calendar in a time zone. So "1,000 a
// day" begins anew at midnight. The server's clock determines the window of a take. To reserve future instants under
// such windows, use package schedule. For a bucket that is refilled at midnight, use a calendar (cron) in its policy.
//
// A [Sliding] window admits at most Limit tokens in any stretch of time as long as the window. It counts in [Slots]
// slots. So a token comes back when its take is one window old, or up to a tenth of a window later. So in the worst
// case, a caller that takes as much as it can gets only Limit tokens in 1.1 windows.
//
// A take that is denied is not counted, in both kinds.
//
// # A limit that changes
//
// A changed limit is in force at once, in both kinds, and earlier takes of the window count against it. For example, if
// it is raised from 5 to 1,000 after 2 takes, 998 tokens are left. If it is lowered to 10 after 50 takes, no tokens are
// left until the window ends. In a sliding window, there are tokens again when enough takes have left the window.
//
// [Limiter] describes what is stored, and what happens if the length changes. The documentation of package limit
// applies to this Limiter, too.
package window
