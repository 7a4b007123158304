package fetch

import (
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// otherConsumers sends the heartbeats of n other consumers of a bucket.
func otherConsumers(t *testing.T, rdb lua.Client, key string, n int) {
	t.Helper()
	for i := range n {
		_, err := lua.Heartbeat(t.Context(), rdb, key, "other "+strconv.Itoa(i), time.Hour)
		require.NoError(t, err)
	}
}

// countsConsumers waits until heartbeats have counted the consumers of a bucket.
func countsConsumers(t *testing.T, c *Client, key string, live int64) *share {
	t.Helper()
	s := known(c, key).share
	require.NotNil(t, s)
	eventually(t, func() bool { return consumersOf(s) == live }, "heartbeats")
	return s
}

// consumersOf returns the number of consumers that divide a bucket, as far as its share knows.
func consumersOf(s *share) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.live
}

// shareOf returns a Client that has taken tokens from the bucket b in degraded mode local, which begins full. Then the
// connection to the bucket's server is cut. left returns the number of tokens in the Client's share.
func shareOf(t *testing.T, capacity, taken int64) (f *faulty, c *Client, left func() int64) {
	t.Helper()
	f = newFaulty(t, nil)
	p := hourly(capacity)
	p.Degraded = policy.DegradedLocal
	createBucket(t, f.direct, "b", p)
	c = newClient(t, f.rdb, slow())
	f.warm(t, c)
	require.NoError(t, errOf(c.Take(t.Context(), "b", taken)))
	s := countsConsumers(t, c, "b", 1)
	f.proxy.Cut()
	return f, c, func() int64 { return tokensIn(s, c.consumers.now()) }
}

// unused changes the share as if for a long time no take had asked its bucket for the policy.
func unused(c *Client, s *share) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.last -= 2 * liveFor
	c.consumers.mu.Lock()
	defer c.consumers.mu.Unlock()
	c.consumers.counted -= 2 * liveFor
}

// Another program uses the name of the list of a bucket's consumers. The number of shares is unknown then, and a share
// that is too large would create tokens.
func TestAShareOfUncountedConsumersNeedsTheCountOfAnotherBucket(t *testing.T) {
	server := testenv.Redis(t)
	p := hourly(100)
	p.Degraded = policy.DegradedLocal
	createBucket(t, server.Client(), "b", p)
	createBucket(t, server.Client(), "other", p)
	require.NoError(t, server.Client().Set(t.Context(), lua.LiveKey("b"), "x", 0).Err())
	c := newClient(t, server.Client(), WithTimeout(500*time.Millisecond))
	require.NoError(t, errOf(c.Take(t.Context(), "b", 1, slow())))
	server.Pause()
	defer server.Resume()
	_, err := c.Take(t.Context(), "b", 1)
	require.ErrorIs(t, err, ErrUnavailable)
	server.Resume()
	eventually(t, func() bool { return errOf(c.Take(t.Context(), "other", 1)) == nil }, "the server answers again")
	countsConsumers(t, c, "other", 1)
	server.Pause()
	r, err := c.Take(t.Context(), "b", 1)
	require.NoError(t, err)
	require.True(t, r.OK)
	require.Equal(t, SourceFallback, r.Source.Kind)
}

// The degraded mode of a template applies to all of its buckets, even to a bucket from which this Client takes for the
// first time.
func TestATemplatesDegradedModeHoldsForItsNewKeys(t *testing.T) {
	yearly, err := policy.ParseCalendar("0 0 1 1 *", time.UTC)
	require.NoError(t, err)
	budget := policy.Template{Policy: policy.Policy{Capacity: 40, Steps: yearly, StepTokens: 40}}
	for name, tc := range map[string]struct {
		published bool
		template  policy.Template
	}{
		"lazy, given":         {false, policy.Template{Policy: hourly(40), Enforce: policy.EnforceLazy}},
		"refilled, published": {true, policy.Template{Policy: hourly(40)}},
		"budget, given":       {false, budget},
		"budget, published":   {true, budget},
	} {
		t.Run(name, func(t *testing.T) {
			server := testenv.Redis(t)
			template := func(prefix string, mode policy.Degraded) policy.Template {
				one := tc.template
				one.Prefix = prefix
				one.Policy.Degraded = mode
				return one
			}
			list := []policy.Template{
				template("closed:", policy.DegradedClosed), template("open:", policy.DegradedOpen),
				template("local:", policy.DegradedLocal), template("shadow:", policy.DegradedOpen),
			}
			list[3].Policy.Shadow = true
			opts := []Option{WithTimeout(500 * time.Millisecond), WithTemplates(list...)}
			if tc.published {
				set, err := policy.NewTemplates(1, list, nil)
				require.NoError(t, err)
				_, err = lua.PublishTemplates(t.Context(), server.Client(), set)
				require.NoError(t, err)
				opts = opts[:1]
			}
			c := newClient(t, server.Client(), opts...)
			otherConsumers(t, server.Client(), "local:1", 3)
			_, err := c.Take(t.Context(), "local:1", 1, slow())
			require.NoError(t, err)
			countsConsumers(t, c, "local:1", 4)
			server.Pause()
			defer server.Resume()

			_, err = c.Take(t.Context(), "closed:2", 1)
			require.ErrorIs(t, err, ErrUnavailable)
			_, err = c.Take(t.Context(), "none:2", 1)
			require.ErrorIs(t, err, ErrUnavailable, "no template matches")
			r, err := c.Take(t.Context(), "open:2", 30)
			require.NoError(t, err)
			require.True(t, r.OK)
			require.EqualValues(t, 40, r.Limit)
			_, err = c.Take(t.Context(), "open:2", 41)
			require.ErrorIs(t, err, ErrExceedsCapacity)
			r, err = c.Take(t.Context(), "shadow:2", 41)
			require.NoError(t, err)
			require.True(t, r.OK)
			r, err = c.TakeUpTo(t.Context(), "local:2", 40)
			require.NoError(t, err)
			require.Equal(t, SourceFallback, r.Source.Kind)
			require.EqualValues(t, 10, r.Taken, "a quarter of a full bucket, which four consumers share")
			r, err = c.Take(t.Context(), "local:2", 1)
			require.NoError(t, err)
			require.False(t, r.OK, "the share is used up")
		})
	}
}

// A consumer that stopped taking from a bucket before the outage has a share, too. It divides the bucket by the number
// of consumers that it last counted there, or by the largest count of any other bucket if that is larger.
func TestALocalShareOutlivesAPauseInUse(t *testing.T) {
	server := testenv.Redis(t)
	p := hourly(100)
	p.Degraded = policy.DegradedLocal
	c := newClient(t, server.Client(), WithTimeout(500*time.Millisecond))
	for _, use := range []struct {
		key    string
		others int
	}{{"shared", 3}, {"own", 0}, {"busy", 1}} {
		createBucket(t, server.Client(), use.key, p)
		otherConsumers(t, server.Client(), use.key, use.others)
		_, err := c.Take(t.Context(), use.key, 20, slow())
		require.NoError(t, err)
		s := countsConsumers(t, c, use.key, int64(use.others)+1)
		if use.key != "busy" {
			unused(c, s)
		}
	}
	server.Pause()
	defer server.Resume()
	for key, want := range map[string]int64{"shared": 80 / 4, "own": 80 / 2, "busy": 80 / 2} {
		r, err := c.TakeUpTo(t.Context(), key, 100)
		require.NoError(t, err, key)
		require.Equal(t, SourceFallback, r.Source.Kind)
		require.Equal(t, want, r.Taken, key)
	}
}

// A share that is smaller than a take saves tokens until it can serve the take.
func TestALocalShareSavesForATakeThatIsLargerThanIt(t *testing.T) {
	server := testenv.Redis(t)
	p := policy.Policy{Capacity: 30, Rate: policy.PerSecond(100), Degraded: policy.DegradedLocal}
	createBucket(t, server.Client(), "b", p)
	c := newClient(t, server.Client(), WithTimeout(500*time.Millisecond))
	otherConsumers(t, server.Client(), "b", 9)
	_, err := c.Take(t.Context(), "b", 1, slow())
	require.NoError(t, err)
	countsConsumers(t, c, "b", 10)
	server.Pause()
	defer server.Resume()

	r, err := c.Take(t.Context(), "b", 20)
	require.NoError(t, err)
	require.False(t, r.OK, "the share holds a tenth of 30 tokens")
	require.Positive(t, r.RetryAfter)
	require.Less(t, r.RetryAfter, 2*time.Second, "the share saves 20 tokens at a tenth of 100/s")
	began := time.Now()
	eventually(t, func() bool {
		r, err = c.Take(t.Context(), "b", 20)
		require.NoError(t, err)
		return r.OK
	}, "the share has saved enough tokens")
	require.Greater(t, time.Since(began), time.Second)
	_, err = c.Take(t.Context(), "b", 31)
	require.ErrorIs(t, err, ErrExceedsCapacity)
}

// If a take is too large for the share, the share still begins with no more than its part. It saves no more tokens than
// the bucket can hold. When the bucket answers again, the share becomes as small as before.
func TestWhatALocalShareSavesIsBounded(t *testing.T) {
	s := &share{terms: localTerms(30, policy.PerSecond(100))}
	s.count(10, 0)
	s.record(30, 0)
	taking := s.take(5, 5, 0, time.Second)
	require.False(t, taking.OK, "a full bucket gets no more tokens in a second")
	require.EqualValues(t, 3, taking.Tokens)
	require.EqualValues(t, 200*time.Millisecond, micros(taking.Wait))
	require.True(t, s.take(5, 5, 0, 1200*time.Millisecond).OK)
	require.EqualValues(t, -1, s.take(31, 31, 0, 1200*time.Millisecond).Wait, "the take exceeds the bucket's capacity")
	require.EqualValues(t, 5, s.take(6, 6, 1, time.Hour).Tokens, "the share has saved for takes of 5")
	require.True(t, s.take(6, 6, 1, time.Hour+200*time.Millisecond).OK, "the share has 6 tokens and one to leave")
	s.record(30, 2*time.Hour)
	require.EqualValues(t, 3, s.take(30, 30, 0, 2*time.Hour).Tokens)
}
