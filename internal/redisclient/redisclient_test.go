package redisclient_test

import (
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/redisclient"
)

func TestIsNilKnowsNilPointers(t *testing.T) {
	for _, rdb := range []redis.UniversalClient{
		nil, (*redis.Client)(nil), (*redis.ClusterClient)(nil), (*redis.Ring)(nil),
	} {
		require.True(t, redisclient.IsNil(rdb), "%T", rdb)
	}
	rdb := redis.NewClient(&redis.Options{})
	defer func() { require.NoError(t, rdb.Close()) }()
	require.False(t, redisclient.IsNil(rdb))
	require.False(t, redisclient.IsNil(struct{ *redis.Client }{rdb}))
}
