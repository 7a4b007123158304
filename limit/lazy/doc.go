// Package lazy is a bucket that no refiller refills. Each take first credits the bucket for the time since the take
// before.
//
// Use it for very many keys that are used rarely, such as one for each of millions of users. It is not for a rate that
// several regions share, or for a bucket that is divided among flows: see packages pool and fetch. A bucket of capacity
// C and rate R admits at most C + R·d tokens in any time d. This bound is exact: fractions of a token are kept, and
// tokens that fall due while the bucket is full are never credited later.
//
// # What is stored
//
// A bucket K is one integer at {K}:lazy: the instant at which it will be full. A full bucket has no key, so the key of
// an unused bucket expires when the bucket would be full again (see [Config.DrainTime]).
//
// Only the server's clock counts, and not the clock of a caller. If the server's clock goes back, a bucket is at worst
// empty until the clock reaches its former time. RetryAfter of a denial includes this time. Deleting {K}:lazy fills the
// bucket. The limiter itself doesn't correct the key, because it can't distinguish a clock that went back from a
// program with a larger capacity. If it did, tokens would be created whenever programs with different capacities use
// the bucket in turn.
//
// The instant is exact even if a token isn't earned in a whole number of microseconds, as at 7/m. The expiry of the key
// is the instant, rounded up to a millisecond. The value of the key is how much earlier the instant is, in fractions of
// a microsecond that depend on the rate. A change of the policy keeps the time until the bucket is full. If the rate
// changes, it keeps that time to the millisecond.
//
// The documentation of package limit applies to this Limiter, too.
package lazy
