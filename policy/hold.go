package policy

import "time"

// Limits of the time that tokens are held.
const (
	MinHold = time.Millisecond // shortest time of a reservation or lease
	MaxHold = 24 * time.Hour   // longest time of a reservation or lease
	// HoldMemory is how long a reservation is remembered after it was settled or its time was over.
	HoldMemory = time.Minute
)

// Overrun determines what happens to tokens that were used beyond a reservation, if the bucket has too few to pay for
// them.
type Overrun int64

// What happens to tokens that were used and that the bucket can't pay.
const (
	OverrunClamp Overrun = iota // they are forgiven: the bucket is empty
	OverrunDebt                 // refills pay them before they add any, up to the capacity
)

// Settlement reports what happened to the tokens of a reservation. Tokens that were not used are returned, clamped or
// void. Tokens that were used beyond the reservation are charged, owed or forgiven.
type Settlement struct {
	Returned int64 // returned to the bucket
	Clamped  int64 // not returned, because the bucket was full
	Void     int64 // not returned, because they are of another era
	Charged  int64 // taken from the bucket
	Owed     int64 // added to the bucket's debt
	Forgiven int64 // not paid by the bucket
}

// Swept counts the tokens of reservations and leases whose time was over. Those of reservations are returned, clamped
// or void. Those of leases are dropped.
type Swept struct{ Returned, Clamped, Void, Dropped int64 }
