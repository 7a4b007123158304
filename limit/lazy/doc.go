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
// The clock is the server's; a caller's clock has no effect. If the server's clock goes back, a bucket is at worst
// empty until the clock reaches its former time, and denials say how long that is. Deleting {K}:lazy fills the bucket.
// The limiter itself doesn't correct the key, because it can't distinguish a clock that went back from a program with a
// larger capacity. Otherwise tokens would be minted whenever programs with two capacities use the bucket in turn.
//
// The instant is exact even if a token takes no whole number of microseconds, as at 7/m: the key expires with the
// instant's millisecond, and its value is how much earlier the instant is, in the fractions of the rate. A change of
// the policy keeps the time until the bucket is full. If the rate changes, it keeps that time to the millisecond.
//
// The documentation of package limit applies to this Limiter, too.
package lazy
