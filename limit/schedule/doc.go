// Package schedule reserves future instants under limits. For example, it answers whether a mail may be sent at 9:00
// tomorrow, if at most 1 mail is sent per minute, 5 per hour and 10 per day. It is not for limits that only concern the
// present: packages window and lazy need less memory.
//
// # The rule
//
// A reservation is admitted if each [Window] has room at the instant. A window
// is of one of two kinds:
//
//   - One with a Length slides: every stretch of time of that length which contains the instant holds at most Limit
//     reservations, this one included. Earlier and later reservations count, whatever the order in which they were
//     made. Midnight, time zones and summer time have no effect. A stretch includes its beginning and not its end, so
//     with 1 per minute 12:00:00 and 12:01:00 both fit.
//   - One with Per counts in the minute, hour, day, week or month of the calendar that contains the instant, in a time
//     zone (see package calendar). It admits up to twice its Limit around an edge, such as ten before midnight and ten
//     after it.
//
// One Config may have both kinds. Instants are whole microseconds; a finer one is rounded down.
//
// One script checks and reserves, on the server's clock. An instant that has passed is [ErrPast], one beyond
// [Config.Horizon] is [ErrHorizon]. A denial names the windows without room and the next instant that has some.
//
// # Ids
//
// The caller gives each reservation an id. If the same id is reserved for the same instant again, nothing changes and
// the answer is the same. So a call whose reply was lost can be repeated. For another instant the error is
// [ErrIDTaken]. [Limiter.Cancel] gives an instant back, unless it has passed.
//
// # As a limiter of requests
//
// [Limiter.Take] reserves the present instant, so the middlewares can use a schedule like any other limiter.
// Reservations for later instants count.
//
// [Limiter] describes what is stored. The documentation of package limit applies to this Limiter, too.
package schedule
