// Package schedule reserves future instants under limits. For example, it answers whether a mail may be sent at 9:00
// tomorrow, if at most 1 mail is sent per minute, 5 per hour and 10 per day. It is not for limits that only concern the
// present: packages window and lazy need less memory.
//
// # The rule
//
// A reservation is admitted if each [Window] has room at the instant. A window
// is of one of two kinds:
//
//   - A window with a Length slides. Every stretch of time that has this length and contains the instant holds at most
//     Limit reservations, including the new one. Earlier and later reservations count, whatever the order in which they
//     were made. Midnight, time zones and summer time have no effect. A stretch includes its beginning and not its end,
//     so with 1 per minute 12:00:00 and 12:01:00 both fit.
//   - A window with Per counts the reservations in the minute, hour, day, week or month of the calendar that contains
//     the instant, in a time zone (see package calendar). Around the end of such a unit it admits up to twice its
//     Limit, such as ten before midnight and ten after it.
//
// One Config may have both kinds. Instants are whole microseconds; a finer one is rounded down.
//
// One script checks and reserves, on the server's clock. The error is [ErrPast] for an instant that has passed, and
// [ErrHorizon] for an instant beyond [Config.Horizon]. A denial names the windows without room, and the next instant at
// which all windows have room.
//
// # Ids
//
// The caller gives each reservation an id. If the same id is reserved for the same instant again, nothing changes and
// the answer is the same. So a call whose reply was lost can be repeated. If the id is reserved for another instant,
// the error is [ErrIDTaken]. [Limiter.Cancel] gives an instant back, unless it has passed.
//
// # As a limiter of requests
//
// [Limiter.Take] reserves the present instant, so the middlewares can use a schedule like any other limiter.
// Reservations for later instants count.
//
// [Limiter] describes what is stored. The documentation of package limit applies to this Limiter, too.
package schedule
