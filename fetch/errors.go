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
	// ErrInvalidAmount is returned for a number of tokens that is not from 1 to policy.MaxTokens; of those used of a
	// reservation, from 0.
	ErrInvalidAmount = errors.New("fetch: invalid amount")
	// ErrInvalidOption is returned for an option that is out of range, or not for the method.
	ErrInvalidOption = errors.New("fetch: invalid option")
	// ErrExceedsCapacity is returned when more tokens are asked for, those to be left included, than the bucket can
	// ever hold. Nothing was taken.
	ErrExceedsCapacity = errors.New("fetch: exceeds the bucket's capacity")
	// ErrTooManyBuckets is returned when a template's bucket would be created and as many of the template are alive as
	// its max_keys allows. Nothing was taken.
	ErrTooManyBuckets = lua.ErrTooManyBuckets
	// ErrLazyBucket is returned for a reservation from a bucket of a lazy template, and for a take of one with a
	// request id: such a bucket remembers neither. Nothing was taken. A template whose enforce is refilled has both.
	ErrLazyBucket = errors.New("fetch: a lazy template's bucket has no reservations or request ids")
	// ErrRequestReused is returned for a take whose request id took, or was to leave, another number of tokens before, or
	// was used for another flow. Nothing was taken.
	ErrRequestReused = lua.ErrRequestReused
	// ErrInvalidTTL is returned for a reservation whose time is not from policy.MinHold to policy.MaxHold.
	ErrInvalidTTL = lua.ErrInvalidTTL
	// ErrInvalidID is returned for the id of a reservation that is empty or longer than lua.MaxIDLen bytes.
	ErrInvalidID = lua.ErrInvalidID
	// ErrIDInUse is returned when the id of a reservation is in use for something else: another number of tokens, or a
	// reservation that has ended. Nothing was taken.
	ErrIDInUse = lua.ErrIDInUse
	// ErrNotHeld is returned when an unknown reservation is settled: it ended more than policy.HoldMemory ago, or never
	// existed.
	ErrNotHeld = lua.ErrNotHeld
	// ErrUnavailable is returned when Redis didn't answer, or not in time, and wraps the cause:
	// context.DeadlineExceeded if the timeout or the context's deadline passed. ReasonOf returns the cause. The
	// call may have had its effect, unless it was not sent since others had failed.
	ErrUnavailable = errors.New("fetch: redis is unavailable")
	// ErrDeadline is returned by Wait when the tokens are due after the context's deadline, and matches
	// context.DeadlineExceeded. Nothing was taken.
	ErrDeadline = fmt.Errorf("fetch: tokens are not due before the deadline: %w", context.DeadlineExceeded)
	// ErrClosed is returned by every method of a Client that is closed.
	ErrClosed = errors.New("fetch: client is closed")
)

// check reports whether n tokens of a bucket can be asked for now.
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
