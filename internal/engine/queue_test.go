package engine

import (
	"context"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestQueueSendsWhatWaitsInOneCallInOrder(t *testing.T) {
	bubble(t, 500*time.Microsecond, 8, nil, func(t *testing.T, s *server, q *Queue[int]) {
		var wg sync.WaitGroup
		for body := range 6 {
			wg.Go(func() {
				took, err := ask(t.Context(), q, body+1, 50*ms)
				if err != nil || took > ms {
					t.Error(body, took, err)
				}
			})
			synctest.Wait()
		}
		wg.Wait()
		require.Equal(t, [][]int{{1}, {2, 3, 4, 5, 6}}, s.sent)
		require.Equal(t, []time.Duration{0, 500 * time.Microsecond}, s.at, "the second call starts when the first returns")
	})
}

func TestQueueDepartsOnceAMillisecondWhileCallsAreUnderWay(t *testing.T) {
	bubble(t, 20*ms, 64, nil, func(t *testing.T, s *server, q *Queue[int]) {
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for range 50 {
					took, err := ask(context.Background(), q, 1, 50*ms)
					if err != nil || took > 21*ms {
						t.Error(took, err)
					}
					time.Sleep(rand.N(3 * ms))
				}
			})
		}
		wg.Wait()
		require.LessOrEqual(t, s.most, 21)
		require.Greater(t, s.most, 15)
		for i := 1; i < len(s.at); i++ {
			require.GreaterOrEqual(t, s.at[i]-s.at[i-1], ms)
		}
	})
}

// A call may make several round trips, some of them to other servers, or none.
func TestARoundTripIsWhatTheSenderMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trips := []time.Duration{20 * ms, 20 * ms, 0, 20 * ms, 0, 0}
		q := NewQueue(func(_ context.Context, batch []*Request[int]) (time.Duration, error) {
			time.Sleep(time.Second)
			batch[0].Body = -batch[0].Body
			batch[0].Answer()
			trip := trips[0]
			trips = trips[1:]
			return trip, nil
		}, 1, nil, nil)
		for range len(trips) {
			_, err := ask(t.Context(), q, 1, 0)
			require.NoError(t, err)
			synctest.Wait()
			require.Equal(t, 20*ms, q.RoundTrip())
		}
		require.NoError(t, q.Close(t.Context()))
	})
}

func TestAQueueMakesNoMoreCallsAtOnceThanItMay(t *testing.T) {
	bubble(t, 20*ms, 2, nil, func(t *testing.T, s *server, q *Queue[int]) {
		var wg sync.WaitGroup
		for i := range 20 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * 2 * ms)
				if _, err := ask(context.Background(), q, 1, 0); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		require.Equal(t, 2, s.most)
	})
}

func TestACallTakesABoundedNumberOfRequestsAlong(t *testing.T) {
	bubble(t, 20*ms, 1, nil, func(t *testing.T, s *server, q *Queue[int]) {
		var wg sync.WaitGroup
		for range 1 + 2*mostRequests + 10 {
			wg.Go(func() { _, _ = ask(context.Background(), q, 1, 0) })
		}
		wg.Wait()
		sizes := make([]int, len(s.sent))
		for i, bodies := range s.sent {
			sizes[i] = len(bodies)
		}
		require.Equal(t, []int{1, 1024, 1024, 10}, sizes)
	})
}

func TestASilentServerIsAskedLessAndLess(t *testing.T) {
	bubble(t, ms/2, 1000, nil, func(t *testing.T, s *server, q *Queue[int]) {
		_, err := ask(t.Context(), q, 1, 0)
		require.NoError(t, err)
		s.set(func(s *server) { s.silent = true })
		var wg sync.WaitGroup
		for range 250 {
			wg.Go(func() { _, _ = ask(context.Background(), q, 1, 20*ms) })
			time.Sleep(ms)
		}
		wg.Wait()
		require.Less(t, s.most, 40, "few calls are under way after a quarter of a second")
	})
}

// A call ends even if its connection is dead and reports no error.
func TestACallEndsWithoutAWaitingCaller(t *testing.T) {
	bubble(t, ms, 1, nil, func(t *testing.T, s *server, q *Queue[int]) {
		s.set(func(s *server) { s.silent = true })
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(10*ms, cancel)
		_, err := ask(ctx, q, 1, 0)
		require.Equal(t, context.Canceled, err)
		s.set(func(s *server) { s.silent = false })
		took, err := ask(context.Background(), q, 2, 0)
		require.NoError(t, err)
		require.LessOrEqual(t, took, mostTrip)
	})
}

func TestCallersWaitNoLongerThanTheirTime(t *testing.T) {
	bubble(t, ms, 64, nil, func(t *testing.T, s *server, q *Queue[int]) {
		s.silent = true
		var wg sync.WaitGroup
		for _, timeout := range []time.Duration{ms, 12 * ms, 50 * ms, 2 * time.Second} {
			wg.Go(func() {
				took, err := ask(context.Background(), q, 1, timeout)
				require.ErrorIs(t, err, ErrNoAnswer)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, timeout+graceRead, took)
			})
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), timeout)
				defer cancel()
				took, err := ask(ctx, q, 1, time.Hour)
				require.Equal(t, context.DeadlineExceeded, err, "the error is the caller's own")
				require.Equal(t, timeout+graceRead, took)
			})
			wg.Go(func() {
				ctx, cancel := context.WithCancel(context.Background())
				time.AfterFunc(timeout, cancel)
				took, err := ask(ctx, q, 1, time.Hour)
				require.Equal(t, context.Canceled, err)
				require.Equal(t, timeout, took)
			})
		}
		wg.Wait()
	})
}

// Callers with a short deadline must not affect patient callers. Once, with a round trip of 20 ms and other callers
// that waited 12 ms, patient callers lost 972 takes of 1,239.
func TestShortDeadlinesOfOthersHaveNoEffect(t *testing.T) {
	bubble(t, 20*ms, 64, nil, func(t *testing.T, s *server, q *Queue[int]) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for ctx.Err() == nil {
					_, err := ask(context.Background(), q, 1, 12*ms)
					require.ErrorIs(t, err, ErrNoAnswer)
				}
			})
		}
		answered := 0
		wg.Go(func() {
			for ; ctx.Err() == nil; answered++ {
				took, err := ask(context.Background(), q, 2, 5*time.Second)
				require.NoError(t, err)
				require.LessOrEqual(t, took, 21*ms)
			}
		})
		wg.Wait()
		require.Greater(t, answered, 450)
	})
}

func TestARequestWhoseCallerLeavesBeforeTheDepartureIsNotSent(t *testing.T) {
	bubble(t, 20*ms, 1, nil, func(t *testing.T, s *server, q *Queue[int]) {
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = ask(context.Background(), q, 1, 0) })
		synctest.Wait()
		ctx, cancel := context.WithCancel(context.Background())
		wg.Go(func() {
			_, err := ask(ctx, q, 2, 0)
			require.Equal(t, context.Canceled, err)
		})
		wg.Go(func() {
			_, err := ask(context.Background(), q, 3, 5*ms)
			require.ErrorIs(t, err, ErrNoAnswer)
		})
		wg.Go(func() {
			_, err := ask(context.Background(), q, 4, 0)
			require.NoError(t, err)
		})
		time.Sleep(2 * ms)
		cancel()
		wg.Wait()
		require.Equal(t, [][]int{{1}, {4}}, s.sent)
		require.Empty(t, s.unclaimed)
	})
}

func TestARequestWithoutCallersIsNotSent(t *testing.T) {
	bubble(t, ms, 8, nil, func(t *testing.T, s *server, q *Queue[int]) {
		s.dial = time.Second
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := ask(ctx, q, 1, 0)
			require.Equal(t, context.Canceled, err)
		})
		wg.Go(func() {
			_, err := ask(context.Background(), q, 2, 50*ms)
			require.ErrorIs(t, err, ErrNoAnswer)
		})
		time.Sleep(10 * ms)
		cancel()
		wg.Wait()
		synctest.Wait()
		require.Empty(t, s.sent)
	})
}

func TestTheSenderDetectsThatAllCallersHaveLeft(t *testing.T) {
	bubble(t, 20*ms, 8, nil, func(t *testing.T, s *server, q *Queue[int]) {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = ask(context.Background(), q, 9, 0) })
		synctest.Wait()
		wg.Go(func() {
			_, err := ask(ctx, q, 1, 0)
			require.Equal(t, context.Canceled, err)
		})
		wg.Go(func() {
			_, err := ask(context.Background(), q, 2, 10*ms)
			require.ErrorIs(t, err, ErrNoAnswer)
		})
		wg.Go(func() {
			_, err := ask(context.Background(), q, 3, 0)
			require.NoError(t, err)
		})
		time.Sleep(10 * ms)
		cancel()
		wg.Wait()
		synctest.Wait()
		slices.Sort(s.unclaimed)
		require.Equal(t, []int{1, 2}, s.unclaimed)
	})
}

func TestQueueIsBounded(t *testing.T) {
	bubble(t, 10*time.Second, 1, nil, func(t *testing.T, s *server, q *Queue[int]) {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range mostWaiting + 1 {
			wg.Go(func() { _, _ = ask(ctx, q, 1, 0) })
		}
		synctest.Wait()
		_, err := ask(context.Background(), q, 1, 0)
		require.ErrorIs(t, err, ErrFull)
		cancel()
		wg.Wait()
		time.Sleep(10 * time.Second)
		require.Len(t, s.sent, 1)
		took, err := ask(context.Background(), q, 1, 0)
		require.NoError(t, err)
		require.Equal(t, 10*time.Second, took)
	})
}

func TestCloseWaitsForWhatIsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(20 * ms)
		q := NewQueue(s.send, 1, nil, nil)
		var wg sync.WaitGroup
		for range 3 { // two calls
			wg.Go(func() {
				_, err := ask(context.Background(), q, 1, 0)
				require.NoError(t, err)
			})
			synctest.Wait()
		}
		ctx, cancel := context.WithTimeout(context.Background(), 30*ms)
		defer cancel()
		require.ErrorIs(t, q.Close(ctx), context.DeadlineExceeded)
		_, err := ask(context.Background(), q, 1, 0)
		require.ErrorIs(t, err, ErrClosed)
		require.NoError(t, q.Close(context.Background()))
		require.NoError(t, q.Close(context.Background()), "closing again is harmless")
		wg.Wait()
		require.Equal(t, 40*ms, time.Since(s.began))
	})
}

func TestDeadlinesMoveByTheDelayOfThisProcess(t *testing.T) {
	began := time.Now()
	at := func(d time.Duration) time.Time { return began.Add(d) }
	type check struct {
		at, stalled time.Duration // stalled: in total since the beginning
		over        bool
	}
	for name, checks := range map[string][]check{
		"in time":                   {{49 * ms, 0, false}, {50 * ms, 0, false}, {54 * ms, 0, false}, {55 * ms, 0, true}},
		"stopped past the deadline": {{70 * ms, 20 * ms, false}, {94 * ms, 20 * ms, false}, {95 * ms, 20 * ms, true}},
		"stopped twice, in time":    {{50 * ms, 30 * ms, false}, {84 * ms, 30 * ms, false}, {85 * ms, 30 * ms, true}},
		"stopped for a long time":   {{350 * ms, 300 * ms, false}, {404 * ms, 300 * ms, false}, {405 * ms, 300 * ms, true}},
		"stopped in the extension": {{50 * ms, 0, false}, {75 * ms, 20 * ms, false}, {94 * ms, 20 * ms, false},
			{95 * ms, 20 * ms, true}},
		"stopped again and again": {{80 * ms, 30 * ms, false}, {215 * ms, 130 * ms, false}, {300 * ms, 200 * ms, true}},
	} {
		const before = time.Hour // the value of stalled at the beginning
		c := newDeadline(began, at(50*ms), before)
		for i, l := range checks {
			require.Equal(t, l.over, c.expireOrExtend(at(l.at), before+l.stalled), "%s: check %d", name, i)
		}
		require.LessOrEqual(t, c.stalled-before, 50*ms)
	}
	never := newDeadline(began, time.Time{}, 0)
	require.False(t, never.expireOrExtend(at(time.Hour), time.Hour))
}

// TestEveryRequestHasOneEnd makes random requests, and gives some of them up, on a server that stalls at times.
func TestEveryRequestHasOneEnd(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		n, err := strconv.ParseUint(v, 10, 64)
		require.NoError(t, err)
		seed = n
	}
	t.Logf("REFILLER_SEED=%d repeats this run", seed)
	for schedule := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, schedule))
		bubble(t, time.Duration(1+rng.IntN(30))*ms/3, 1+rng.IntN(20), nil, func(t *testing.T, s *server, q *Queue[int]) {
			var wg sync.WaitGroup
			var mu sync.Mutex
			answered := map[int]bool{}
			body := 0
			for range 1 + rng.IntN(100) {
				rng := rand.New(rand.NewPCG(rng.Uint64(), 0))
				wg.Go(func() {
					for range 20 {
						mu.Lock()
						body++
						body := body
						mu.Unlock()
						ctx, cancel := context.WithCancel(context.Background())
						cancelled := time.Hour
						if rng.IntN(3) == 0 {
							cancelled = time.Duration(rng.IntN(40)) * ms
							time.AfterFunc(cancelled, cancel)
						}
						timeout := time.Duration(1+rng.IntN(60)) * ms
						took, err := ask(ctx, q, body, timeout)
						cancel()
						if took > min(timeout+graceRead, cancelled) {
							t.Errorf("the call took %s: timeout %s, cancelled after %s", took, timeout, cancelled)
						}
						mu.Lock()
						answered[body] = err == nil
						mu.Unlock()
						time.Sleep(time.Duration(rng.IntN(10)) * ms)
					}
				})
			}
			for range 20 {
				time.Sleep(time.Duration(rng.IntN(30)) * ms)
				s.set(func(s *server) { s.trip = time.Duration(rng.IntN(50)) * ms })
			}
			wg.Wait()
			require.NoError(t, q.Close(context.Background()))
			times := map[int]int{}
			for _, bodies := range s.sent {
				for _, body := range bodies {
					times[body]++
				}
			}
			unclaimed := map[int]bool{}
			for _, body := range s.unclaimed {
				unclaimed[body] = true
			}
			for body, ok := range answered {
				require.LessOrEqual(t, times[body], 1, "no request is sent twice")
				if ok {
					require.Equal(t, 1, times[body])
				}
				require.Equal(t, times[body] == 1 && !ok, unclaimed[body],
					"each sent request is answered to its caller or reported to the sender as unclaimed")
			}
		})
	}
}

func TestRequestsThatWereGivenUpDoNotPileUp(t *testing.T) {
	for name, leave := range map[string]bool{"their time is over": false, "their callers left": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 0, 1, nil, func(t *testing.T, s *server, q *Queue[int]) {
				s.set(func(s *server) { s.silent = true })
				ctx, cancel := context.WithCancel(context.Background())
				var wg sync.WaitGroup
				for range 2 { // one request is under way, one waits, and neither has a deadline
					wg.Go(func() { _, _ = ask(ctx, q, 1, 0) })
					synctest.Wait()
				}
				for range 20 {
					ctx, cancel := context.WithCancel(context.Background())
					for range 500 {
						wg.Go(func() {
							if leave {
								_, _ = ask(ctx, q, 1, 0)
							} else {
								_, _ = ask(ctx, q, 1, ms)
							}
						})
					}
					synctest.Wait()
					cancel()
					time.Sleep(20 * ms)
				}
				q.mu.Lock()
				require.Equal(t, 1, q.waiters)
				require.Same(t, q.ends.next, q.ends.prev)
				q.mu.Unlock()
				cancel()
				wg.Wait()
			})
		})
	}
}
