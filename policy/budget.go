package policy

import (
	"fmt"
	"time"
)

// Limits of budgets, the buckets of templates with a schedule.
const (
	// LeastEvery is the shortest time between two steps of a budget. At each step its consumers need one more call, to
	// send the instants of the schedule that apply then.
	LeastEvery = time.Second
	// MostFill is the most steps that fill a budget.
	MostFill = 1000
)

// validateSteps checks the conditions on a schedule that apply in a template only.
func (t Template) validateSteps(bad func(string, string, ...any) error) error {
	p := t.Policy
	if t.Enforce != EnforceRefilled {
		return bad("enforce", "%s goes with a rate: leave it out with every or cron", t.Enforce)
	}
	if e, ok := p.Steps.(Every); ok && (time.Duration(e) < LeastEvery || time.Duration(e) > MaxPer ||
		time.Duration(e)%time.Microsecond != 0) {
		return bad("every", "%s is not from %s to %dd in whole microseconds", time.Duration(e), LeastEvery,
			MaxPer/(24*time.Hour))
	}
	if p.StepTokens > p.Capacity {
		return bad("tokens", "%d is above the capacity, %d: tokens without room would be lost at each step", p.StepTokens,
			p.Capacity)
	}
	if fill := p.Terms(Fence{}).Fill(); fill > MostFill {
		return bad("capacity", "%d is %d steps of %d tokens; a template's is full after at most %d", p.Capacity, fill,
			p.StepTokens, MostFill)
	}
	return nil
}

// Fill returns how many steps fill an empty bucket of stepped terms without debt.
func (t Terms) Fill() int64 { return (t.Capacity-1)/t.Tokens + 1 }

// longAgo is a time in microseconds. Instants that are further back than that are not credited any more.
const longAgo = 50 * 366 * 24 * int64(time.Hour/time.Microsecond)

// Instants returns the instants by which a script credits a budget at the time now. They are successive instants of its
// schedule in ascending order, in Unix microseconds. The last one is the first instant after now. The others depend on
// since:
//
//   - If since is from 1 to now, they are the instants from since on, and the one before since. If more than MostFill
//     instants from since on have come, the earliest ones are left out.
//   - Otherwise they are the latest keep instants that have come, and the one before these.
func Instants(s Steps, since, now, keep int64) []int64 {
	from, count := now-longAgo, keep+1
	var instants []int64
	if since > 0 && since <= now {
		before, _ := Due(s, since-1-longAgo, since-1, 1)
		instants = append(instants, max(before, 1))
		from, count = since-1, MostFill
	}
	at, next := Due(s, from, now, count)
	for at != 0 && at <= now {
		instants = append(instants, at)
		at = after(s, at)
		next = at
	}
	if len(instants) == 0 {
		instants = append(instants, 1)
	}
	return append(instants, next)
}

// FullAt returns the instant, in Unix microseconds, at which there will have been enough steps to fill an empty budget
// twice. fill is the number of steps that fill it once. The budget expires no earlier. So it has paid its debt, which
// is at most its capacity, before it is created anew.
func FullAt(s Steps, now, fill int64) int64 {
	at := after(s, now)
	if e, ok := s.(Every); ok {
		return at + (2*fill-1)*time.Duration(e).Microseconds()
	}
	for range 2*fill - 1 {
		at = after(s, at)
	}
	return at
}

// CatchUp credits all steps of a schedule that have come by now, each of them once, to a bucket of stepped terms. The
// next take of a budget, or the refills of another bucket, do the same. If the policy in force is older than terms, the
// bucket is switched first.
func (b *Bucket) CatchUp(s Steps, terms *Terms, now int64) {
	for range 2 * MostFill {
		fill := 2 * b.Control.Terms.Fill() // the first half may pay debt
		due, next := Due(s, b.Control.Step, now, fill)
		b.Refill(Call{Version: Version{b.Control.Era, b.Control.Index}, Terms: terms, Step: due, Next: next}, now)
		if due == 0 {
			return
		}
	}
}

// scheduleText is a schedule in the published form of a template.
type scheduleText struct {
	Every int64  `json:"every_us,omitempty"`
	Cron  string `json:"cron,omitempty"`
	Zone  string `json:"time_zone,omitempty"`
}

// scheduleOf returns the published form of a schedule; nil for none.
func scheduleOf(s Steps) *scheduleText {
	switch s := s.(type) {
	case Every:
		return &scheduleText{Every: time.Duration(s).Microseconds()}
	case *Calendar:
		return &scheduleText{Cron: s.spec, Zone: s.zone.String()}
	}
	return nil
}

// steps reads the published form of a schedule. A time zone that this computer doesn't know is an error.
func (t *scheduleText) steps() (Steps, error) {
	if t.Cron == "" {
		return Every(time.Duration(t.Every) * time.Microsecond), nil
	}
	zone, err := time.LoadLocation(t.Zone)
	if err != nil {
		return nil, fmt.Errorf("%w %q: install time zones, or import time/tzdata: %w", ErrSchedule, t.Cron, err)
	}
	return ParseCalendar(t.Cron, zone)
}
