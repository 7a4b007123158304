package fetch

import (
	"context"
	"errors"
	"fmt"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Errors of the methods, to be matched with errors.Is.
var (
	// ErrUnknownBucket is returned when the bucket doesn't exist. Nothing was taken or created.
	ErrUnknownBucket = lua.ErrUnknownBucket
	// ErrMalformedBucket is returned when one of the bucket's keys holds something else, as when another program uses
	// the same name. Nothing was taken.
	ErrMalformedBucket = lua.ErrMalformedBucket
	// ErrInvalidKey is returned for a key that can't name a bucket: it is empty, longer than lua.MaxKeyLen bytes, or
	// has a closing brace.
	ErrInvalidKey = lua.ErrInvalidKey
	// ErrInvalidAmount is returned if a number of tokens is not from 1 to policy.MaxTokens. Only the number of tokens that
	// Settle reports as used may also be 0.
	ErrInvalidAmount = errors.New("fetch: invalid amount")
	// ErrInvalidOption is returned for an option whose value is out of range, or that the method doesn't accept.
	ErrInvalidOption = errors.New("fetch: invalid option")
	// ErrExceedsCapacity is returned if a call asks for more tokens than the bucket can ever hold. The tokens that the
	// call has to leave (WithLeave) count, too. Nothing was taken.
	ErrExceedsCapacity = errors.New("fetch: exceeds the bucket's capacity")
	// ErrTooManyBuckets is returned if a template's bucket would have to be created and the template already has as many
	// buckets as its max_keys allows. Nothing was taken.
	ErrTooManyBuckets = lua.ErrTooManyBuckets
	// ErrLazyBucket is returned for a reservation from a bucket of a lazy template, and for a take with a request id from
	// such a bucket. The bucket remembers neither reservations nor request ids. Nothing was taken. Use a template whose
	// enforce is refilled.
	ErrLazyBucket = errors.New("fetch: a lazy template's bucket has no reservations or request ids")
	// ErrRequestReused is returned if the request id was used before for another take: with another number of tokens,
	// another number to leave, or another flow. Nothing was taken.
	ErrRequestReused = lua.ErrRequestReused
	// ErrInvalidTTL is returned for a reservation whose time is not from policy.MinHold to policy.MaxHold.
	ErrInvalidTTL = lua.ErrInvalidTTL
	// ErrInvalidID is returned if the id of a reservation is empty or longer than lua.MaxIDLen bytes.
	ErrInvalidID = lua.ErrInvalidID
	// ErrIDInUse is returned when the id of a reservation is in use for something else: another number of tokens, or a
	// reservation that has ended. Nothing was taken.
	ErrIDInUse = lua.ErrIDInUse
	// ErrNotHeld is returned when an unknown reservation is settled: it ended more than policy.HoldMemory ago, or never
	// existed.
	ErrNotHeld = lua.ErrNotHeld
	// ErrUnavailable is returned if Redis didn't answer in time, or not at all. It wraps the cause, which is
	// context.DeadlineExceeded if the timeout or the context's deadline passed. ReasonOf returns the reason. The call may
	// have been executed nevertheless. If the breaker was open, it was not even sent.
	ErrUnavailable = errors.New("fetch: redis is unavailable")
	// ErrDeadline is returned by Wait when the tokens are due after the context's deadline, and matches
	// context.DeadlineExceeded. Nothing was taken.
	ErrDeadline = fmt.Errorf("fetch: tokens are not due before the deadline: %w", context.DeadlineExceeded)
	// ErrClosed is returned by the methods of a Client that is closed, except for Close, Stats and Timeout. If an option
	// is invalid, the error is ErrInvalidOption. For a denial, Cancel and UndoAll return nil, and Settle of the
	// Reservation returns ErrNotHeld.
	ErrClosed = errors.New("fetch: client is closed")
)

// check returns an error if a call for n tokens of a bucket can't be made.
func (c *Client) check(ctx context.Context, key string, n int64) error {
	if c.life.closed.Load() {
		return ErrClosed
	}
	if err := lua.CheckKey(key); err != nil {
		return err
	}
	if n < 1 || n > policy.MaxTokens {
		return fmt.Errorf("%w: %d tokens; want 1 to %d", ErrInvalidAmount, n, int64(policy.MaxTokens))
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("fetch: %w", err)
	}
	return nil
}
