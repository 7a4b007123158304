package policy

import "time"

// Limits of the time that tokens are held.
const (
	MinHold = time.Millisecond // shortest time of a reservation or lease
	MaxHold = 24 * time.Hour   // longest time of a reservation or lease
	// HoldMemory is how long a reservation is remembered that was settled or whose
	// time is over.
	HoldMemory = time.Minute
)

// Overrun says what happens if more of a reservation is used than was reserved
// and than the bucket holds.
type Overrun int64

// What becomes of tokens that were used and can't be paid.
const (
	OverrunClamp Overrun = iota // they are forgiven: the bucket is empty
	OverrunDebt                 // refills pay them before they add any, up to the capacity
)

// Settlement is what became of the tokens of a reservation. Those that were not
// used are returned, clamped or void; those that were used beyond it are charged,
// owed or forgiven.
type Settlement struct {
	Returned int64 // went back
	Clamped  int64 // found the bucket full
	Void     int64 // belong to another era, so nothing goes back
	Charged  int64 // were taken from the bucket
	Owed     int64 // became debt
	Forgiven int64 // no bucket pays for them
}

// Swept is what became of tokens whose holders let their time pass: those of
// reservations are returned, clamped or void, those of leases dropped.
type Swept struct{ Returned, Clamped, Void, Dropped int64 }
