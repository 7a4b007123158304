package schedule

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/redisclient"
	"github.com/tokenrefill/refiller/limit/internal/decide"
	"github.com/tokenrefill/refiller/lua"
)

// Reservation is the answer to Reserve.
type Reservation struct {
	// OK reports whether the instant is reserved. Remaining is how many more reservations fit at the same instant. Limit
	// is the smallest limit of the windows. RetryAfter is the time from the requested instant to Next. ResetAfter is the
	// time until the key expires, if no more reservations are made; 0 for a denial.
	fetch.Result
	ID string
	At time.Time
	// Repeated reports that the id was reserved for this instant before.
	Repeated bool
	// DeniedBy names the windows without room.
	DeniedBy []string
	// Next is set on a denial. No instant from At up to Next has room. Next itself has room, unless the schedule is so
	// full that the search ended early.
	Next time.Time
}

// Entry is a reservation in a list.
type Entry struct {
	ID string
	At time.Time
}

// store keeps schedules. Instants are Unix µs.
type store interface {
	reserve(ctx context.Context, key string, c call) (answer, error)
	// cancel removes the reservations under the call's id, and reports whether there were any. If passed is set, it also
	// removes those whose instant has passed.
	cancel(ctx context.Context, key string, c call, passed bool) (bool, error)
	list(ctx context.Context, key string, from, to, most int64) ([]Entry, error)
	reset(ctx context.Context, key string) error
}

// call asks for n reservations of one instant.
type call struct {
	id    string // of the first
	at    int64  // 0: now
	n     int64
	check bool  // reserve nothing
	near  int64 // if at is 0: roughly the present time, which selects the windows of the calendar
}

// ids returns the ids of the reservations.
func (c call) ids() []string {
	ids := []string{c.id}
	for i := int64(2); i <= c.n; i++ {
		ids = append(ids, fmt.Sprintf("%s#%d", c.id, i))
	}
	return ids
}

// Codes of the scripts' replies.
const (
	codeDenied      = 0
	codeDone        = 1
	codeRepeated    = 2
	codeMalformed   = 3
	codeIDTaken     = 4
	codePast        = 5
	codeHorizon     = 6
	codeOtherWindow = 7 // now is in another window of the calendar than near
)

// answer is the answer of a store to a reservation.
type answer struct {
	code   int64
	now    int64 // for codeIDTaken, the instant that is reserved
	left   int64
	until  int64
	next   int64
	sure   bool    // it is certain that next has room
	denied []int64 // numbers of the windows without room, from 1
}

// Limiter limits any number of schedules with one Config.
//
// # What is stored
//
// A schedule K is a sorted set at {K}:sched. A new reservation drops those whose instants are at least the length of
// the longest window in the past. The key expires when that time has passed since its latest reserved instant. The
// windows bound the number of entries: see [Config.MaxReservations]. When windows change, reservations stay, and count
// in the new windows.
type Limiter struct {
	config Config
	store  store
}

// New makes a Limiter on Redis. It sends nothing. Its errors match ErrConfig.
func New(rdb redis.UniversalClient, cfg Config) (*Limiter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if redisclient.IsNil(rdb) {
		return nil, fmt.Errorf("%w: the redis client is nil", ErrConfig)
	}
	return &Limiter{cfg, shared{engine.NewCommands(rdb, decide.MostCalls), cfg}}, nil
}

// NewLocal makes a Limiter that keeps its state in this process, on the clock now, such as time.Now. Its errors match
// ErrConfig.
func NewLocal(cfg Config, now func() time.Time) (*Limiter, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if now == nil {
		return nil, fmt.Errorf("%w: the clock is nil", ErrConfig)
	}
	return &Limiter{cfg, newLocal(cfg, now)}, nil
}

// Reserve reserves one instant, the argument at, under an id, if every window has room. A denial is a Reservation whose
// OK is false. After the errors ErrPast, ErrHorizon, ErrIDTaken and ErrInvalidID, nothing was reserved. After
// fetch.ErrUnavailable the instant may be reserved. To find out, call again with the same id and instant.
func (l *Limiter) Reserve(ctx context.Context, key, id string, at time.Time) (Reservation, error) {
	if err := check(key, id); err != nil {
		return Reservation{}, err
	}
	us := at.UnixMicro()
	if us <= 0 {
		return Reservation{}, fmt.Errorf("%w: %s", ErrPast, at.Format(time.RFC3339Nano))
	}
	a, err := l.ask(ctx, key, call{id: id, at: us, n: 1})
	if err != nil {
		return Reservation{}, err
	}
	r := Reservation{ID: id, At: time.UnixMicro(us).In(at.Location())}
	r.Limit = l.config.limit()
	in := func(us int64) time.Time { return time.UnixMicro(us).In(at.Location()) }
	switch a.code {
	case codeDone, codeRepeated:
		r.OK = true
		r.Taken = 1
		r.Remaining = a.left
		r.Repeated = a.code == codeRepeated
		r.ResetAfter = time.Duration(a.until-a.now) * time.Microsecond
	case codeDenied:
		r.Next, r.RetryAfter = in(a.next), time.Duration(a.next-us)*time.Microsecond
		for _, w := range a.denied {
			r.DeniedBy = append(r.DeniedBy, l.config.Windows[w-1].String())
		}
	case codeIDTaken:
		return Reservation{}, fmt.Errorf("%w: %q for %s", ErrIDTaken, id, in(a.now).Format(time.RFC3339Nano))
	case codePast:
		return Reservation{}, fmt.Errorf("%w: %s; it is %s", ErrPast, r.At.Format(time.RFC3339Nano),
			in(a.now).Format(time.RFC3339Nano))
	case codeHorizon:
		return Reservation{}, fmt.Errorf("%w: %s; want at most %s from now", ErrHorizon, r.At.Format(time.RFC3339Nano),
			l.config.horizon())
	default:
		return Reservation{}, fmt.Errorf("%w: code %d", lua.ErrBadReply, a.code)
	}
	return r, nil
}

// ask makes a call. If it is denied and the search for the next free instant ended early, ask continues the search.
func (l *Limiter) ask(ctx context.Context, key string, c call) (answer, error) {
	a, err := l.store.reserve(ctx, key, c)
	for tries := 0; err == nil && a.code == codeOtherWindow; tries++ {
		if tries == rounds {
			return answer{}, fmt.Errorf("%w: in each of %d calls the present window of the calendar was an unexpected one",
				fetch.ErrUnavailable, tries)
		}
		c.near = a.now
		a, err = l.store.reserve(ctx, key, c)
	}
	if err != nil {
		return answer{}, err
	}
	for _, w := range a.denied {
		if w < 1 || w > int64(len(l.config.Windows)) {
			return answer{}, fmt.Errorf("%w: window %d", lua.ErrBadReply, w)
		}
	}
	for range rounds {
		if a.code != codeDenied || a.sure {
			break
		}
		next, err := l.store.reserve(ctx, key, call{at: a.next, n: c.n, check: true})
		if err != nil {
			return answer{}, err
		}
		if next.code != codeDenied {
			break // it fits, or lies beyond the horizon
		}
		a.next, a.sure = next.next, next.sure
	}
	return a, nil
}

// Cancel gives a reserved instant back. It returns false if no instant is reserved under the id, or if the instant has
// passed.
func (l *Limiter) Cancel(ctx context.Context, key, id string) (bool, error) {
	if err := check(key, id); err != nil {
		return false, err
	}
	return l.store.cancel(ctx, key, call{id: id, n: 1}, false)
}

// Reset drops all reservations of a key, including those that have passed.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	if err := lua.CheckKey(key); err != nil {
		return err
	}
	return l.store.reset(ctx, key)
}

// String describes the windows.
func (l *Limiter) String() string {
	windows := make([]string, len(l.config.Windows))
	for i, w := range l.config.Windows {
		windows[i] = w.String()
	}
	return strings.Join(windows, ", ")
}

// List returns the reservations of a key with from ≤ instant < to, sorted by their instants. It returns
// at most n of them; n is 1 to 10,000. If from has passed, the list may have reservations that have passed.
func (l *Limiter) List(ctx context.Context, key string, from, to time.Time, n int64) ([]Entry, error) {
	if err := lua.CheckKey(key); err != nil {
		return nil, err
	}
	if to.Before(from) || n < 1 || n > 10_000 {
		return nil, fmt.Errorf("%w: from %s to %s, %d entries; want a from that is not later than to, and 1 to 10000 entries",
			ErrInvalidRange, from, to, n)
	}
	return l.store.list(ctx, key, from.UnixMicro(), to.UnixMicro(), n)
}

func check(key, id string) error {
	if err := lua.CheckKey(key); err != nil {
		return err
	}
	if id == "" || len(id) > MaxIDLen {
		return fmt.Errorf("%w: it has %d bytes; want 1 to %d", ErrInvalidID, len(id), MaxIDLen)
	}
	return nil
}
