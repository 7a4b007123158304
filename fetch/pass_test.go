package fetch

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
)

// Waiters that want many tokens don't block the other calls of their process: in each refill interval, one call passes
// them.
func TestALineLetsATakePassInEachRefillInterval(t *testing.T) {
	for name, take := range map[string]func(*Client) (bool, error){
		"take": func(c *Client) (bool, error) {
			r, err := c.Take(t.Context(), "b", 1)
			return r.OK, err
		},
		"take up to": func(c *Client) (bool, error) {
			r, err := c.TakeUpTo(t.Context(), "b", 2)
			return r.OK, err
		},
		"several": func(c *Client) (bool, error) {
			all, err := c.TakeAll(t.Context(), []Request{{Key: "b", N: 1}})
			return all.OK, err
		},
		"reservation": func(c *Client) (bool, error) {
			r, err := c.Reserve(t.Context(), "b", 1, time.Minute)
			if err != nil {
				return false, err
			}
			return r.OK, nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t).Client()
			p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(50), Interval: 100 * time.Millisecond,
				Initial: new(int64(50))}
			createBucket(t, rdb, "b", p)
			c := newClient(t, rdb, slow())
			ctx, stop := context.WithCancel(t.Context())
			var refilling, waiting sync.WaitGroup
			defer refilling.Wait()
			defer stop()
			refilling.Go(func() { refillUntil(ctx, t, rdb, "b", p) })
			for range 2 {
				waiting.Go(func() {
					if _, err := c.Wait(t.Context(), "b", 90); err != nil {
						t.Error(err)
					}
				})
			}
			served := make(chan struct{})
			go func() {
				waiting.Wait()
				close(served)
			}()
			eventually(t, func() bool { return c.buckets.find("b").waited() }, "a caller waits in the line")
			began, granted := time.Now(), 0
			ticker := time.NewTicker(5 * time.Millisecond)
			defer ticker.Stop()
			for over := false; !over; {
				select {
				case <-served:
					over = true
				case <-ticker.C:
					ok, err := take(c)
					require.NoError(t, err)
					if ok {
						granted++
					}
				}
			}
			intervals := int(time.Since(began) / p.Interval)
			t.Logf("%d calls passed in %d refill intervals", granted, intervals)
			require.Greater(t, granted, intervals/3)
			require.Less(t, granted, intervals+10, "calls passed the line more often than once in an interval")
		})
	}
}
