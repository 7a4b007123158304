package fetch

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Tokens that were taken for a caller that left go back only to the era of the bucket from which they came.
func TestTokensOfALateReplyDoNotGoBackToALaterEra(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(100)})
		c := newClient(t, b, slow())
		_, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		b.trip = 20 * time.Millisecond
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Millisecond, func() {
			b.with("checkout", func(bucket *oracle.Bucket) { *bucket.Tokens, bucket.Control.Era = 0, bucket.Control.Era+1 })
			cancel()
		})
		_, err = c.Take(ctx, "checkout", 40)
		require.ErrorIs(t, err, context.Canceled)
		time.Sleep(2 * time.Second)
		require.Zero(t, inBucket(b))
		require.EqualValues(t, 40, c.Stats().Lost)
	})
}

func TestTokensOfALateTakeAllDoNotGoBackToALaterEra(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, nil)
	c := newClient(t, wrapped{f.rdb}, slow())
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.TakeAll(ctx, []Request{{Key: "checkout", N: 30}})
		done <- err
	}()
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 70 }, "the tokens are taken")
	require.NoError(t, f.direct.Del(t.Context(), "checkout", lua.IndexKey("checkout"), lua.ControlKey("checkout")).Err())
	empty := hourly(100)
	empty.Initial = new(int64)
	createBucket(t, f.direct, "checkout", empty)
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	require.NoError(t, f.proxy.Heal())
	eventually(t, func() bool { return c.Stats().Lost+c.Stats().Returned == 30 }, "the reply is read")
	require.Zero(t, tokens(t, f.direct, "checkout"))
	require.EqualValues(t, 30, c.Stats().Lost)
}

// If a take got some tokens from a block of one era and the others from the bucket in the next era, Undo gives back
// only the latter.
func TestUndoGivesNothingOfABlockBackToALaterEra(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, c, held, left := holding(t, 1000, 40)
		var once sync.Once
		b.fail(func(script string) fault {
			if isTake(script) { // an operator makes the bucket begin a new era
				once.Do(func() { b.buckets["checkout"].Control.Era++ })
			}
			return none
		})
		r, err := c.TakeUpTo(t.Context(), "checkout", held+5)
		require.NoError(t, err)
		require.True(t, r.OK)
		require.NotEqual(t, SourceLeased, r.Source.Kind)
		require.NoError(t, c.Undo(t.Context(), "checkout", r))
		synctest.Wait()
		require.LessOrEqual(t, inBucket(b), left)
	})
}

// The same if the block began anew meanwhile, in the same era as the bucket, and gave further tokens.
func TestUndoKeepsBackTokensOfABlockThatBeganAnew(t *testing.T) {
	earlier := Result{OK: true, Taken: 3, Era: 1, Source: Source{Kind: SourceLeased}}
	later := Result{OK: true, Taken: 2, Era: 2, Source: Source{Kind: SourceLeased}}
	shared := Result{OK: true, Taken: 4, Era: 2}
	r := shared.with(later.with(earlier))
	require.EqualValues(t, 9, r.Taken)
	require.EqualValues(t, 3, r.lacked, "tokens of the earlier era")
	r = Result{OK: true, Taken: 4, Era: 3}.with(later.with(earlier))
	require.EqualValues(t, 5, r.lacked, "tokens of both earlier eras")
}
