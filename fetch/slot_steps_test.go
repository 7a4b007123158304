package fetch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// halfMoved begins to move the slot of a bucket, and moves only its index. Then no script that needs all keys can run.
func halfMoved(t *testing.T, cluster *testenv.RedisCluster, key string) *testenv.SlotMove {
	t.Helper()
	move := startMove(t, cluster, key)
	require.NoError(t, move.MoveKeys(lua.IndexKey(key)))
	return move
}

// If a take has its answer, the caller gets it at once, although a further call, such as a rescue, waits for the slot.
func TestAnAnswerIsNotWithheldWhileTheSlotMoves(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		terms policy.Terms
		n     int64
		ok    bool
	}{
		"a denial before a rescue": {terms: policy.Policy{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour},
			Interval: 100 * time.Millisecond}.Terms(policy.Fence{}), n: 10},
		"a grant before its schedule": {policy.Terms{Kind: policy.Stepped, Capacity: 10, Tokens: 10, Per: 1,
			Interval: 100_000, MaxElapsed: 2_000_000, Initial: 10}, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cluster := t.Context(), testenv.Cluster(t)
			rdb, key := cluster.Client(), movable("configured", map[int]bool{})
			require.NoError(t, lua.Load(ctx, rdb))
			_, err := lua.Refill(ctx, rdb, key, policy.Call{Create: policy.CreateInitial, Terms: &tc.terms})
			require.NoError(t, err)
			c := newClient(t, rdb, WithTimeout(20*time.Second))
			_, err = c.Take(ctx, key, tc.n)
			require.NoError(t, err)
			halfMoved(t, cluster, key)
			time.Sleep(scheduleMaxAge + 100*time.Millisecond) // the last refill, and the instants, are old by then
			began := time.Now()
			r, err := c.Take(ctx, key, tc.n)
			require.NoError(t, err)
			require.Equal(t, tc.ok, r.OK)
			require.Less(t, time.Since(began), 10*time.Second)
		})
	}
}

func TestCloseEndsALineWhoseSlotMoves(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb := cluster.Client()
	publishBoth(t, rdb)
	c, err := New(rdb, WithTimeout(0))
	require.NoError(t, err)
	key := movable("refilled:new", map[int]bool{})
	startMove(t, cluster, key)
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	require.Error(t, errOf(c.Wait(short, key, 1)))
	closing, end := context.WithTimeout(ctx, 20*time.Second)
	defer end()
	require.NoError(t, c.Close(closing))
}

// Tokens that were taken for a caller that left go back once the slot has moved.
func TestTokensOfACallerThatLeftGoBackAfterTheSlotHasMoved(t *testing.T) {
	t.Parallel()
	ctx, cluster := t.Context(), testenv.Cluster(t)
	rdb, key := cluster.Client(), movable("configured", map[int]bool{})
	createBucket(t, rdb, key, hourly(60))
	c := newClient(t, rdb, slow())
	_, err := c.Take(ctx, key, 1)
	require.NoError(t, err)
	move := halfMoved(t, cluster, key)
	require.NoError(t, cluster.Nodes()[0].Client().Do(ctx, "client", "pause", 100, "all").Err())
	gone, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	_, err = c.Take(gone, key, 10)
	require.Error(t, err)
	time.Sleep(200 * time.Millisecond) // the take is made, and the slot still moves
	require.NoError(t, move.MoveKeys())
	require.NoError(t, move.Finish())
	eventually(t, func() bool { return tokens(t, rdb, key) == 59 }, "the late take's tokens are back")
	require.Zero(t, c.Stats().Lost)
}

// tryAgain is the error of a server for a slot that moves.
type tryAgain struct{}

func (tryAgain) Error() string { return "TRYAGAIN Multiple keys request during rehashing of slot" }

// RedisError implements redis.Error.
func (tryAgain) RedisError() {}

// A call without a deadline is repeated after its first refusal, however late that refusal was. Before the refusal it
// does not read the clock.
func TestACallWithoutADeadlineIsMadeAgainAfterALateRefusal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := 0
		busy := &task{budget: budget{ctx: t.Context()}, c: &Client{jitter: func() float64 { return 0 }}}
		err := busy.unsplit(func() error {
			n++
			if n > 1 {
				return nil
			}
			time.Sleep(2 * splitTime)
			return tryAgain{}
		})
		require.NoError(t, err)
		require.Equal(t, 2, n)
	})
}
