package fetch

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// outageOf makes the server of a Client fail, and takes from another bucket until the breaker is open.
func outageOf(t *testing.T, c *Client, f *fake) {
	t.Helper()
	f.fail(func(string) fault { return refused })
	for {
		_, _ = c.Take(t.Context(), "another", 1)
		if c.Stats().BreakersOpen != nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// minutely is the policy of a bucket that gains a token a minute.
func minutely(capacity int64, mode policy.Degraded) policy.Policy {
	return policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Minute}, Interval: time.Minute,
		Degraded: mode}
}

// A caller waits for tokens that are due in a minute when the server fails. Once the breaker is open, the degraded mode
// decides about the caller, and about the takes that the queue held back.
func TestAQueueEndsWhenTheBreakerOpens(t *testing.T) {
	for name, tc := range map[string]struct {
		mode policy.Degraded
		err  error
	}{
		"open":   {policy.DegradedOpen, nil},
		"closed": {policy.DegradedClosed, ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFake(map[string]policy.Policy{"b": minutely(100, tc.mode)})
				f.with("b", func(b *oracle.Bucket) { *b.Tokens = 0 })
				c := newClient(t, f)
				waited := make(chan error, 1)
				go func() { waited <- errOf(c.Wait(t.Context(), "b", 1)) }()
				synctest.Wait()
				time.Sleep(2 * time.Second)
				r, err := c.Take(t.Context(), "b", 1)
				require.NoError(t, err)
				require.Equal(t, SourceCached, r.Source.Kind, "the queue holds takes back")
				outageOf(t, c, f)
				r, err = c.Take(t.Context(), "b", 1)
				require.ErrorIs(t, err, tc.err)
				require.Equal(t, tc.err == nil, r.OK)
				synctest.Wait()
				require.NotEmpty(t, waited, "Wait doesn't wait for a server that is unavailable")
				require.ErrorIs(t, <-waited, tc.err)
			})
		})
	}
}

// A denial that the Client remembers doesn't decide about takes once the breaker is open.
func TestARememberedDenialEndsWhenTheBreakerOpens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(map[string]policy.Policy{"b": minutely(100, policy.DegradedOpen)})
		f.with("b", func(b *oracle.Bucket) { *b.Tokens = 0 })
		c := newClient(t, f)
		deny := func(kind SourceKind) {
			t.Helper()
			r, err := c.Take(t.Context(), "b", 1)
			require.NoError(t, err)
			require.False(t, r.OK)
			require.Equal(t, kind, r.Source.Kind)
		}
		f.fail(func(string) fault { return refused })
		for range 12 {
			_, _ = c.Take(t.Context(), "another", 1)
		}
		time.Sleep(200 * time.Millisecond)
		f.fail(nil)
		deny(SourceShared)
		deny(SourceCached)
		outageOf(t, c, f)
		require.True(t, known(c, "b").denied.applies(1, 0, time.Now()), "the denial is less than a second old")
		r, err := c.Take(t.Context(), "b", 1)
		require.NoError(t, err)
		require.True(t, r.OK)
		require.Equal(t, SourceFallback, r.Source.Kind)
	})
}

func TestALineHoldsNoTakeBackWhileItsServerIsUnavailable(t *testing.T) {
	for name, tc := range map[string]struct {
		server *node
		holds  bool
	}{
		"the server answers":        {&node{breaker: &engine.Breaker{}}, true},
		"the server is unavailable": {&node{lost: ErrUnavailable}, false},
		"a share denied the line":   {nil, true},
	} {
		l := &line{info: unseen, denied: time.Now(), server: tc.server}
		holds, _ := l.holdsBack("", policy.Leave{})
		require.Equal(t, tc.holds, holds, name)
	}
}
