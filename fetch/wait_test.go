package fetch

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// waitAgainst runs Wait for one token, and then closes its client. The server calls due for each question. If due
// returns a time, the server denies the token, which is due after that time; a negative time means never. If due
// returns nil, the server grants the token.
func waitAgainst(ctx context.Context, t *testing.T, p policy.Policy,
	due func(asked int) *time.Duration) (asked []time.Duration, err error) {
	t.Helper()
	began, f := time.Now(), newFake(map[string]policy.Policy{"checkout": p})
	f.asked = func(int) *time.Duration {
		asked = append(asked, time.Since(began))
		f.buckets["checkout"].Control.Last++ // it was refilled
		return due(len(asked))
	}
	c, err := New(f, WithRescue(false))
	require.NoError(t, err)
	c.jitter = func() float64 { return 0 }
	_, err = c.Wait(ctx, "checkout", 1)
	require.NoError(t, c.Close(context.Background()))
	return asked, err
}

func after(d time.Duration) *time.Duration { return &d }

func TestWaitAsksWhenTheTokensAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, err := waitAgainst(t.Context(), t, hourly(5), func(asked int) *time.Duration {
			if asked < 4 {
				return after(time.Duration(asked) * 300 * time.Millisecond)
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, []time.Duration{0, 300 * time.Millisecond, 900 * time.Millisecond, 1800 * time.Millisecond}, asked)
	})
}

func TestWaitRefusesAtOnceWhatComesAfterTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		asked, err := waitAgainst(ctx, t, hourly(5),
			func(int) *time.Duration { return after(time.Second + time.Microsecond) })
		require.ErrorIs(t, err, ErrDeadline)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, []time.Duration{0}, asked)

		asked, err = waitAgainst(ctx, t, hourly(5), func(asked int) *time.Duration {
			if asked == 1 {
				return after(999 * time.Millisecond)
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, []time.Duration{0, 999 * time.Millisecond}, asked)
	})
}

func TestWaitAsksLessOftenWhileRefillsStayOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		f := newFake(map[string]policy.Policy{"checkout": hourly(5)})
		asked := []time.Duration{}
		f.asked = func(int) *time.Duration {
			asked = append(asked, 0)
			return after(50 * time.Millisecond)
		}
		_, err := newClient(t, f, WithRescue(false)).Wait(ctx, "checkout", 1)
		require.Error(t, err)
		require.Less(t, len(asked), 40, "%v", asked)
		require.Greater(t, len(asked), 25, "%v", asked)
	})
}

func TestWaitWithoutAKnownRefillAsksOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
		defer cancel()
		asked, err := waitAgainst(ctx, t, hourly(5), func(int) *time.Duration { return after(-time.Microsecond) })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second}, asked)
	})
}

func TestWaitEndsWithItsContextItsClientAndItsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hour := func(int) *time.Duration { return after(time.Hour) }
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		_, err := waitAgainst(ctx, t, hourly(5), hour)
		require.ErrorIs(t, err, context.Canceled)

		f := newFake(map[string]policy.Policy{"checkout": hourly(5)})
		f.asked = hour
		c, err := New(f, WithRescue(false))
		require.NoError(t, err)
		var wg sync.WaitGroup
		wg.Go(func() { err = errOf(c.Wait(t.Context(), "checkout", 1)) })
		synctest.Wait()
		f.fail(func(string) fault { return refused })
		time.Sleep(time.Hour)
		wg.Wait()
		require.ErrorIs(t, err, ErrUnavailable)

		f.fail(nil)
		wg.Go(func() { err = errOf(c.Wait(t.Context(), "checkout", 1)) })
		synctest.Wait()
		require.NoError(t, c.Close(t.Context()))
		wg.Wait()
		require.ErrorIs(t, err, ErrClosed)
	})
}

func TestThePolicyIsAskedForOnceInTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(map[string]policy.Policy{"checkout": hourly(5)})
		c := newClient(t, f)
		limits := []int64{}
		for range 5 {
			r, err := c.Take(t.Context(), "checkout", 1)
			require.NoError(t, err)
			limits = append(limits, r.Limit)
			f.with("checkout", func(b *oracle.Bucket) { b.Control.Terms.Capacity = 9 })
			time.Sleep(4 * time.Second)
		}
		require.Equal(t, []int64{5, 5, 5, 9, 9}, limits)
	})
}

func TestWaitTakesWhatARefillBrings(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(100), Interval: 20 * time.Millisecond, Initial: new(int64)}
	began := time.Now()
	createBucket(t, rdb, "checkout", p)
	ctx, stop := context.WithCancel(t.Context())
	var refiller sync.WaitGroup
	refiller.Go(func() { refillUntil(ctx, t, rdb, "checkout", p) })
	c := newClient(t, rdb, slow())
	for range 5 {
		require.NoError(t, errOf(c.Wait(t.Context(), "checkout", 4)))
	}
	require.GreaterOrEqual(t, time.Since(began), 190*time.Millisecond, "20 tokens at 100/s take 200 ms")
	stop()
	refiller.Wait()
}

func TestAThousandWaitersCostOneCallPerRefill(t *testing.T) {
	const waiters, perRefill = 10_000, 1000
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100_000, Rate: policy.PerSecond(10 * perRefill), Interval: 100 * time.Millisecond}
		p.Initial = new(int64)
		f := newFake(map[string]policy.Policy{"checkout": p})
		c := newClient(t, f)
		c.jitter = func() float64 { return 0 }
		began := time.Now()
		used := func() uint64 {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc + m.StackInuse
		}
		before := used()
		var mu sync.Mutex
		var order []int
		var wg sync.WaitGroup
		for i := range waiters {
			wg.Go(func() {
				if _, err := c.Wait(t.Context(), "checkout", 1); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i/perRefill)
			})
			synctest.Wait()
		}
		require.Less(t, int64(used()-before)/waiters, int64(32<<10), "bytes for each waiter, including its stack")
		wg.Wait()
		require.Equal(t, time.Second, time.Since(began), "ten refills serve all waiters")
		require.LessOrEqual(t, f.called("take", "takes"), 2*10+1)
		require.IsNonDecreasing(t, order, "waiters are served in the order in which they came")
		require.False(t, c.buckets.find("checkout").waited())
		require.NoError(t, c.Close(t.Context()))
	})
}

func TestWaitersAreServedInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// One token a second.
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(1), Interval: time.Second, Initial: new(int64)}
		f := newFake(map[string]policy.Policy{"checkout": p})
		f.with("checkout", func(b *oracle.Bucket) { b.Control.Terms.MaxElapsed = time.Hour.Microseconds() })
		c := newClient(t, f)
		c.jitter = func() float64 { return 0 }
		began := time.Now()
		type service struct {
			n  int64
			at time.Duration
		}
		served := make(chan service, 4)
		ctx, cancel := context.WithCancel(t.Context())
		wait := func(ctx context.Context, n int64) {
			go func() {
				if errOf(c.Wait(ctx, "checkout", n)) == nil {
					served <- service{n, time.Since(began)}
				}
			}()
			synctest.Wait()
		}
		wait(t.Context(), 10)
		wait(ctx, 50)
		wait(t.Context(), 1)
		wait(t.Context(), 2)
		require.Equal(t, service{10, 10 * time.Second}, <-served)
		time.Sleep(5 * time.Second)
		require.Empty(t, served, "the next waiter needs 50 tokens")
		cancel() // its place goes to the next waiter
		synctest.Wait()
		require.ElementsMatch(t, []service{{1, 15 * time.Second}, {2, 15 * time.Second}}, []service{<-served, <-served})
		require.False(t, c.buckets.find("checkout").waited())
		require.LessOrEqual(t, f.called("take", "takes"), 7)
		require.NoError(t, c.Close(t.Context()))
	})
}

func TestAWaiterWhoseTokensComeTooLateIsRefusedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond}
		f := newFake(map[string]policy.Policy{"checkout": p})
		f.with("checkout", func(b *oracle.Bucket) { *b.Tokens = 0 })
		asked := 0
		f.asked = func(int) *time.Duration {
			asked++
			return after(10 * time.Second)
		}
		c := newClient(t, f, WithRescue(false))
		var wg sync.WaitGroup
		wg.Go(func() { _, _ = c.Wait(t.Context(), "checkout", 100) }) // due in 10 s
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10500*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, errOf(c.Wait(ctx, "checkout", 10)), ErrDeadline, "the tokens are due in 11 s")
		require.Equal(t, 1, asked)
		var last error
		wg.Go(func() { last = errOf(c.Wait(ctx, "checkout", 5)) }) // due in 10.5 s, so it waits in line
		synctest.Wait()
		require.EqualValues(t, 105, c.buckets.find("checkout").lines.Load().find("", policy.Leave{}).total)
		require.NoError(t, c.Close(t.Context()))
		wg.Wait()
		require.ErrorIs(t, last, ErrClosed)
	})
}

func TestADenialIsRememberedUntilItsTokensAreDueOrASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, on := range []bool{true, false} {
			f := newFake(map[string]policy.Policy{"checkout": hourly(9)})
			asked, due := 0, 300*time.Millisecond
			f.asked = func(int) *time.Duration {
				asked++
				return &due
			}
			c := newClient(t, f, WithDenyCache(on), WithRescue(false))
			take := func(n int64, opts ...CallOption) Result {
				r, err := c.Take(t.Context(), "checkout", n, opts...)
				require.NoError(t, err)
				return r
			}
			require.Equal(t, Source{}, take(5).Source)
			time.Sleep(100 * time.Millisecond)
			r := take(6)
			if !on {
				require.Equal(t, Source{}, r.Source)
				require.Equal(t, 2, asked)
				continue
			}
			require.Equal(t, SourceCached, r.Source.Kind)
			require.False(t, r.OK)
			require.EqualValues(t, 9, r.Limit)
			require.Equal(t, 200*time.Millisecond, r.RetryAfter)
			require.Equal(t, 1, asked)
			require.Equal(t, Source{}, take(4).Source, "the bucket may have fewer tokens")
			require.Equal(t, 2, asked)
			time.Sleep(300 * time.Millisecond)
			due = time.Hour
			require.Equal(t, Source{}, take(5).Source, "the tokens were due")
			require.Equal(t, 3, asked)
			time.Sleep(time.Second - time.Nanosecond)
			require.Equal(t, SourceCached, take(5).Source.Kind)
			time.Sleep(time.Nanosecond)
			require.Equal(t, Source{}, take(5).Source)
			require.Equal(t, 4, asked)
		}
	})
}

// A remembered denial of a take with WithLeave doesn't apply to takes that leave fewer tokens.
func TestARememberedDenialDoesNotDenyTakesThatLeaveLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(map[string]policy.Policy{"checkout": hourly(10)})
		c := newClient(t, f)
		take := func(n int64, opts ...CallOption) Result {
			r, err := c.Take(t.Context(), "checkout", n, opts...)
			require.NoError(t, err)
			return r
		}
		batch := WithLeavePercent(20)
		require.True(t, take(8, batch).OK)
		r := take(1, batch)
		require.False(t, r.OK)
		require.Equal(t, time.Hour, r.RetryAfter, "the time until the bucket has three tokens")
		require.Equal(t, SourceCached, take(1, WithLeave(2)).Source.Kind)
		require.True(t, take(1).OK, "interactive work gets the tokens that batch work left")
		require.Equal(t, Source{}, take(1, WithLeave(1)).Source, "no denial is known for a smaller part to leave")
		require.True(t, take(1).OK)
		_, err := c.Take(t.Context(), "checkout", 9, batch)
		require.ErrorIs(t, err, ErrExceedsCapacity)
	})
}

func TestAReturnEndsARememberedDenial(t *testing.T) {
	rdb := testenv.Redis(t).Client()
	createBucket(t, rdb, "checkout", hourly(5))
	c := newClient(t, rdb, slow())
	for _, n := range []int64{5, 1} {
		_, err := c.Take(t.Context(), "checkout", n)
		require.NoError(t, err)
	}
	r, err := c.TakeUpTo(t.Context(), "checkout", 3)
	require.NoError(t, err)
	require.Equal(t, SourceCached, r.Source.Kind)
	require.NoError(t, c.Return(t.Context(), "checkout", 2))
	r, err = c.Take(t.Context(), "checkout", 1)
	require.NoError(t, err)
	require.Equal(t, Result{OK: true, Taken: 1, Remaining: 1, Limit: 5, ResetAfter: 4 * time.Hour,
		MoreAfter: time.Hour}, timeless(r))
}

func TestACancelledFirstWaiterCancelsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFake(map[string]policy.Policy{"checkout": hourly(101)})
		c := newClient(t, b)
		_, err := c.Take(t.Context(), "checkout", 1)
		require.NoError(t, err)
		b.trip = 10 * time.Millisecond
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		errs := make([]error, 4)
		var wg sync.WaitGroup
		for i, ctx := range []context.Context{t.Context(), ctx, t.Context(), t.Context()} {
			wg.Go(func() { errs[i] = errOf(c.Wait(ctx, "checkout", 2)) })
			time.Sleep(time.Millisecond)
		}
		time.Sleep(12 * time.Millisecond) // the second question is for the others, too
		require.EqualValues(t, 92, inBucket(b))
		cancel()
		wg.Wait()
		require.ErrorIs(t, errs[1], context.Canceled)
		for _, i := range []int{0, 2, 3} {
			require.NoError(t, errs[i], "waiter %d", i)
		}
		require.Less(t, time.Since(began), 5*b.trip)
	})
}

// If a waiter leaves while it is served, only the tokens that came from the bucket are given back.
func TestACancelledWaiterReturnsOnlyTokensThatCameFromTheBucket(t *testing.T) {
	for name, mode := range map[string]struct {
		change func(*policy.Policy)
		fate   func(string) fault
	}{
		"degraded": {func(p *policy.Policy) { p.Degraded = policy.DegradedOpen }, func(string) fault { return refused }},
		"shadow":   {func(p *policy.Policy) { p.Shadow = true }, nil},
	} {
		for _, waiters := range []int{1, 3} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := hourly(10)
					mode.change(&p)
					b := newFake(map[string]policy.Policy{"checkout": p})
					c := newClient(t, b)
					_, err := c.Take(t.Context(), "checkout", 9)
					require.NoError(t, err)
					b.fail(mode.fate)
					b.trip = 10 * time.Millisecond
					ctx, cancel := context.WithCancel(t.Context())
					var wg sync.WaitGroup
					for range waiters {
						wg.Go(func() { // it may have been served before it is cancelled
							if _, err := c.Wait(ctx, "checkout", 2); err != nil {
								require.ErrorIs(t, err, context.Canceled)
							}
						})
					}
					time.Sleep(time.Millisecond)
					cancel()
					wg.Wait()
					time.Sleep(time.Second)
					b.fail(nil)
					require.EqualValues(t, 1, inBucket(b))
				})
			})
		}
	}
}

// While a line waits that the bucket has denied, takes that leave as much as the line may overtake it. They get at most
// half of the refilled tokens.
func TestTakesQueueBehindWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond, Initial: new(int64)}
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		began := time.Now()
		served := make(chan time.Duration, 2)
		for _, n := range []int64{50, 1} {
			go func() {
				if errOf(c.Wait(t.Context(), "checkout", n)) == nil {
					served <- time.Since(began)
				}
			}()
			synctest.Wait()
		}
		granted := 0
		for len(served) < 2 {
			time.Sleep(50 * time.Millisecond)
			r, err := c.Take(t.Context(), "checkout", 1)
			require.NoError(t, err)
			if r.OK {
				granted++
			} else if len(served) == 0 {
				require.Equal(t, SourceCached, r.Source.Kind)
				require.Positive(t, r.RetryAfter)
			}
		}
		require.LessOrEqual(t, <-served, 10200*time.Millisecond, "50 tokens at half of 10 a second")
		require.LessOrEqual(t, <-served, 10500*time.Millisecond)
		require.Greater(t, granted, 40)
		require.LessOrEqual(t, granted, 53)
	})
}

// A line is served before takes and lines that leave more. So batch work doesn't starve waiters.
func TestTakesThatLeaveMoreQueueBehindWaiters(t *testing.T) {
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond, Initial: new(int64)}
	for name, batch := range map[string]func(ctx context.Context, c *Client) error{
		"takes": func(ctx context.Context, c *Client) error {
			time.Sleep(50 * time.Millisecond)
			_, err := c.Take(ctx, "checkout", 1, WithLeave(20))
			return err
		},
		"takes that leave a part": func(ctx context.Context, c *Client) error {
			time.Sleep(50 * time.Millisecond)
			_, err := c.Take(ctx, "checkout", 1, WithLeavePercent(20))
			return err
		},
		"a line": func(ctx context.Context, c *Client) error { return errOf(c.Wait(ctx, "checkout", 1, WithLeave(20))) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
				defer repeatedly(func() { require.NoError(t, batch(t.Context(), c)) })()
				time.Sleep(3 * time.Second) // the bucket holds the tokens that batch work leaves
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				began := time.Now()
				require.NoError(t, errOf(c.Wait(ctx, "checkout", 50)))
				require.LessOrEqual(t, time.Since(began), 3500*time.Millisecond, "30 tokens at 10 a second")
			})
		})
	}
}

// A waiter that leaves less does not wait behind an earlier waiter that leaves half of the bucket.
func TestAnUrgentWaiterIsServedBeforeOneThatLeavesMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond, Initial: new(int64)}
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		began := time.Now()
		patient := make(chan error, 1)
		go func() { patient <- errOf(c.Wait(t.Context(), "checkout", 1, WithLeavePercent(50))) }()
		synctest.Wait()
		require.NoError(t, errOf(c.Wait(t.Context(), "checkout", 1)))
		require.Less(t, time.Since(began), time.Second)
		require.NoError(t, <-patient)
		require.Greater(t, time.Since(began), 5*time.Second, "the waiter leaves 50 tokens, at 10 a second")
	})
}

// repeatedly calls do again and again, until stop is called. stop waits for the last call.
func repeatedly(do func()) (stop func()) {
	var over atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !over.Load() {
			do()
		}
	})
	return func() {
		over.Store(true)
		wg.Wait()
	}
}

// The tokens to leave can be given as a number or in percent. Lines that leave the same number in both ways don't wait
// for each other.
func TestLinesThatLeaveTheSameDoNotHoldEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond, Initial: new(int64)}
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		defer repeatedly(func() { // these calls make the fake server refill the bucket
			time.Sleep(50 * time.Millisecond)
			_, _ = c.Take(t.Context(), "checkout", 1, WithLeavePercent(100))
		})()
		began := time.Now()
		served := make(chan time.Duration, 2)
		for _, leave := range []CallOption{WithLeave(20), WithLeavePercent(20)} {
			go func() {
				if errOf(c.Wait(t.Context(), "checkout", 10, leave)) == nil {
					served <- time.Since(began)
				}
			}()
		}
		require.LessOrEqual(t, <-served, 3500*time.Millisecond, "the first waiter needs 30 tokens at 10 a second")
		require.LessOrEqual(t, <-served, 4500*time.Millisecond)
	})
}

// A line that leaves more is served as soon as the line before it ends.
func TestALineBehindAnotherIsServedAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(100)
		p.Initial = new(int64(30))
		c := newClient(t, newFake(map[string]policy.Policy{"checkout": p}))
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() { first <- errOf(c.Wait(ctx, "checkout", 90)) }()
		synctest.Wait()
		second := make(chan error, 1)
		go func() { second <- errOf(c.Wait(t.Context(), "checkout", 5, WithLeave(20))) }()
		synctest.Wait()
		require.Empty(t, second, "an earlier waiter needs 90 tokens, and there are 30")
		cancel()
		require.ErrorIs(t, <-first, context.Canceled)
		began := time.Now()
		require.NoError(t, <-second)
		require.Less(t, time.Since(began), 100*time.Millisecond)
	})
}

func TestAReturnWakesThoseWhoWait(t *testing.T) {
	for _, rescue := range []bool{true, false} {
		t.Run(fmt.Sprint("rescue ", rescue), func(t *testing.T) {
			rdb := testenv.Redis(t).Client()
			createBucket(t, rdb, "b", hourly(5))
			c := newClient(t, rdb, slow(), WithRescue(rescue))
			got, err := c.Take(t.Context(), "b", 5)
			require.NoError(t, err)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- errOf(c.Wait(ctx, "b", 1)) }()
			eventually(t, func() bool {
				return lineIs(c, "b", func(l *line) bool { return !l.denied.IsZero() })
			}, "the line is denied")
			began := time.Now()
			require.NoError(t, c.Undo(t.Context(), "b", got))
			minute, stop := context.WithTimeout(t.Context(), time.Minute)
			defer stop()
			require.NoError(t, errOf(c.Wait(minute, "b", 1)), "the bucket has 5 tokens")
			require.NoError(t, <-done)
			require.Less(t, time.Since(began), time.Second, "the return wakes the waiters")
		})
	}
}

// A waiter gives up while its line's question is under way, and the Client is closed before the answer comes: the token
// goes back, and Close returns.
func TestCloseReturnsAfterALineWasServedWithoutACaller(t *testing.T) {
	f := newFaulty(t, nil)
	c, err := New(f.rdb, slow())
	require.NoError(t, err)
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- errOf(c.Wait(ctx, "checkout", 1)) }()
	eventually(t, func() bool { return tokens(t, f.direct, "checkout") == 99 }, "the token is taken")
	cancel()
	require.ErrorIs(t, <-done, context.Canceled)
	closed := make(chan error, 1)
	go func() { closed <- c.Close(t.Context()) }()
	<-c.life.quit
	require.NoError(t, f.proxy.Heal())
	require.NoError(t, <-closed)
	require.EqualValues(t, 100, tokens(t, f.direct, "checkout"))
}

func TestAWaitersTimeoutFailsNoOther(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, WithRescue(false))
	f.warm(t, c)
	createBucket(t, f.direct, "line", policy.Policy{Capacity: 10, Rate: policy.PerSecond(10),
		Interval: 500 * time.Millisecond, Initial: new(int64)})
	var wg sync.WaitGroup
	var impatient, patient error
	wg.Go(func() { impatient = errOf(c.Wait(t.Context(), "line", 1, WithTimeout(50*time.Millisecond))) })
	eventually(t, func() bool {
		return lineIs(c, "line", func(l *line) bool { return !l.denied.IsZero() })
	}, "denied")
	require.NoError(t, f.proxy.Delay(faultproxy.ToClient, 150*time.Millisecond, 0))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go refillUntil(ctx, t, f.direct, "line", policy.Policy{Interval: 500 * time.Millisecond})
	wg.Go(func() { patient = errOf(c.Wait(t.Context(), "line", 1, WithTimeout(10*time.Second))) })
	wg.Wait()
	require.ErrorIs(t, impatient, ErrUnavailable)
	require.NoError(t, patient)
}

func TestAWaiterIsNotHeldByOthersTimeout(t *testing.T) {
	f := newFaulty(t, nil)
	c := newClient(t, f.rdb, WithRescue(false))
	f.warm(t, c)
	require.NoError(t, f.proxy.Stall(faultproxy.ToClient))
	defer func() { _ = f.proxy.Heal() }()
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	wg.Go(func() { _, _ = c.Wait(ctx, "checkout", 1, WithTimeout(patience)) })
	eventually(t, func() bool { return c.buckets.find("checkout").waited() }, "the caller waits in the line")
	began := time.Now()
	_, err := c.Wait(t.Context(), "checkout", 1, WithTimeout(50*time.Millisecond))
	require.ErrorIs(t, err, ErrUnavailable)
	require.Less(t, time.Since(began), patience/2)
}

// If the process was stopped when a waiter's timeout passed, it first reads the reply that came meanwhile.
func TestAWaiterGetsTheTimeForWhichItsProcessWasStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(map[string]policy.Policy{"checkout": hourly(5)})
		c := newClient(t, f)
		require.NoError(t, granted(c.Take(t.Context(), "checkout", 1)))
		f.trip = 100 * time.Millisecond
		answered := make(chan error, 1)
		go func() { answered <- errOf(c.Wait(t.Context(), "checkout", 1, WithTimeout(time.Minute))) }()
		synctest.Wait()
		ls := c.buckets.find("checkout").lines.Load()
		ls.mu.Lock()
		l := ls.of[0]
		w, asked := l.first, l.question
		ls.mu.Unlock()
		c.overdue(l, w, asked, time.Now().Add(-2*f.trip), false)
		require.NoError(t, <-answered)
	})
}

func TestTokensForAWaiterWhoseTimeIsOverGoBack(t *testing.T) {
	for _, later := range []bool{false, true} { // later: the bucket begins a new era before they go back
		t.Run(fmt.Sprint("later era ", later), func(t *testing.T) { testTokensForAWaiterGoBack(t, later) })
	}
}

func testTokensForAWaiterGoBack(t *testing.T, later bool) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(map[string]policy.Policy{"checkout": hourly(5)})
		c := newClient(t, f)
		_, err := c.Take(t.Context(), "checkout", 4)
		require.NoError(t, err)
		var wg sync.WaitGroup
		var impatient, patient error
		wg.Go(func() { impatient = errOf(c.Wait(t.Context(), "checkout", 2, WithTimeout(20*time.Millisecond))) })
		synctest.Wait()
		wg.Go(func() { patient = errOf(c.Wait(t.Context(), "checkout", 2, WithTimeout(time.Minute))) })
		synctest.Wait()
		f.trip = 100 * time.Millisecond
		f.with("checkout", func(b *oracle.Bucket) { b.Return(4) })
		c.buckets.find("checkout").lines.Load().wake()
		left, returned := int64(3), int64(2)
		if later {
			left, returned = 1, 0
			time.Sleep(60 * time.Millisecond)
			f.with("checkout", func(b *oracle.Bucket) { b.Control.Era++ })
		}
		wg.Wait()
		synctest.Wait()
		require.ErrorIs(t, impatient, ErrUnavailable)
		require.NoError(t, patient)
		time.Sleep(time.Second)
		f.with("checkout", func(b *oracle.Bucket) { require.EqualValues(t, left, *b.Tokens) })
		require.Equal(t, returned, c.Stats().Returned)
	})
}
