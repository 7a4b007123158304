// Package lazy is a bucket that no refiller refills: it is credited when it is
// asked, for the time since.
//
// It is the limiter for the long tail, such as millions of keys, one for each
// user. A bucket of capacity C and rate R admits at most C + R·d tokens in any
// time d, exactly: fractions of a token are kept, and what falls due while the
// bucket is full is never counted later.
//
// # What is stored
//
// A bucket K is one integer at {K}:lazy: the instant at which it will be full. A full bucket has no key at all, so the
// key of an unused bucket expires when its bucket would be full again (see [Config.DrainTime]). The clock is the
// server's; a caller's clock has no effect. If the server's clock goes back, a bucket is at worst empty until the clock
// reaches its former time, and denials say how long that is. The key is not corrected, because a smaller capacity in
// another program has the same appearance as a clock that went back. Then tokens would be minted each time that both
// programs take. Deleting {K}:lazy fills the bucket.
//
// The instant is exact where a token is no whole number of microseconds, as at
// 7/m: the key expires with the instant's millisecond and holds by how much the
// instant is earlier, in the fractions of the rate. A change of the policy keeps
// the time until the bucket is full; of the rate, to the millisecond.
//
// Package limit says what its Limiter has in common with the others.
package lazy
