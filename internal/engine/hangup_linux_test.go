package engine

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// A server closes connections that are idle for too long.
func TestACallOnAConnectionThatTheServerClosedOpensAnother(t *testing.T) {
	for name, opts := range map[string][]testenv.Option{
		"plain": nil, "TLS": {testenv.WithTLS(testenv.NewCerts(t))},
	} {
		t.Run(name, func(t *testing.T) {
			server := testenv.Redis(t, opts...)
			s, o := &Sockets{}, server.ClientOptions()
			o.Dialer = s.Dialer(redis.NewDialer(o))
			o.MaxRetries = -1
			rdb := redis.NewClient(o)
			defer func() { require.NoError(t, rdb.Close()) }()
			for range 3 {
				id, err := rdb.ClientID(t.Context()).Result()
				require.NoError(t, err)
				require.True(t, s.Alive())
				require.NoError(t, rdb.Ping(t.Context()).Err())
				require.NoError(t, server.Client().Do(t.Context(), "client", "kill", "id", id).Err())
				require.Eventually(t, func() bool { return !s.Alive() }, 10*time.Second, ms)
			}
		})
	}
}
