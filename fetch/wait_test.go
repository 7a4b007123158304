package fetch

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// scripted is a server that answers each script call by a function, for tests
// with a fake clock. It has nothing else.
type scripted struct {
	redis.UniversalClient
	answer func(args []any) any
}

func (s scripted) Process(_ context.Context, cmd redis.Cmder) error {
	if _, reads := cmd.(*redis.StringCmd); reads {
		cmd.SetErr(redis.Nil)
		return redis.Nil
	}
	switch v := s.answer(cmd.Args()).(type) {
	case error:
		return v
	default:
		cmd.(interface{ SetVal(any) }).SetVal(v)
		return nil
	}
}

// denying is take.lua's answer while waitFor is left, after a refill at last.
func denying(waitFor time.Duration, last int64, p policy.Policy) []any {
	us := waitFor.Microseconds()
	if waitFor < 0 {
		us = -1
	}
	return []any{int64(0), int64(0), us, int64(1), int64(1), last, last, p.Terms(policy.Fence{}).Encode()}
}

// waitAgainst runs Wait against the answers, and closes its client.
func waitAgainst(ctx context.Context, t *testing.T, answer func(asked int) any) (asked []time.Duration, err error) {
	t.Helper()
	began := time.Now()
	c, err := New(scripted{answer: func([]any) any {
		asked = append(asked, time.Since(began))
		return answer(len(asked))
	}})
	require.NoError(t, err)
	c.jitter = func() float64 { return 0 }
	err = c.Wait(ctx, "checkout", 1)
	require.NoError(t, c.Close(context.Background()))
	return asked, err
}

func TestWaitAsksWhenTheTokensAreDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked, err := waitAgainst(t.Context(), t, func(asked int) any {
			if asked < 4 {
				return denying(time.Duration(asked)*300*time.Millisecond, int64(asked), hourly(5))
			}
			return int64(0)
		})
		require.NoError(t, err)
		require.Equal(t, []time.Duration{0, 300 * time.Millisecond, 900 * time.Millisecond, 1800 * time.Millisecond}, asked)
	})
}

func TestWaitRefusesAtOnceWhatComesAfterTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		asked, err := waitAgainst(ctx, t, func(int) any { return denying(time.Second+time.Microsecond, 1, hourly(5)) })
		require.ErrorIs(t, err, ErrDeadline)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, []time.Duration{0}, asked)

		asked, err = waitAgainst(ctx, t, func(asked int) any {
			if asked == 1 {
				return denying(999*time.Millisecond, 1, hourly(5))
			}
			return int64(0)
		})
		require.NoError(t, err)
		require.Equal(t, []time.Duration{0, 999 * time.Millisecond}, asked)
	})
}

func TestWaitAsksLessOftenWhileRefillsStayOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		asked, err := waitAgainst(ctx, t, func(int) any { return denying(50*time.Millisecond, 1, hourly(5)) })
		require.Error(t, err)
		require.Less(t, len(asked), 40, "%v", asked)
		require.Greater(t, len(asked), 25, "%v", asked)
	})
}

func TestWaitWithoutAKnownRefillAsksOnceASecondUntilItsContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
		defer cancel()
		asked, err := waitAgainst(ctx, t, func(int) any { return denying(-1, 1, hourly(5)) })
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, []time.Duration{0, time.Second, 2 * time.Second, 3 * time.Second}, asked)
	})
}

func TestWaitEndsWithItsContextItsClientAndItsServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Minute, cancel)
		_, err := waitAgainst(ctx, t, func(int) any { return denying(time.Hour, 1, hourly(5)) })
		require.ErrorIs(t, err, context.Canceled)

		_, err = waitAgainst(t.Context(), t, func(asked int) any {
			if asked == 1 {
				return denying(time.Hour, 1, hourly(5))
			}
			return errors.New("connection refused")
		})
		require.ErrorIs(t, err, ErrUnavailable)

		c, err := New(scripted{answer: func([]any) any { return denying(time.Hour, 1, hourly(5)) }})
		require.NoError(t, err)
		var wg sync.WaitGroup
		wg.Go(func() { err = c.Wait(t.Context(), "checkout", 1) })
		synctest.Wait()
		require.NoError(t, c.Close(t.Context()))
		wg.Wait()
		require.ErrorIs(t, err, ErrClosed)
	})
}

func TestTermsAreAskedForOnceInTenSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := hourly(5)
		var told []any
		c, err := New(scripted{answer: func(args []any) any {
			told = append(told, args[len(args)-1])
			if args[len(args)-1] == 1 {
				return []any{int64(1), int64(0), p.Terms(policy.Fence{}).Encode()}
			}
			return int64(0)
		}})
		require.NoError(t, err)
		limits := []int64{}
		for range 5 {
			r, err := c.Take(t.Context(), "checkout", 1)
			require.NoError(t, err)
			limits = append(limits, r.Limit)
			p = hourly(9)
			time.Sleep(4 * time.Second)
		}
		require.Equal(t, []any{1, 0, 0, 1, 0}, told)
		require.Equal(t, []int64{5, 5, 5, 9, 9}, limits)
		require.NoError(t, c.Close(t.Context()))
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
		require.NoError(t, c.Wait(t.Context(), "checkout", 4))
	}
	require.GreaterOrEqual(t, time.Since(began), 190*time.Millisecond, "20 tokens at 100/s take 200 ms")
	stop()
	refiller.Wait()
}

// modelled is a server that holds one bucket, refills it before each call, and
// counts the calls.
func modelled(bucket *policy.Bucket, calls *int) scripted {
	return scripted{answer: func(args []any) any {
		*calls++
		now, terms := time.Now().UnixMicro(), bucket.Control.Terms.Encode()
		bucket.Refill(policy.Call{Version: policy.Version{Index: *bucket.Index}}, now)
		runs := []policy.Run{{N: args[6].(int64), Count: 1}}
		many := len(args) > 8
		if many {
			runs = nil
			for i := 9; i < len(args); i += 2 {
				runs = append(runs, policy.Run{N: args[i].(int64), Count: args[i+1].(int64)})
			}
		}
		unserved, want := runs, int64(0)
		for i, r := range runs { // in line: up to the first that doesn't fit
			if want += r.N * r.Count; want > *bucket.Tokens {
				runs, unserved = runs[:i+1], runs[i+1:]
				break
			}
			unserved = runs[i+1:]
		}
		results, left, _ := bucket.TakeMany(runs, now)
		all := true
		reply := []any{int64(0), left, int64(0), int64(1), bucket.Control.Last, now, terms}
		for i, r := range results {
			reply = append(reply, r.Taken, r.Wait)
			all = all && r.Taken == runs[i].Count
		}
		for range unserved {
			reply = append(reply, int64(0), int64(0))
			all = false
		}
		switch {
		case all:
			return []any{int64(1), left, terms}
		case many:
			return reply
		}
		return []any{int64(0), left, results[0].Wait, int64(0), int64(1), bucket.Control.Last, now, terms}
	}}
}

func TestAThousandsLongLineAsksOncePerRefill(t *testing.T) {
	const waiters, perRefill = 10_000, 1000
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100_000, Rate: policy.PerSecond(10 * perRefill), Interval: 100 * time.Millisecond}
		terms := p.Terms(policy.Fence{})
		bucket := policy.Bucket{Tokens: new(int64), Index: new(int64), Control: &policy.Control{Terms: terms, Last: time.Now().UnixMicro()}}
		calls := 0
		c, err := New(modelled(&bucket, &calls))
		require.NoError(t, err)
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
				if err := c.Wait(t.Context(), "checkout", 1); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, i/perRefill)
			})
			synctest.Wait()
		}
		require.Less(t, int64(used()-before)/waiters, int64(32<<10), "bytes for each, its stack included")
		wg.Wait()
		require.Equal(t, time.Second, time.Since(began), "ten refills")
		require.LessOrEqual(t, calls, 2*10+1)
		require.IsNonDecreasing(t, order, "those who came first were served first")
		require.Empty(t, c.lines.keys)
		require.NoError(t, c.Close(t.Context()))
	})
}

func TestALineServesNobodyBeforeItsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// One token a second.
		terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(1), Interval: time.Second}.Terms(policy.Fence{})
		terms.MaxElapsed = time.Hour.Microseconds()
		bucket := policy.Bucket{Tokens: new(int64), Index: new(int64), Control: &policy.Control{Terms: terms, Last: time.Now().UnixMicro()}}
		calls := 0
		c, err := New(modelled(&bucket, &calls))
		require.NoError(t, err)
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
				if c.Wait(ctx, "checkout", n) == nil {
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
		require.Empty(t, served, "the next one wants 50")
		cancel() // and gives its place to the next
		synctest.Wait()
		require.Equal(t, service{1, 15 * time.Second}, <-served)
		require.Equal(t, service{2, 15 * time.Second}, <-served)
		require.Empty(t, c.lines.keys)
		require.LessOrEqual(t, calls, 6)
		require.NoError(t, c.Close(t.Context()))
	})
}

func TestOneBehindALineIsRefusedAtOnceIfItsTokensComeTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10), Interval: 100 * time.Millisecond}
		asked := 0
		c, err := New(scripted{answer: func([]any) any {
			asked++
			return denying(10*time.Second, time.Now().UnixMicro(), p)
		}})
		require.NoError(t, err)
		var wg sync.WaitGroup
		wg.Go(func() { _ = c.Wait(t.Context(), "checkout", 100) }) // due in 10 s
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10500*time.Millisecond)
		defer cancel()
		require.ErrorIs(t, c.Wait(ctx, "checkout", 10), ErrDeadline, "due in 11 s")
		require.Equal(t, 1, asked)
		var last error
		wg.Go(func() { last = c.Wait(ctx, "checkout", 5) }) // due in 10.5 s: it stands in line
		synctest.Wait()
		require.EqualValues(t, 105, c.lines.keys["checkout"].total)
		require.NoError(t, c.Close(t.Context()))
		wg.Wait()
		require.ErrorIs(t, last, ErrClosed)
	})
}

func TestADenialIsRememberedUntilItsTokensAreDueAndForNoMoreThanASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, on := range []bool{true, false} {
			asked, due := 0, 300*time.Millisecond
			c, err := New(scripted{answer: func(args []any) any {
				asked++
				if args[6].(int64) < 5 {
					return []any{int64(1), int64(0), hourly(9).Terms(policy.Fence{}).Encode()}
				}
				return denying(due, 1, hourly(9))
			}}, WithDenyCache(on))
			require.NoError(t, err)
			take := func(n int64) Result {
				r, err := c.Take(t.Context(), "checkout", n)
				require.NoError(t, err)
				return r
			}
			require.Equal(t, Source{}, take(5).Source)
			time.Sleep(100 * time.Millisecond)
			r := take(6)
			if !on {
				require.Equal(t, Source{}, r.Source)
				require.Equal(t, 2, asked)
				require.NoError(t, c.Close(t.Context()))
				continue
			}
			require.Equal(t, SourceCached, r.Source.Kind)
			require.False(t, r.OK)
			require.EqualValues(t, 9, r.Limit)
			require.Equal(t, 200*time.Millisecond, r.RetryAfter)
			require.Equal(t, 1, asked)
			require.True(t, take(4).OK, "fewer tokens may be there")
			require.Equal(t, 2, asked)
			time.Sleep(200 * time.Millisecond)
			due = time.Hour
			require.Equal(t, Source{}, take(5).Source, "the tokens were due")
			require.Equal(t, 3, asked)
			time.Sleep(time.Second - time.Nanosecond)
			require.Equal(t, SourceCached, take(5).Source.Kind)
			time.Sleep(time.Nanosecond)
			require.Equal(t, Source{}, take(5).Source)
			require.Equal(t, 4, asked)
			require.NoError(t, c.Close(t.Context()))
		}
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
	require.Equal(t, Result{OK: true, Taken: 1, Remaining: 1, Limit: 5, ResetAfter: 4 * time.Hour}, r)
}

func TestTheFirstOfALineWhoGivesUpTakesNobodyAlong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBank(map[string]policy.Policy{"checkout": hourly(100)})
		b.trip = 10 * time.Millisecond
		c, began := newClient(t, b), time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		errs := make([]error, 4)
		var wg sync.WaitGroup
		for i, ctx := range []context.Context{t.Context(), ctx, t.Context(), t.Context()} {
			wg.Go(func() { errs[i] = c.Wait(ctx, "checkout", 2) })
			time.Sleep(time.Millisecond)
		}
		time.Sleep(12 * time.Millisecond) // the second asks for the others, too
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

// Whoever leaves while it is served gives back what came from the bucket, and nothing else.
func TestWhatComesFromNoBucketGoesBackToNone(t *testing.T) {
	modes := map[string]struct {
		change func(*policy.Policy)
		fate   func(string) fault
	}{
		"degraded": {func(p *policy.Policy) { p.Degraded = policy.DegradedOpen }, func(string) fault { return lostCall }},
		"shadow":   {func(p *policy.Policy) { p.Shadow = true }, nil},
	}
	for name, mode := range modes {
		for _, crowd := range []int{1, 3} {
			t.Run(name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := hourly(10)
					mode.change(&p)
					b := newBank(map[string]policy.Policy{"checkout": p})
					c := newClient(t, b)
					_, err := c.Take(t.Context(), "checkout", 9)
					require.NoError(t, err)
					require.NoError(t, c.workers.enter())
					defer c.workers.leave()
					var l *line
					var waiters []*waiter
					for range crowd {
						var w *waiter
						l, w, err = c.lines.join(t.Context(), "checkout", 2)
						require.NoError(t, err)
						waiters = append(waiters, w)
					}
					b.fail(mode.fate)
					c.askForLine(t.Context(), l)
					b.fail(nil)
					for _, w := range waiters {
						require.ErrorIs(t, c.leaveLine(t.Context(), l, w, context.Canceled), context.Canceled)
					}
					synctest.Wait()
					require.EqualValues(t, 1, inBucket(b))
				})
			})
		}
	}
}
