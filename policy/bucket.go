package policy

// ClockTolerance is how far, in microseconds, a server's clock may step back
// before the bucket starts a new era.
const ClockTolerance = 50_000

// Uncounted is the Due of a bucket that may have reservations and leases which its state does not count. This is so if
// the state was lost and the reservations and leases were not. Uncounted is an instant in the past, so that a sweep is
// due at once. The sweep counts them.
const Uncounted = 1

// Status is the result of a refill.
type Status int64

// Statuses of a refill, in the order of the protocol's rules. Those that write
// add one to the index.
const (
	StatusApplied     Status = iota + 1 // credited what was due; writes
	StatusSwitched                      // the index was old, but the fence is newer: credited, then switched; writes
	StatusStale                         // the caller's (era, index) is old; nothing written
	StatusEarly                         // less than half an interval since the last refill; nothing written
	StatusForeign                       // another program moved the index: that time isn't credited again; writes
	StatusInitialised                   // created or adopted; writes
	StatusUnknown                       // no such bucket, and this call may not create it; nothing written
	StatusRolledBack                    // the server lost a write that the caller knows: new era; writes
	StatusClock                         // the server's clock stepped back: new era; writes
	StatusMalformed                     // a key holds something else; nothing written
	StatusConflict                      // a pool's terms for a plain bucket, or the reverse; nothing written
)

// Wrote reports whether the call changed the bucket.
func (s Status) Wrote() bool {
	switch s {
	case StatusApplied, StatusSwitched, StatusForeign, StatusInitialised, StatusRolledBack, StatusClock:
		return true
	}
	return false
}

// String names the status as logs and metrics do.
func (s Status) String() string {
	names := [...]string{
		"", "applied", "switched", "stale", "early", "foreign", "initialised", "unknown", "rolled_back", "clock",
		"malformed", "conflict",
	}
	if s < 1 || int(s) >= len(names) {
		return "invalid"
	}
	return names[s]
}

// Create determines whether a refill may create a bucket that is missing.
type Create int64

// When a refill may create a missing bucket.
const (
	CreateNever   Create = iota // never; nor may it adopt a bucket that another program made
	CreateLost                  // if the caller remembers the bucket, which was then lost
	CreateInitial               // also if the caller doesn't remember the bucket, which is then new
)

// Version has an era, which names one unbroken history of a bucket, and the index within it. A caller remembers the
// Version of its last reply. The zero Version belongs to a caller that has had no reply.
type Version struct{ Era, Index int64 }

// Before reports whether v is older than w.
func (v Version) Before(w Version) bool {
	return v.Era < w.Era || v.Era == w.Era && v.Index < w.Index
}

// Call is one refill call.
type Call struct {
	Version Version
	Create  Create
	Terms   *Terms // nil if the call brings no policy, as a consumer's refill does
	Step    int64  // stepped: the scheduled instant to credit, Unix µs; 0 for none
	Next    int64  // stepped: the instant after it, or the next to come
}

// Outcome is the reply to a refill.
type Outcome struct {
	Status  Status
	Differs bool    // the terms differ from those in force under the same fence: they were ignored
	Version Version // what the next call sends as its Version; the index is the copy in the bucket's state
	Now     int64   // the server's clock, Unix µs
	Last    int64   // the last refill that counts, Unix µs
	Carry   int64   // credit below one token
	Tokens  int64
	Added   int64 // tokens added, and those that paid debt
	Clamped int64 // tokens due that the full bucket could not hold
	Elapsed int64 // µs from the refill before to this one; 0 unless this one credited that time
	Fence   Fence // of the terms in force
	Step    int64 // the last instant credited; 0 unless stepped

	Pool         bool  // the terms in force are a pool's
	FileVersion  int64 // of the configuration that the terms are from, or the highest that a caller has had since
	PoolsVersion int64 // the same of the pools; 0 unless the terms are a pool's

	Outstanding int64 // tokens held in reservations and leases
	Due         int64 // when the first of them ends, Unix µs; 0 if there is none; or Uncounted
	Debt        int64 // tokens that refills pay before they add any
}

// Control is the bucket's state beside its tokens and index.
type Control struct {
	Terms Terms
	Era   int64
	Index int64 // copy of the index as our last write left it
	Last  int64 // the last refill, Unix µs; also the latest time that the clock has shown
	Carry int64 // credit below one token, in units of 1/Per token
	Step  int64 // the last scheduled instant credited
	Next  int64 // the scheduled instant after it

	Outstanding int64 // tokens held in reservations and leases
	Due         int64 // when the first of them ends, Unix µs; 0 if there is none; or Uncounted
	Debt        int64 // tokens that refills pay before they add any
}

// room returns the most tokens that the bucket may hold. This is its capacity or, under strict terms, its capacity less
// the outstanding tokens.
func (s *Control) room() int64 {
	if s.Terms.Strict {
		return max(0, s.Terms.Capacity-s.Outstanding)
	}
	return s.Terms.Capacity
}

// Bucket is a bucket's complete state. A nil part is a missing key, so the zero Bucket is a bucket that doesn't exist.
type Bucket struct {
	Tokens  *int64
	Index   *int64
	Control *Control

	Override *Terms // of the key; it is read when the bucket is created
}
