package timing

import (
	"context"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSleepLastsUntilItsEndOrDone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		require.True(t, Sleep(t.Context().Done(), time.Minute))
		require.Equal(t, time.Minute, time.Since(began))
		require.True(t, Sleep(nil, time.Second), "a nil channel is never closed")

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		require.True(t, Sleep(ctx.Done(), -1))
		require.False(t, Sleep(ctx.Done(), time.Hour))
		require.Equal(t, time.Second, time.Since(began))
		require.False(t, Sleep(ctx.Done(), 0), "Sleep returns at once if it is done")
	})
}

func TestDoubledStopsAtTheMost(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]time.Duration{-1: 20, 0: 20, 1: 40, 2: 80, 5: 640, 6: 1000, 7: 1000, math.MaxInt: 1000} {
		require.Equal(t, want, Doubled(20, n, 1000), "%d times", n)
	}
	require.Equal(t, time.Duration(5), Doubled(20, 0, 5))
	require.Equal(t, time.Duration(math.MaxInt64), Doubled(20, 1000, math.MaxInt64), "the result does not overflow")
}

func TestBetweenIsWithinItsBounds(t *testing.T) {
	t.Parallel()
	for random, want := range map[float64]time.Duration{0: 50, 0.5: 100, 0.98: 148} {
		require.Equal(t, want, Between(func() float64 { return random }, 50, 150))
	}
}

func TestASignalWaitsUntilItIsRead(t *testing.T) {
	t.Parallel()
	c := make(chan struct{}, 1)
	Signal(c)
	Signal(c)
	<-c
	require.Empty(t, c)
}
