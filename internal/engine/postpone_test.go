package engine

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// If a caller allows it (Latest), the time for opening a connection does not count as its time, up to a bound.
func TestOpeningAConnectionPutsADeadlineOff(t *testing.T) {
	for name, tc := range map[string]struct {
		dial, latest time.Duration
		answered     bool
		took         time.Duration
	}{
		"a caller that sets its own timeout":      {100 * ms, 0, false, 50*ms + graceRead},
		"the whole timeout begins after the dial": {100 * ms, time.Second, true, 140 * ms},
		"a dial shorter than the timeout":         {45 * ms, time.Second, true, 85 * ms},
		"a dial longer than the bound":            {time.Hour, 300 * ms, false, 300*ms + graceRead},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, 40*ms, 8, nil, func(t *testing.T, _ *server, q *Queue[int]) {
				sockets := &Sockets{}
				q.Sockets = sockets
				send := q.send
				dial := sockets.Dialer(func(ctx context.Context, _, _ string) (net.Conn, error) {
					if err := sleep(ctx, tc.dial, true); err != nil {
						return nil, err
					}
					return nil, errors.New("the fake server needs no connection")
				})
				q.send = func(ctx context.Context, batch []*Request[int]) (time.Duration, error) {
					_, _ = dial(ctx, "", "")
					return send(ctx, batch)
				}
				began := time.Now()
				r := q.Request()
				r.Body = 1
				w := Wait{Began: began, Deadline: began.Add(50 * ms)}
				if tc.latest > 0 {
					w.Latest = began.Add(tc.latest)
				}
				err := q.Do(context.Background(), r, w)
				require.Equal(t, tc.answered, err == nil, "%v", err)
				require.Equal(t, tc.took, time.Since(began))
			})
		})
	}
}

// The race detector finds a fault here if the timer reads a request that its caller may already use again.
func TestARequestWhoseDeadlineWasPutOffIsReused(t *testing.T) {
	const trip = 60 * ms
	sockets := &Sockets{}
	dial := sockets.Dialer(func(context.Context, string, string) (net.Conn, error) {
		time.Sleep(trip) // sends nothing to the timer, so no signal orders its reads before the answer
		return nil, errors.New("the fake server needs no connection")
	})
	q := NewQueue(func(_ context.Context, batch []*Request[int]) (time.Duration, error) {
		_, _ = dial(t.Context(), "", "")
		batch[0].Answer()
		return trip, nil
	}, 1, nil, nil)
	q.Sockets = sockets
	r := q.Request()
	for range 3 {
		began := time.Now()
		w := Wait{Began: began, Deadline: began.Add(trip / 3), Latest: began.Add(time.Minute)}
		require.NoError(t, q.Do(t.Context(), r, w))
	}
	require.NoError(t, q.Close(t.Context()))
}
