package fetch

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// A take for which a bucket and its block have too few tokens together loses none of either: what the block has, the
// bucket counts as outstanding, so a strict one would have no room for it. Nor is a token minted, whether the capacity
// stays or is lowered meanwhile.
func TestATakeThatBlockAndBucketDenyLosesNothing(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		strict bool
		lower  int64 // the capacity that the bucket gets meanwhile
	}{
		"strict": {true, 100}, "strict, lowered": {true, 50}, "loose": {false, 100}, "loose, lowered": {false, 50},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, rdb := t.Context(), testenv.Redis(t).Client()
			p := hourly(100)
			p.Strict = tc.strict
			createBucket(t, rdb, "checkout", p)
			c := newClient(t, rdb, slow(), WithLease(40, time.Minute))
			for range 30 {
				_, err := c.Take(ctx, "checkout", 1)
				require.NoError(t, err)
			}
			eventually(t, func() bool { return c.Stats().Leased > 1 }, "there is a block")
			require.NoError(t, rdb.Set(ctx, "checkout", 1, 0).Err())
			r, err := c.Take(ctx, "checkout", 100)
			require.NoError(t, err)
			require.False(t, r.OK)

			p.Capacity = tc.lower
			createUnder(t, rdb, "checkout", p, 2)
			held := c.Stats().Leased
			reset, err := lua.Reset(ctx, rdb, "checkout", tc.lower-held-1) // so full that nothing that was taken leaves room
			require.NoError(t, err)
			c.buckets.find("checkout").block.Load().asked.Store(true) // its keeper rests
			r, err = c.Take(ctx, "checkout", 100)
			if !errors.Is(err, ErrExceedsCapacity) { // it is, if the denial is no longer remembered
				require.NoError(t, err)
			}
			require.False(t, r.OK)
			all := reset.Tokens + held
			eventually(t, func() bool { return tokens(t, rdb, "checkout")+c.Stats().Leased == all }, "all is there")
			require.NoError(t, c.Close(ctx))
			peek, err := lua.Peek(ctx, rdb, "checkout", 1)
			require.NoError(t, err)
			require.Zero(t, peek.Outstanding)
			require.Equal(t, all, peek.Tokens)
		})
	}
}

// While the bucket is asked for what the block lacks, others empty the block. What the bucket gave goes back.
func TestATakeWhoseBlockIsEmptiedReturnsTheBucketsTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, c, held, left := holding(t, 100, 40)
		k := c.buckets.find("checkout").block.Load()
		b.trip = time.Millisecond
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(3 * b.trip / 2) // after the denial
			require.Equal(t, held, k.withdraw(held))
		})
		r, err := c.Take(t.Context(), "checkout", held+left)
		wg.Wait()
		require.NoError(t, err)
		require.False(t, r.OK)
		k.left.Add(held)
		synctest.Wait()
		time.Sleep(10 * b.trip)
		require.Equal(t, held+left, c.Stats().Leased+inBucket(b))
	})
}
