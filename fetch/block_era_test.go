package fetch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// What a take has of a block, and can't use, goes back to the history of the bucket from which the block came.
func TestTokensOfABlockDoNotGoBackToALaterEra(t *testing.T) {
	for call := range 3 {
		synctest.Test(t, func(t *testing.T) {
			b, c, held, left := holding(t, 100, 40)
			takes := 0
			b.fail(func(script string) fault {
				if isTake(script) {
					takes++
					if takes == call+1 { // an operator empties it, and it begins anew
						*b.buckets["checkout"].Tokens = 0
						b.buckets["checkout"].Control.Era++
					}
				}
				return none
			})
			r, err := c.Take(t.Context(), "checkout", held+left)
			require.NoError(t, err)
			require.False(t, r.OK, "call %d", call)
			synctest.Wait()
			require.Zero(t, inBucket(b), "call %d", call)
		})
	}
}

// What was taken for a caller who has left goes back to the history of the bucket from which it came.
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
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 70 }, "taken")
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

// What came from a block of one history and what came from the bucket in the next are not given back together.
func TestUndoGivesNothingOfABlockBackToALaterEra(t *testing.T) {
	for name, take := range map[string]func(ctx context.Context, c *Client, held, left int64) (Result, error){
		"take": func(ctx context.Context, c *Client, held, left int64) (Result, error) {
			return c.Take(ctx, "checkout", held+left)
		},
		"take up to": func(ctx context.Context, c *Client, held, left int64) (Result, error) {
			return c.TakeUpTo(ctx, "checkout", held+5)
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			b, c, held, left := holding(t, 1000, 40)
			takes := 0
			b.fail(func(script string) fault {
				if isTake(script) {
					takes++
					if takes == 1 || name == "take" && takes == 2 { // an operator lets it begin anew
						b.buckets["checkout"].Control.Era++
					}
				}
				return none
			})
			before := left
			r, err := take(t.Context(), c, held, left)
			require.NoError(t, err, name)
			require.True(t, r.OK, name)
			require.NotEqual(t, SourceLeased, r.Source.Kind, name)
			require.NoError(t, c.Undo(t.Context(), "checkout", r))
			synctest.Wait()
			require.LessOrEqual(t, inBucket(b), before, name)
		})
	}
}
