package engine

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// server is a fake server. Each round trip lasts as long as trip says, and may be lost.
type server struct {
	mu        sync.Mutex
	trip      time.Duration
	silent    bool          // no reply comes back
	err       error         // the error of all calls
	dial      time.Duration // time until a call is sent; it is not sent if its context ends before
	began     time.Time
	sent      [][]int         // bodies of each call that was sent
	at        []time.Duration // when
	under     int             // calls under way
	most      int             // the largest number of calls under way so far
	unclaimed []int           // bodies of requests that were answered after their callers had left
}

func newBreaker() *Breaker { return &Breaker{Silent: unheard, Changed: unchanged} }

func unheard() {}

func unchanged(bool) {}

// countOpened counts how often a breaker opens.
func countOpened(b *Breaker) *atomic.Int64 {
	var opened atomic.Int64
	b.Changed = func(open bool) {
		if open {
			opened.Add(1)
		}
	}
	return &opened
}

func newServer(trip time.Duration) *server { return &server{trip: trip, began: time.Now()} }

func (s *server) set(change func(*server)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(s)
}

func (s *server) send(ctx context.Context, batch []*Request[int]) (time.Duration, error) {
	began := time.Now()
	s.mu.Lock()
	s.under++
	s.most = max(s.most, s.under)
	dial := s.dial
	s.mu.Unlock()
	err, unsent := sleep(ctx, dial, true), false
	if err == nil {
		bodies := make([]int, len(batch))
		for i, r := range batch {
			bodies[i] = r.Body
		}
		s.mu.Lock()
		s.sent, s.at = append(s.sent, bodies), append(s.at, time.Since(s.began))
		trip := s.trip
		if s.silent {
			trip = time.Hour
		}
		s.mu.Unlock()
		err = sleep(ctx, trip, false)
	} else {
		unsent = true
		err = errors.Join(ErrNoEvidence, err)
	}
	s.mu.Lock()
	if err == nil {
		err = s.err
	}
	s.under--
	s.mu.Unlock()
	for _, r := range batch {
		body := r.Body
		r.Body = -body
		if !r.Answer() && !unsent {
			s.mu.Lock()
			s.unclaimed = append(s.unclaimed, body)
			s.mu.Unlock()
		}
	}
	return time.Since(began), err
}

// sleep waits as a socket does, until the deadline of ctx at the latest. As a dial it also ends when ctx is cancelled.
func sleep(ctx context.Context, d time.Duration, dials bool) error {
	if d == 0 && ctx.Err() == nil { // a timer that is over at once crashes Go 1.26 in a bubble under the race detector
		return nil
	}
	end := make(<-chan time.Time)
	if deadline, ok := ctx.Deadline(); ok {
		end = time.After(time.Until(deadline))
	}
	done := ctx.Done()
	if !dials {
		done = nil
	}
	select {
	case <-time.After(d):
		return nil
	case <-done:
		return ctx.Err()
	case <-end:
		return context.DeadlineExceeded
	}
}

// ask makes a request with body and a timeout (0: none). It returns the time until the request ended.
func ask(ctx context.Context, q *Queue[int], body int, timeout time.Duration) (time.Duration, error) {
	now := time.Now()
	deadline, _ := ctx.Deadline()
	if timeout > 0 {
		deadline = earlier(deadline, now.Add(timeout))
	}
	r := q.Request()
	r.Body = body
	err := q.Do(ctx, r, Wait{Began: now, Deadline: deadline})
	if err == nil {
		if r.Body != -body {
			err = errors.New("another request's answer")
		}
		q.Release(r)
	}
	return time.Since(now), err
}

// bubble runs a test of a queue in simulated time, in a synctest bubble. Then it closes the queue, because a bubble
// must not have goroutines at its end.
func bubble(t *testing.T, trip time.Duration, permits int, b *Breaker,
	test func(t *testing.T, s *server, q *Queue[int])) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newServer(trip)
		q := NewQueue(s.send, permits, b, nil)
		test(t, s, q)
		require.NoError(t, q.Close(context.Background()))
		_, err := ask(context.Background(), q, 1, 0)
		require.ErrorIs(t, err, ErrClosed)
	})
}

const ms = time.Millisecond
