package engine

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errBroken = errors.New("connection reset")

func TestABreakerOpensOnTheShareOfFailures(t *testing.T) {
	began := time.Now()
	at := func(d time.Duration) time.Time { return began.Add(d) }
	t.Run("five failures among hundreds are a blip", func(t *testing.T) {
		b := newBreaker()
		for i := range 10_000 {
			err := error(nil)
			if i%100 < 5 {
				err = errBroken
			}
			require.False(t, b.record(at(time.Duration(i)*ms), err))
		}
	})
	t.Run("many failures at one moment", func(t *testing.T) {
		b := newBreaker()
		b.record(began, nil)
		for range 100 {
			require.False(t, b.record(at(ms), errBroken))
		}
		for i := range 200 {
			require.False(t, b.record(at(50*ms+time.Duration(i)*ms), nil))
		}
	})
	t.Run("few calls", func(t *testing.T) {
		b := newBreaker()
		for i := range fewestCalls - 1 {
			require.False(t, b.record(at(time.Duration(i)*100*ms), errBroken))
		}
		require.True(t, b.record(at(900*ms), errBroken), "ten calls failed")
		require.ErrorIs(t, b.Open(), errBroken)
		require.False(t, b.record(at(time.Second), errBroken), "the breaker opens only once")
	})
	t.Run("a failure now and then", func(t *testing.T) {
		b := newBreaker()
		for i := range 1000 {
			d := time.Duration(i) * 3 * time.Second
			require.False(t, b.record(at(d), errBroken), "earlier failures are forgotten")
			require.False(t, b.record(at(d+time.Second), nil))
		}
	})
	t.Run("failures with hours between them", func(t *testing.T) {
		b := newBreaker()
		for i := range 100 {
			require.False(t, b.record(at(time.Duration(i)*time.Hour), errBroken), "idle connections may have been cut meanwhile")
		}
	})
	t.Run("silence that turns out to be slowness", func(t *testing.T) {
		b := newBreaker()
		for i := range fewestCalls {
			window, opens := b.recordSilence(at(time.Duration(i) * ms))
			require.NotZero(t, window)
			require.False(t, opens)
		}
		for range fewestCalls {
			require.False(t, b.recordEnd(at(shortest-ms), 1, nil))
		}
		require.False(t, b.record(at(shortest), errBroken))
	})
	t.Run("slowness of an earlier window", func(t *testing.T) {
		b := newBreaker()
		slow, _ := b.recordSilence(began)
		for range fewestCalls - 2 {
			b.record(at(ms), nil)
		}
		b.record(at(shortest), nil)
		for range fewestCalls / 2 {
			b.record(at(shortest+ms), nil)
			b.record(at(shortest+ms), errBroken)
		}
		b.recordEnd(at(shortest+2*ms), slow, nil)
		require.True(t, b.record(at(3*shortest), errBroken), "six of eleven failed")
	})
	t.Run("each tenth call is answered", func(t *testing.T) {
		b := newBreaker()
		opened := 0
		for i := range 10 * fewestCalls {
			err := errBroken
			if i%fewestCalls == fewestCalls-1 {
				err = nil
			}
			if b.record(at(time.Duration(i)*shortest/(fewestCalls-1)), err) {
				opened++
				require.Error(t, err, "an answer does not open the breaker")
			}
		}
		require.Equal(t, 1, opened)
	})
	t.Run("two failures at one moment, a while after an answer", func(t *testing.T) {
		b := newBreaker()
		for i := range fewestCalls {
			b.record(at(time.Duration(i)*100*ms), nil)
		}
		for range fewestClear {
			require.False(t, b.record(at(5*time.Second), errBroken))
		}
	})
	t.Run("nothing but failures", func(t *testing.T) {
		b := newBreaker()
		require.False(t, b.record(began, errBroken))
		require.False(t, b.record(at(clearTime-ms), errBroken))
		require.True(t, b.record(at(clearTime), errBroken), "few callers with long timeouts make few calls")
	})
	t.Run("an outage after a good time", func(t *testing.T) {
		b := newBreaker()
		for i := range 100_000 {
			b.record(at(time.Duration(i)*10*time.Microsecond), nil)
		}
		opened := time.Duration(0)
		for i := range 100 {
			if d := time.Second + time.Duration(i)*10*ms; b.record(at(d), errBroken) {
				opened = d - time.Second
				break
			}
		}
		require.NotZero(t, opened)
		require.LessOrEqual(t, opened, 2*shortest+fewestCalls*10*ms)
	})
}

// askUntil makes requests in several goroutines until an instant. It counts the answers and the errors.
func askUntil(q *Queue[int], goroutines int, timeout time.Duration, until time.Time, pause time.Duration) (answers,
	failures int) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range goroutines {
		wg.Go(func() {
			for time.Now().Before(until) {
				_, err := ask(context.Background(), q, 1, timeout)
				mu.Lock()
				if err == nil {
					answers++
				} else {
					failures++
				}
				mu.Unlock()
				time.Sleep(pause)
			}
		})
	}
	wg.Wait()
	return answers, failures
}

func breakerOf(s **server) *Breaker {
	return &Breaker{Silent: unheard, Changed: unchanged, Patience: 50 * ms, Probe: func(ctx context.Context) error {
		(*s).mu.Lock()
		trip, silent := (*s).trip, (*s).silent
		(*s).mu.Unlock()
		if silent {
			trip = time.Hour
		}
		return sleep(ctx, trip, false)
	}}
}

func TestABreakerOpensOnSilenceAndClosesWhenTheServerIsBack(t *testing.T) {
	for _, trip := range []time.Duration{ms / 10, 20 * ms, 60 * ms, 200 * ms, 1500 * ms} {
		t.Run(trip.String(), func(t *testing.T) {
			within := max(2*time.Second, 6*trip)
			var fake *server
			b := breakerOf(&fake)
			opened := countOpened(b)
			bubble(t, trip, 64, b, func(t *testing.T, s *server, q *Queue[int]) {
				fake = s
				askUntil(q, 20, 0, time.Now().Add(10*time.Second), ms)
				require.Zero(t, opened.Load(), "the server answers")
				s.set(func(s *server) { s.silent = true })
				askUntil(q, 20, 50*ms, time.Now().Add(within), ms)
				require.Equal(t, ErrSilent, b.Open())
				time.Sleep(time.Minute)
				require.Equal(t, ErrSilent, b.Open())
				s.set(func(s *server) { s.silent = false })
				for began := time.Now(); b.Open() != nil; time.Sleep(ms) {
					require.Less(t, time.Since(began), within)
				}
				askUntil(q, 20, 0, time.Now().Add(10*time.Second), ms)
				require.NoError(t, b.Open(), "the breaker stays closed")
			})
		})
	}
}

// Many calls to a distant server are under way before it can answer the first of them.
func TestTheBreakerIsPatientBeforeTheFirstAnswer(t *testing.T) {
	var fake *server
	b := breakerOf(&fake)
	opened := countOpened(b)
	bubble(t, 600*ms, 64, b, func(t *testing.T, s *server, q *Queue[int]) {
		fake = s
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if _, err := ask(context.Background(), q, 1, 100*ms); err == nil {
					t.Error("a call was answered within 100 ms")
				}
			})
			time.Sleep(10 * ms)
		}
		wg.Wait()
		require.Zero(t, opened.Load())
		require.Equal(t, 600*ms, q.RoundTrip(), "the replies for callers that left are read")
	})
}

// A server may be slower than the default timeout and still be available.
func TestAServerHasTheTimeOfItsCallersAndOfItsRoundTrips(t *testing.T) {
	const trip = 1500 * ms
	for name, tc := range map[string]struct {
		patience, timeout time.Duration
		known             bool // the length of round trips is known
	}{
		"callers wait for longer":            {5 * time.Second, 5 * time.Second, false},
		"some callers wait for longer":       {5 * time.Second, 200 * ms, false},
		"round trips are known to be longer": {50 * ms, 5 * time.Second, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := &Breaker{Silent: unheard, Changed: unchanged, Patience: tc.patience}
			bubble(t, trip, 64, b, func(t *testing.T, _ *server, q *Queue[int]) {
				if tc.known {
					_, err := ask(context.Background(), q, 1, 0)
					require.NoError(t, err)
				}
				var wg sync.WaitGroup
				for range 100 {
					wg.Go(func() {
						if _, err := ask(context.Background(), q, 1, tc.timeout); err != nil && tc.timeout > trip {
							t.Error(err)
						}
					})
					time.Sleep(20 * ms)
					require.NoError(t, b.Open())
				}
				wg.Wait()
			})
		})
	}
}

func TestErrorsThatAreNoEvidenceAboutTheServer(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(s *server)
		permits int
		timeout time.Duration
		trip    time.Duration
	}{
		"callers with less time than a round trip":  {func(*server) {}, 64, 12 * ms, 20 * ms},
		"callers whose timeout is always too short": {func(*server) {}, 64, 50 * ms, 60 * ms},
		"waiting in the queue":                      {func(*server) {}, 1, 15 * ms, 10 * ms},
		"calls that were never sent":                {func(s *server) { s.err = ErrNoEvidence }, 64, 50 * ms, ms},
	} {
		t.Run(name, func(t *testing.T) {
			var fake *server
			b := breakerOf(&fake)
			bubble(t, tc.trip, tc.permits, b, func(t *testing.T, s *server, q *Queue[int]) {
				fake = s
				tc.change(s)
				for range 100 {
					askUntil(q, 40, tc.timeout, time.Now().Add(100*ms), 100*time.Microsecond)
					require.NoError(t, b.Open())
				}
			})
		})
	}
	t.Run("waiting for a connection", func(t *testing.T) {
		var fake *server
		b := breakerOf(&fake)
		b.Excuse = func() bool { return true }
		opened := countOpened(b)
		bubble(t, ms, 64, b, func(t *testing.T, s *server, q *Queue[int]) {
			fake = s
			_, err := ask(context.Background(), q, 1, 0)
			require.NoError(t, err, "the first call measures the distance")
			s.set(func(s *server) { s.dial, s.silent = time.Hour, true })
			askUntil(q, 20, 50*ms, time.Now().Add(800*ms), ms)
			require.NoError(t, b.Open())
			askUntil(q, 20, 50*ms, time.Now().Add(time.Second), ms)
			require.Equal(t, ErrSilent, b.Open(), "no server needs so long to accept a connection")
			s.set(func(s *server) { s.dial, s.silent = 500*ms, false })
			for b.Open() != nil {
				time.Sleep(ms)
			}
			var wg sync.WaitGroup
			for range 40 {
				wg.Go(func() { _, _ = ask(context.Background(), q, 1, time.Second) })
				time.Sleep(10 * ms)
			}
			wg.Wait()
			require.EqualValues(t, 1, opened.Load(), "the breaker does not open again after the probe's answer")
		})
	})
	t.Run("an overloaded server, which answers one call after the other", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			busy, trip := make(chan struct{}, 1), ms
			b := newBreaker()
			b.Patience = 50 * ms
			b.Probe = func(context.Context) error { return nil }
			q := NewQueue(func(_ context.Context, batch []*Request[int]) (time.Duration, error) {
				began := time.Now()
				busy <- struct{}{}
				time.Sleep(trip)
				<-busy
				for _, r := range batch {
					r.Body = -r.Body
					r.Answer()
				}
				return time.Since(began), nil
			}, 64, b, nil)
			for range 10 {
				_, err := ask(context.Background(), q, 1, 0)
				require.NoError(t, err)
			}
			trip = 40 * ms
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					if _, err := ask(context.Background(), q, 1, 0); err != nil {
						t.Error(err)
					}
				})
				time.Sleep(10 * ms)
				require.NoError(t, b.Open())
			}
			wg.Wait()
			require.NoError(t, q.Close(context.Background()))
		})
	})
}

func TestAnOpenBreakerIsProbedAFewTimesASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(ms)
		s.err = errBroken
		var probes atomic.Int64
		b := &Breaker{Silent: unheard, Changed: unchanged, Patience: 50 * ms, Probe: func(context.Context) error {
			probes.Add(1)
			s.mu.Lock()
			defer s.mu.Unlock()
			return s.err
		}}
		q := NewQueue(s.send, 8, b, nil)
		askUntil(q, 4, 50*ms, time.Now().Add(time.Second), ms)
		require.ErrorIs(t, b.Open(), errBroken)
		probes.Store(0)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.GreaterOrEqual(t, probes.Load(), int64(30))
		require.LessOrEqual(t, probes.Load(), int64(110))
		s.set(func(s *server) { s.err = nil })
		time.Sleep(time.Second)
		synctest.Wait()
		require.NoError(t, b.Open())
		s.set(func(s *server) { s.err = errBroken })
		askUntil(q, 4, 50*ms, time.Now().Add(time.Second), ms)
		require.Error(t, b.Open())
		require.NoError(t, q.Close(t.Context()), "the probes end when the queue closes")
	})
}

// A failure counts only if the server had enough time to answer. A lone caller may have less time than that.
func TestAnImpatientLoneCallerIsNoEvidence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(ms / 4)
		trip := ms / 4
		cut := make(chan struct{}, 1)
		b := newBreaker()
		b.Patience = 50 * ms
		b.Probe = func(context.Context) error { return nil }
		q := NewQueue(s.send, 8, b, &Express[int]{
			Send: func(_ context.Context, batch []*Request[int]) (_ time.Duration, err error) {
				select {
				case <-time.After(trip):
					batch[0].Body = -batch[0].Body
				case <-cut:
					err = net.ErrClosed
				}
				batch[0].Answer()
				return trip, err
			},
			Interrupt: func() { cut <- struct{}{} },
			Alive:     func() bool { return true },
		})
		refused := 0
		for i := range 200 { // every other call needs 30 ms, but its caller has only 12 ms
			trip = ms / 4
			if i%2 == 1 {
				trip = 30 * ms
			}
			took, err := ask(context.Background(), q, 1, 12*ms)
			if err != nil {
				refused++
			}
			require.LessOrEqual(t, took, 12*ms+graceRead)
			require.NoError(t, b.Open(), "call %d", i)
			time.Sleep(10 * ms)
		}
		require.Equal(t, 100, refused)
		require.NoError(t, q.Close(context.Background()))
	})
}

// A lone caller makes its call itself. If it gives up, it returns at once, whether the call waits for a reply or for a
// connection.
func TestALoneCallerWhoLeavesIsNotHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(ms / 4)
		connects := false
		cut := make(chan struct{}, 1)
		q := NewQueue(s.send, 8, nil, &Express[int]{
			Send: func(ctx context.Context, batch []*Request[int]) (_ time.Duration, err error) {
				if connects {
					err = sleep(ctx, time.Second, true)
				} else {
					<-cut
					err = net.ErrClosed
				}
				batch[0].Answer()
				return ms / 4, err
			},
			Interrupt: func() { cut <- struct{}{} },
			Alive:     func() bool { return true },
		})
		for _, connects = range []bool{false, true} {
			_, err := ask(context.Background(), q, 1, 0)
			require.NoError(t, err, "round trips are short")
			synctest.Wait()
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(10*ms, cancel)
			took, err := ask(ctx, q, 1, 0)
			require.Equal(t, context.Canceled, err)
			require.LessOrEqual(t, took, 10*ms+graceRead)
		}
		require.NoError(t, q.Close(context.Background()))
	})
}
