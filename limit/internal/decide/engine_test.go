package decide

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestACancelledWaitSaysThatItWasAndWhy(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, Wait(ctx, time.Nanosecond))
	why := errors.New("the client has left")
	cancel(why)
	err := Wait(ctx, time.Hour)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, why)
}
