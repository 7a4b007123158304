package pool

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Limits of a pool.
const (
	MaxRegions = 100 // regions of one pool
	MaxName    = 128 // bytes of a pool's or region's name
	// DefaultFloorShare is the default of Pool.FloorShare, in percent.
	DefaultFloorShare = 20
)

// ErrPool is returned for an invalid pool. A FieldError has the reason.
var ErrPool = errors.New("pool: bad pool")

// FieldError describes an invalid value of a field of a Pool. Field is the name of the field in a configuration.
type FieldError struct {
	Region string // empty: a field of the pool itself
	Field  string
	Msg    string
}

// Error implements error.
func (e *FieldError) Error() string {
	if e.Region != "" {
		return fmt.Sprintf("pool: regions.%s.%s: %s", e.Region, e.Field, e.Msg)
	}
	return fmt.Sprintf("pool: %s: %s", e.Field, e.Msg)
}

// Is makes every FieldError match ErrPool.
func (e *FieldError) Is(target error) bool { return target == ErrPool }

// Pool is one rate and one capacity that several regions share. Each region has a bucket with the pool's name.
type Pool struct {
	Name     string        // the buckets' key: letters, digits and any of . _ : -
	Rate     policy.Rate   // R: the rates in force in all regions together never exceed it
	Capacity int64         // C: the capacities in force in all regions together never exceed it
	Interval time.Duration // refill interval; 0 means policy.DefaultInterval
	Regions  []Region      // at least one; names are distinct
	// FloorShare is φ: the largest percentage of the rate that all floors may have together, 1 to 100; 0 means
	// DefaultFloorShare. A floor is always reserved for its region, so this part of the rate can't follow the demand.
	FloorShare int64
	// Flows divides the region's bucket among flows; nil means that the bucket isn't divided. It is not written to etcd,
	// so each region uses the Flows of its own configuration.
	Flows *policy.Flows
}

// Region is a region's part in a pool.
type Region struct {
	Name    string
	Weight  int64       // 1 to policy.MaxWeight: decides its part when tokens are short or left over
	Floor   policy.Rate // the rate that is always reserved for it; zero means its part, by weight, of φR
	Burst   int64       // capacity of its bucket; 0 means its part, by weight, of the pool's capacity
	Ceiling policy.Rate // the highest rate that it gets; zero means no limit

	since int64 // the version of the settings in etcd with which the region last joined the pool
}

var name = regexp.MustCompile(`^[A-Za-z0-9._:-]+$`)

func validName(s string) bool { return len(s) <= MaxName && name.MatchString(s) }

// Validate returns a FieldError for each invalid field of p, joined to one error, or nil.
func (p Pool) Validate() error {
	var errs []error
	bad := func(region, field, format string, args ...any) {
		errs = append(errs, &FieldError{Region: region, Field: field, Msg: fmt.Sprintf(format, args...)})
	}
	if !validName(p.Name) {
		bad("", "name", "%q: want 1 to %d letters, digits and any of . _ : -", p.Name, MaxName)
	}
	if p.Capacity < 1 || p.Capacity > policy.MaxTokens {
		bad("", "capacity", "%d is not a whole number from 1 to %d", p.Capacity, int64(policy.MaxTokens))
	}
	if i := p.interval(); i < policy.MinInterval || i > policy.MaxInterval || i%time.Microsecond != 0 {
		bad("", "interval", "%s is not from %s to %s in whole microseconds", i, policy.MinInterval, policy.MaxInterval)
	}
	if err := p.Rate.Validate(); err != nil {
		bad("", "rate", "%v", err)
	}
	if p.FloorShare < 0 || p.FloorShare > 100 {
		bad("", "floor_share", "%d is not from 1 to 100 percent", p.FloorShare)
	}
	if n := len(p.Regions); n < 1 || n > MaxRegions {
		bad("", "regions", "%d of them: want 1 to %d", n, MaxRegions)
	}
	seen := map[string]bool{}
	for _, r := range p.Regions {
		switch {
		case !validName(r.Name):
			bad(r.Name, "name", "%q: want 1 to %d letters, digits and any of . _ : -", r.Name, MaxName)
		case seen[r.Name]:
			bad(r.Name, "name", "it is there twice")
		}
		seen[r.Name] = true
		if r.Weight < 1 || r.Weight > policy.MaxWeight {
			bad(r.Name, "weight", "%d is not a whole number from 1 to %d", r.Weight, policy.MaxWeight)
		}
		if r.Burst < 0 || r.Burst > policy.MaxTokens {
			bad(r.Name, "burst", "%d is not a whole number from 0 to %d", r.Burst, int64(policy.MaxTokens))
		}
		for _, f := range []struct {
			field string
			rate  policy.Rate
		}{{"floor", r.Floor}, {"ceiling", r.Ceiling}} {
			if f.rate != (policy.Rate{}) && f.rate.Validate() != nil {
				bad(r.Name, f.field, "%v", f.rate.Validate())
			}
		}
	}
	var wrong *policy.FieldError
	if p.Flows != nil && errors.As(p.Flows.Validate(), &wrong) {
		bad("", wrong.Field, "%s", wrong.Msg)
	}
	if len(errs) == 0 {
		p.validateSums(bad)
	}
	return errors.Join(errs...)
}

// validateSums checks the fields against each other.
func (p Pool) validateSums(bad func(region, field, format string, args ...any)) {
	u := p.unit()
	if float64(u.total)*float64(p.maxElapsed())+float64(u.micros) >= 1<<53 {
		bad("", "rate", "%s over %dus of credit is not below 2^53 units: use a coarser rate", p.Rate, p.maxElapsed())
		return
	}
	parts := p.parts()
	var floors, bursts int64
	least := int64(math.Ceil(2 * float64(p.interval().Microseconds()) * float64(u.total) / float64(u.micros)))
	for i, part := range parts {
		floors += part.floor
		bursts += part.burst
		if part.burst < least {
			bad(p.Regions[i].Name, "burst", "%d is below %d, the tokens of two refill intervals of %s at the pool's rate, %s, "+
				"which one region may get: raise it, or lower the interval",
				part.burst, least, p.interval(), p.Rate)
		}
		if part.ceiling > 0 && part.ceiling < part.floor {
			bad(p.Regions[i].Name, "ceiling", "%s is below the floor", p.Regions[i].Ceiling)
		}
	}
	if floors > p.floorsAtMost() {
		bad("", "regions", "the floors are %.4g %% of the rate together: want at most floor_share, %d %%, "+
			"since the rest is what can be shared",
			100*float64(floors)/float64(u.total), p.floorShare())
	}
	if bursts > p.Capacity {
		bad("", "regions", "the bursts are %d together: want at most the capacity, %d", bursts, p.Capacity)
	}
}

func (p Pool) interval() time.Duration {
	if p.Interval == 0 {
		return policy.DefaultInterval
	}
	return p.Interval
}

func (p Pool) floorShare() int64 {
	if p.FloorShare == 0 {
		return DefaultFloorShare
	}
	return p.FloorShare
}

// floorsAtMost returns φR, the highest rate that all floors may have together, in the pool's units.
func (p Pool) floorsAtMost() int64 { return policy.MulDiv(p.unit().total, p.floorShare(), 100) }

// maxElapsed returns e_max in microseconds: the longest time that one refill credits.
func (p Pool) maxElapsed() int64 {
	return max(2*time.Second, 5*p.interval()).Microseconds()
}

// unit is the unit in which the rates of a pool are counted: one token in micros µs. total is the pool's rate in this
// unit.
type unit struct{ total, micros int64 }

// perSecond converts a rate of n units to tokens per second.
func (u unit) perSecond(n int64) float64 { return float64(n) * 1e6 / float64(u.micros) }

// units converts a rate in tokens per second to units.
func (u unit) units(perSecond float64) float64 { return perSecond * float64(u.micros) / 1e6 }

// resolution is the least total of a unit. If micros would become too large, total may be less.
const resolution = 1_000_000

// unit returns a unit in which the pool's rate is a large number, so that it can be divided finely.
func (p Pool) unit() unit {
	r := p.Rate.Reduced()
	a, b := r.Tokens, r.Per.Microseconds()
	k := min((resolution+a-1)/a, (1<<50)/b)
	return unit{a * max(k, 1), b * max(k, 1)}
}

// of converts a rate to whole units, rounded down.
func (u unit) of(r policy.Rate) int64 {
	if r == (policy.Rate{}) {
		return 0
	}
	return policy.MulDiv(r.Tokens, u.micros, r.Per.Microseconds())
}

// part is a region's part in units and tokens, with defaults filled in. fair is its part of the rate by weight.
type part struct{ weight, fair, floor, ceiling, burst, since int64 }

// parts returns the parts of p.Regions, in their order.
func (p Pool) parts() []part {
	u := p.unit()
	var weights int64
	for _, r := range p.Regions {
		weights += r.Weight
	}
	parts := make([]part, len(p.Regions))
	for i, r := range p.Regions {
		fair := policy.MulDiv(u.total, r.Weight, weights)
		parts[i] = part{r.Weight, fair, u.of(r.Floor), u.of(r.Ceiling), r.Burst, r.since}
		if r.Floor == (policy.Rate{}) {
			parts[i].floor = policy.MulDiv(p.floorsAtMost(), r.Weight, weights)
		}
		if r.Burst == 0 {
			parts[i].burst = policy.MulDiv(p.Capacity, r.Weight, weights)
		}
	}
	return parts
}

// Start returns the terms of a region's bucket before any grant, with its floor and its capacity. The caller sets the
// version of the terms.
func (p Pool) Start(region string, poolsVersion int64) policy.Terms {
	i := slices.IndexFunc(p.Regions, func(r Region) bool { return r.Name == region })
	part := p.parts()[i]
	t := termsOf(0, part.floor, part.burst, p.unit().micros, p.interval())
	t.PoolsVersion = poolsVersion
	t.Divided = p.Flows != nil
	return t
}

// Has reports whether the region takes part in the pool.
func (p Pool) Has(region string) bool {
	return slices.ContainsFunc(p.Regions, func(r Region) bool { return r.Name == region })
}

// Timing has the times of the exchange between agents and coordinator. All replicas of all regions must use the same
// Timing.
type Timing struct {
	Report time.Duration // H: how often each region reports; 100 ms to 1 m
	// Lease is L: the time from a ticket to the end of its grant. If etcd is unavailable, a region keeps its share for
	// Lease − Report, and then has its floor. Lease must be at least Report + twice the election's TTL + 1 s. Otherwise
	// regions would fall to their floors when another coordinator is elected.
	Lease time.Duration
}

// DefaultTiming returns the timing for an election with a TTL of 5 s.
func DefaultTiming() Timing { return Timing{Report: time.Second, Lease: 12 * time.Second} }

// ForTTL returns the timing for an election whose lease has the given TTL.
func ForTTL(ttl time.Duration) Timing {
	t := DefaultTiming()
	t.Lease = max(t.Lease, t.Report+2*ttl+time.Second)
	return t
}

// Validate returns an error if a field of t is out of range.
func (t Timing) Validate() error {
	if t.Report < 100*time.Millisecond || t.Report > time.Minute {
		return fmt.Errorf("%w: Report %s is not from 100ms to 1m", ErrPool, t.Report)
	}
	if t.Lease < 4*t.Report || t.Lease > time.Hour {
		return fmt.Errorf("%w: Lease %s is not from four times Report, %s, to 1h", ErrPool, t.Lease, 4*t.Report)
	}
	return nil
}

const (
	// drift is ρ: the largest relative error of a clock's rate. A time daemon that slews changes the rate of a clock, and
	// of Go's monotonic clock, too, by up to 8.3 % (chrony's maxslewrate).
	drift = 0.1
	// tolerance is the time by which a region's clock may be set back, or for which it may stop, before the script or the
	// watchdog detects it.
	tolerance = 2 * policy.ClockTolerance * time.Microsecond
)

// hold returns the longest time for which a grant may be in force after its ticket was received, on the receiver's own
// clock. That is L(1+2ρ) + tolerance. The receiver's clock may run fast while the region's clock runs slow, and an
// error of the region's clock up to tolerance is not detected.
func hold(lease time.Duration) time.Duration {
	return lease + time.Duration(2*drift*float64(lease)) + tolerance
}

// load returns the time limit for reading all keys. With many pools their values have megabytes, and etcd may be far
// away.
func (t Timing) load() time.Duration { return t.Lease / 2 }

// request returns the time limit of any other request to etcd. A member of etcd that is cut off answers late or never.
func (t Timing) request() time.Duration { return max(t.Report, time.Second) }

// fresh returns the age up to which the coordinator answers a ticket with a grant.
func (t Timing) fresh() time.Duration { return t.Report * 5 / 2 }
