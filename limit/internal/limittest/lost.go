package limittest

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// ChargedOnce uses a client that retries as go-redis does by default. It breaks the connection after a charge has run
// and before its reply. It requires that the caller gets fetch.ErrUnavailable, and that left is lower by exactly one
// charge. It also requires that a charge that can't be sent charges nothing.
func ChargedOnce(t *testing.T, limiter func(redis.UniversalClient) (charge func(context.Context) error,
	left func(context.Context) int64)) {
	t.Helper()
	ctx, server := t.Context(), testenv.Redis(t)
	proxy := testenv.Proxy(t, server.Addr(), 0)
	retrying := redis.NewClient(&redis.Options{Addr: proxy.Addr(), MinRetryBackoff: time.Microsecond,
		MaxRetryBackoff: time.Millisecond})
	t.Cleanup(func() { _ = retrying.Close() })
	require.Equal(t, 3, retrying.Options().MaxRetries, "the default")
	charge, _ := limiter(retrying)
	_, left := limiter(server.Client())

	require.NoError(t, charge(ctx))
	before := left(ctx)
	require.NoError(t, proxy.CutAfterReply(1<<30,
		func(request []byte) bool { return bytes.Contains(request, []byte("evalsha")) }))
	require.ErrorIs(t, charge(ctx), fetch.ErrUnavailable)
	require.Equal(t, 1, proxy.LostReplies(), "sent once")
	require.Equal(t, before-1, left(ctx), "charged once")

	proxy.Cut()
	require.ErrorIs(t, charge(ctx), fetch.ErrUnavailable)
	require.Equal(t, before-1, left(ctx))
	require.NoError(t, proxy.Heal())
	require.NoError(t, charge(ctx), "the limiter recovers")
	require.Equal(t, before-2, left(ctx))
}
