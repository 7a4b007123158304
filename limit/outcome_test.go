package limit_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit"
)

func TestEveryErrorOfTheSDKHasAnOutcomeOfItsOwn(t *testing.T) {
	t.Parallel()
	unforeseen := limit.Outcome{Code: "internal", HTTP: http.StatusInternalServerError, GRPC: uint32(codes.Internal),
		Open: true}
	for err, want := range map[error]codes.Code{
		fetch.ErrUnknownBucket: codes.NotFound, fetch.ErrMalformedBucket: codes.FailedPrecondition,
		fetch.ErrInvalidKey:    codes.InvalidArgument,
		fetch.ErrInvalidAmount: codes.InvalidArgument, fetch.ErrInvalidOption: codes.InvalidArgument,
		fetch.ErrExceedsCapacity: codes.OutOfRange,
		fetch.ErrInvalidTTL:      codes.InvalidArgument, fetch.ErrInvalidID: codes.InvalidArgument,
		fetch.ErrIDInUse:       codes.AlreadyExists,
		fetch.ErrRequestReused: codes.AlreadyExists, fetch.ErrNotHeld: codes.NotFound,
		fetch.ErrUnavailable: codes.Unavailable,
		fetch.ErrClosed:      codes.Unavailable, fetch.ErrTooManyBuckets: codes.ResourceExhausted,
		fetch.ErrLazyBucket: codes.FailedPrecondition,
		fetch.ErrDeadline:   codes.DeadlineExceeded, context.Canceled: codes.Canceled,
	} {
		got := limit.OutcomeOf(fmt.Errorf("wrapped: %w", err))
		require.Equal(t, want, codes.Code(got.GRPC), err)
		require.NotEqual(t, unforeseen, got, err)
	}
	require.Equal(t, unforeseen, limit.OutcomeOf(errors.New("bug")))
	require.Equal(t, "unavailable", limit.OutcomeOf(fmt.Errorf("%w: %w", fetch.ErrUnavailable,
		context.DeadlineExceeded)).Code)
	require.False(t, limit.OutcomeOf(fetch.ErrTooManyBuckets).Open, "a flood of keys turns no limit off")
	require.False(t, limit.OutcomeOf(fetch.ErrExceedsCapacity).Open)
	require.True(t, limit.OutcomeOf(fetch.ErrUnavailable).Open)
}
