package fair

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// arrive calls Enter in a new goroutine. The goroutine records the client's name as soon as the call runs.
func arrive(q *Queue, name string, ran *[]string, mu *sync.Mutex) {
	go func() {
		if q.Enter(context.Background(), name, 1, 0) == nil {
			mu.Lock()
			defer mu.Unlock()
			*ran = append(*ran, name)
		}
	}()
	synctest.Wait()
}

func TestClientsAreServedInTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New(Bounds{Running: 1, Client: 1, Waiting: 100})
		require.NoError(t, q.Enter(t.Context(), "first", 1, 0))
		var mu sync.Mutex
		var ran []string
		for _, name := range []string{"a", "a", "a", "a", "b", "c", "b"} {
			arrive(q, name, &ran, &mu)
		}
		q.Leave("first")
		synctest.Wait()
		for i := range 7 {
			q.Leave(ran[i])
			synctest.Wait()
		}
		require.Equal(t, []string{"a", "b", "c", "a", "b", "a", "a"}, ran)
		q.Close()
	})
}

func TestAClientRunsNoMoreThanItsShareAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New(Bounds{Running: 3, Client: 2, Waiting: 100})
		var mu sync.Mutex
		var ran []string
		for _, name := range []string{"a", "a", "a", "b", "b"} {
			arrive(q, name, &ran, &mu)
		}
		require.Equal(t, []string{"a", "a", "b"}, ran)
		q.Leave("b")
		synctest.Wait()
		require.Equal(t, []string{"a", "a", "b", "b"}, ran, "a has its share already")
		q.Leave("a")
		synctest.Wait()
		require.Equal(t, []string{"a", "a", "b", "b", "a"}, ran)
		for _, name := range []string{"a", "a", "b"} {
			q.Leave(name)
		}
		q.Close()
	})
}

func TestACallWaitsForItsPatienceOrItsDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New(Bounds{Running: 1, Client: 1, Waiting: 100})
		require.NoError(t, q.Enter(t.Context(), "a", 1, 0))
		began := time.Now()
		require.ErrorIs(t, q.Enter(t.Context(), "b", 1, 2*time.Second), ErrLate)
		require.Equal(t, 2*time.Second, time.Since(began))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		require.ErrorIs(t, q.Enter(ctx, "b", 1, 0), context.DeadlineExceeded)
		require.Equal(t, 7*time.Second, time.Since(began))
		running, calls := q.Load()
		require.Equal(t, []int{1, 1}, []int{running, calls}, "calls that gave up have left the queue")
		q.Leave("a")
		require.NoError(t, q.Enter(t.Context(), "b", 1, time.Second), "calls that gave up delay no other call")
		q.Leave("b")
		q.Close()
	})
}

func TestAClientLeavesRoomInTheQueueForOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New(Bounds{Running: 1, Client: 1, Waiting: 8})
		require.NoError(t, q.Enter(t.Context(), "a", 1, 0))
		ctx, cancel := context.WithCancel(t.Context())
		wait := func(name string, places int) error {
			ended := make(chan error, 1)
			go func() { ended <- q.Enter(ctx, name, places, 0) }()
			synctest.Wait()
			select {
			case err := <-ended:
				return err
			default:
				return nil
			}
		}
		for range 4 {
			require.NoError(t, wait("a", 1))
		}
		require.ErrorIs(t, wait("a", 1), ErrFull, "a client has at most half of the queue")
		require.ErrorIs(t, wait("b", 5), ErrFull, "a large call takes several places")
		require.NoError(t, wait("b", 2))
		require.NoError(t, wait("c", 1))
		require.ErrorIs(t, wait("b", 1), ErrFull)
		cancel()
		synctest.Wait()
		q.Leave("a")
		q.Close()
	})
}

func TestCloseRefusesWhatComesAndWaitsForWhatIsThere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := New(Bounds{Running: 1, Client: 1, Waiting: 8})
		require.NoError(t, q.Enter(t.Context(), "a", 1, 0))
		waited := make(chan error, 1)
		go func() { waited <- q.Enter(t.Context(), "b", 1, 0) }()
		synctest.Wait()
		var closed atomic.Bool
		go func() {
			q.Close()
			closed.Store(true)
		}()
		synctest.Wait()
		require.ErrorIs(t, q.Enter(t.Context(), "c", 1, 0), ErrClosed)
		q.Leave("a")
		require.NoError(t, <-waited, "a call that waits still gets its turn")
		synctest.Wait()
		require.False(t, closed.Load(), "Close waits for the call that runs")
		q.Leave("b")
		synctest.Wait()
		require.True(t, closed.Load())
		q.Close() // a second Close waits for nothing
	})
}

func TestBoundsHoldWhateverCallsDo(t *testing.T) {
	t.Parallel()
	const seed = 7
	t.Logf("seed %d", seed)
	b := Bounds{Running: 5, Client: 2, Waiting: 40}
	q := New(b)
	var running atomic.Int64
	var calling sync.WaitGroup
	for i := range 100 {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		calling.Go(func() {
			for range 100 {
				name := fmt.Sprint(random.IntN(8))
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(random.IntN(300))*time.Microsecond)
				if q.Enter(ctx, name, 1+random.IntN(3), 0) == nil {
					if n := running.Add(1); n > int64(b.Running) {
						t.Errorf("%d calls run", n)
					}
					time.Sleep(time.Duration(random.IntN(50)) * time.Microsecond)
					running.Add(-1)
					q.Leave(name)
				}
				cancel()
			}
		})
	}
	calling.Wait()
	q.Close()
	require.Empty(t, q.clients)
	require.Zero(t, q.waiting)
	require.Zero(t, q.running)
	require.Zero(t, q.turns.Len())
}
