package schedule

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/internal/decide"
)

// Take reserves the present instant n times, all or nothing; n is at least 1 and at most the smallest limit of the
// windows. So a schedule can also be used as a limiter of requests. Reservations for later instants count in the
// windows of the present instant. Its option is fetch.WithTimeout. After fetch.ErrUnavailable the instant may be
// reserved.
func (l *Limiter) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.present(ctx, key, n, false, opts)
}

// Peek returns how many more reservations fit at the present instant, and reserves nothing. Its result is OK if at
// least one fits.
func (l *Limiter) Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error) {
	return l.present(ctx, key, 1, true, opts)
}

// Undo cancels the reservations of a take with the result r, even though their instant has passed.
func (l *Limiter) Undo(ctx context.Context, key string, r fetch.Result) error {
	if r.Taken == 0 {
		return nil
	}
	if r.Taken < 1 || r.Taken > MaxLimit { // it may come from another program
		return fmt.Errorf("%w: %d tokens; want 1 to %d", fetch.ErrInvalidAmount, r.Taken, MaxLimit)
	}
	id := takeID(r.Era)
	if err := check(key, id); err != nil {
		return err
	}
	_, err := l.store.cancel(ctx, key, call{id: id, n: r.Taken}, true)
	return err
}

// Window returns the length of the window with the smallest limit. If several windows have that limit, it is the
// longest of them. For a window of the calendar it is the usual length.
func (l *Limiter) Window() time.Duration {
	var length time.Duration
	for _, w := range l.config.Windows {
		if w.Limit != l.config.limit() {
			continue
		}
		if w.Per.Valid() {
			length = max(length, w.Per.Usual())
		}
		length = max(length, w.Length)
	}
	return length
}

// present reserves the present instant n times, or only checks it if peek is set.
func (l *Limiter) present(ctx context.Context, key string, n int64, peek bool, opts []fetch.CallOption) (fetch.Result,
	error) {
	if n < 1 {
		return fetch.Result{}, fmt.Errorf("%w: %d tokens; want at least 1", fetch.ErrInvalidAmount, n)
	}
	if most := l.config.limit(); n > most {
		return fetch.Result{}, fmt.Errorf("%w: %d tokens; want 1 to %d", fetch.ErrExceedsCapacity, n, most)
	}
	ctx, cancel, err := decide.Within(ctx, opts)
	if err != nil {
		return fetch.Result{}, err
	}
	defer cancel()
	era := 1 + rand.Int64N(math.MaxInt64) // names the reservations, for Undo
	id := takeID(era)
	if err := check(key, id); err != nil {
		return fetch.Result{}, err
	}
	a, err := l.ask(ctx, key, call{id: id, n: n, check: peek, near: time.Now().UnixMicro()})
	if err != nil {
		return fetch.Result{}, err
	}
	r := fetch.Result{Remaining: a.left, Limit: l.config.limit()}
	switch {
	case a.code == codeDenied:
		r.RetryAfter = time.Duration(a.next-a.now) * time.Microsecond
		r.ResetAfter = r.RetryAfter
	case peek:
		r.OK = true
	default:
		r.OK = true
		r.Taken = n
		r.Era = era
		r.ResetAfter = time.Duration(a.until-a.now) * time.Microsecond
	}
	return r, nil
}

func takeID(era int64) string { return "take-" + strconv.FormatInt(era, 36) }
