package envoy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
)

func TestExhaustedWindowsAreDeniedFromMemoryForAWhile(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	e := newExhausted(2, func() time.Time { return now })
	id := windowID{quota{units["hour"], 5}, "k"}
	none := fetch.Result{Limit: 5, RetryAfter: time.Minute, ResetAfter: time.Minute}
	known := func(id windowID) bool {
		_, ok := e.denial(id)
		return ok
	}
	e.remember(id, fetch.Result{Limit: 5, Remaining: 1, ResetAfter: time.Minute})
	require.False(t, known(id), "a smaller take may be admitted")
	e.remember(id, fetch.Result{OK: true, Limit: 5, ResetAfter: time.Minute})
	require.False(t, known(id))

	e.remember(id, none)
	now = now.Add(900 * time.Millisecond)
	r, ok := e.denial(id)
	require.True(t, ok)
	require.Equal(t, fetch.Result{
		Limit: 5, RetryAfter: time.Minute - 900*time.Millisecond, ResetAfter: time.Minute - 900*time.Millisecond,
		Source: fetch.Source{Kind: fetch.SourceCached},
	}, r)
	require.False(t, known(windowID{quota{units["hour"], 6}, "k"}), "another limit has its own window")
	now = now.Add(100 * time.Millisecond)
	require.False(t, known(id), "Redis is asked once a second")

	e.remember(id, fetch.Result{Limit: 5, ResetAfter: 10 * time.Millisecond})
	now = now.Add(10 * time.Millisecond)
	require.False(t, known(id), "the window has ended")
	e.remember(id, none)
	e.forget(id)
	require.False(t, known(id), "tokens were returned")

	for _, key := range []string{"a", "b", "c"} {
		e.remember(windowID{key: key}, none)
	}
	require.False(t, known(windowID{key: "c"}), "the memory has room for two windows")
	now = now.Add(time.Second)
	e.remember(windowID{key: "c"}, none)
	require.True(t, known(windowID{key: "c"}))
	off := newExhausted(0, time.Now)
	off.remember(id, none)
	_, ok = off.denial(id)
	require.False(t, ok)
}

func TestWindowOptionsHaveBounds(t *testing.T) {
	t.Parallel()
	require.NoError(t, DefaultWindowOptions().Validate())
	require.ErrorContains(t, WindowOptions{Prefix: "a}"}.Validate(), "want up to 64 bytes without braces")
	require.ErrorContains(t, WindowOptions{Remembered: -1}.Validate(), "want 0 to 1048576")
}
