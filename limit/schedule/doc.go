// Package schedule answers whether something may be done at an instant to come,
// and reserves it: a mail at 9:00 tomorrow, when at most 1 goes out per minute,
// 5 per hour and 10 per day.
//
// # The rule
//
// A reservation is admitted if each [Window] has room at the instant. A window
// is of one of two kinds:
//
//   - One with a Length slides: every stretch of time of that length which
//     contains the instant holds at most Limit reservations, this one included.
//     Neighbours on both sides count, whatever the order in which they were
//     reserved. It knows nothing of midnight, time zones or summer time, only of
//     instants. A stretch includes its beginning and not its end, so with 1 per
//     minute 12:00:00 and 12:01:00 both fit.
//   - One with Per counts in the minute, hour, day, week or month of the calendar
//     that contains the instant, in a time zone (see package calendar). It admits
//     up to twice its Limit around its edge: ten before midnight, ten after.
//
// One Config may have both kinds. Instants are whole microseconds; a finer one is rounded down.
//
// One script checks and reserves, on the server's clock. An instant that has passed is [ErrPast], one beyond
// [Config.Horizon] is [ErrHorizon]. A denial names the windows without room and the next instant that has some.
//
// # Ids
//
// Every reservation has an id of the caller's. Reserving the same id for the
// same instant again changes nothing and is admitted, so a call whose reply was
// lost is made again; for another instant it is [ErrIDTaken]. [Limiter.Cancel]
// gives the instant back; one that has passed stays, since what was sent counts.
//
// # As a limiter of requests
//
// [Limiter.Take] reserves the present instant, so the middlewares can use a schedule like any other limiter.
// Reservations for later instants count.
//
// [Limiter] describes what is stored. Package limit describes what all limiters have in common.
package schedule
