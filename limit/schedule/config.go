package schedule

import (
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/limit/calendar"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/policy"
)

// Limits of a Config and of ids. They bound the work of one script call. In a full schedule with 8 windows of 500
// reservations each, a call needs 0.9 ms of Redis' time.
const (
	MaxWindows = 8
	MaxLimit   = 500
	MaxIDLen   = 128 // bytes
	MaxHorizon = 5 * policy.MaxPer
)

// rounds is how often a call is repeated at most, if each time a window of the calendar has ended. It also bounds the
// calls that search for the next free instant.
const rounds = 32

// DefaultHorizon is the Horizon if none is given.
const DefaultHorizon = policy.MaxPer

// Errors of the methods, to be matched with errors.Is.
var (
	// ErrConfig is returned for a Config that is out of range; the error names
	// the field.
	ErrConfig = errors.New("schedule: bad config")
	// ErrPast is returned for an instant that has passed on the server's clock.
	ErrPast = errors.New("schedule: instant has passed")
	// ErrHorizon is returned for an instant beyond the horizon.
	ErrHorizon = errors.New("schedule: instant is beyond the horizon")
	// ErrIDTaken is returned for an id that is reserved for another instant.
	ErrIDTaken = errors.New("schedule: id is reserved for another instant")
	// ErrInvalidID is returned for an id that is empty or longer than MaxIDLen.
	ErrInvalidID = errors.New("schedule: invalid id")
	// ErrInvalidRange is returned for a range that can't be listed.
	ErrInvalidRange = errors.New("schedule: invalid range")
)

// Window limits the number of reservations per time: in any stretch of time of some length, or in each unit of the
// calendar, such as a day.
type Window struct {
	// Name is the name of the window in a denial. If it is empty, the name is such as "5 per 1h0m0s" or "5 per day".
	Name string
	// Limit is the largest number of reservations, 1 to MaxLimit.
	Limit int64
	// Length is the length of a window that slides: a whole number of microseconds, 1µs to policy.MaxPer.
	Length time.Duration
	// Per is the unit of the calendar, for a window without a Length.
	Per calendar.Unit
	// In is the time zone of the calendar; nil is UTC.
	In *time.Location
}

// length returns the largest length that the window can have.
func (w Window) length() time.Duration {
	if w.Per.Valid() {
		return w.Per.Longest()
	}
	return w.Length
}

// shortest returns the smallest length that the window can have. For example, a day on which summer time begins is an
// hour shorter.
func (w Window) shortest() time.Duration {
	switch w.Per {
	case calendar.Day:
		return 23 * time.Hour
	case calendar.Week:
		return 6 * 24 * time.Hour
	case calendar.Month:
		return 28 * 24 * time.Hour
	}
	return w.length()
}

// span returns the window of the calendar that contains an instant; instants are Unix µs.
func (w Window) span(at int64) (begin, end int64) {
	b, e := w.Per.Span(time.UnixMicro(at), w.In)
	return b.UnixMicro(), e.UnixMicro()
}

// String returns the window's name.
func (w Window) String() string {
	if w.Name != "" {
		return w.Name
	}
	if w.Per.Valid() {
		return fmt.Sprintf("%d per %s", w.Limit, w.Per)
	}
	return fmt.Sprintf("%d per %s", w.Limit, w.Length)
}

// Config has the limits of a schedule.
type Config struct {
	// Name distinguishes schedules that share their keys: at most 64 letters, digits and _ . - / :. With a name, {K}:sched
	// becomes {K}:sched:name.
	Name string
	// Windows has 1 to MaxWindows windows. All of them apply, and their order has no effect.
	Windows []Window
	// Horizon is how far ahead an instant may be, in whole microseconds, 1µs to
	// MaxHorizon; 0 means DefaultHorizon.
	Horizon time.Duration
}

// Validate reports the first field that is out of range.
func (c Config) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %w", ErrConfig, fmt.Errorf(format, args...))
	}
	if err := decide.CheckName(c.Name); err != nil {
		return bad("%w", err)
	}
	if len(c.Windows) < 1 || len(c.Windows) > MaxWindows {
		return bad("windows: there are %d; want 1 to %d; to have no limit, use no limiter", len(c.Windows), MaxWindows)
	}
	for i, w := range c.Windows {
		if w.Limit < 1 || w.Limit > MaxLimit {
			return bad("windows[%d].limit: %d is not from 1 to %d; to have no limit, leave the window out", i, w.Limit, MaxLimit)
		}
		switch {
		case w.Per.Valid() && w.Length == 0:
		case w.Per.Valid():
			return bad("windows[%d].length: it excludes per, %s", i, w.Per)
		case w.Per != 0:
			return bad("windows[%d].per: %s; want calendar.Minute to calendar.Month", i, w.Per)
		case w.In != nil:
			return bad("windows[%d].in: a window that slides has no time zone", i)
		}
		if !w.Per.Valid() && (w.Length < time.Microsecond || w.Length > policy.MaxPer || w.Length%time.Microsecond != 0) {
			return bad("windows[%d].length: %s is not from 1µs to %s in whole microseconds", i, w.Length, policy.MaxPer)
		}
	}
	if h := c.horizon(); h < time.Microsecond || h > MaxHorizon || h%time.Microsecond != 0 {
		return bad("horizon: %s is not from 1µs to %s in whole microseconds", c.Horizon, MaxHorizon)
	}
	return nil
}

// MaxReservations returns the largest number of entries that a schedule can ever hold. That is the number that the
// strictest window admits in a time as long as the longest window and the horizon together.
func (c Config) MaxReservations() int64 {
	most := int64(1<<63 - 1)
	for _, w := range c.Windows {
		stretches := int64((c.longest()+c.horizon())/w.shortest()) + 1
		most = min(most, stretches*w.Limit)
	}
	return most
}

// limit returns the smallest limit of the windows.
func (c Config) limit() int64 {
	least := int64(MaxLimit)
	for _, w := range c.Windows {
		least = min(least, w.Limit)
	}
	return least
}

func (c Config) horizon() time.Duration {
	if c.Horizon == 0 {
		return DefaultHorizon
	}
	return c.Horizon
}

func (c Config) longest() time.Duration {
	longest := time.Duration(0)
	for _, w := range c.Windows {
		longest = max(longest, w.length())
	}
	return longest
}
