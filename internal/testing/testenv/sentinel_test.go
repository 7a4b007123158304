package testenv

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSentinelPromotesTheReplicaOfAKilledMaster(t *testing.T) {
	t.Parallel()
	s := Sentinel(t, WithPassword("secret"))
	client := s.Client()
	require.NoError(t, client.Set(t.Context(), "k", "v", 0).Err())
	acked, err := client.Wait(t.Context(), 1, 10*time.Second).Result()
	require.NoError(t, err)
	require.EqualValues(t, 1, acked)

	replica := s.Replica()
	require.NotSame(t, replica, s.Master())
	require.ErrorContains(t, replica.Client().Set(t.Context(), "k", "x", 0).Err(), "READONLY")
	killed := s.KillMaster()
	require.False(t, killed.Running())

	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	require.NoError(t, s.WaitMaster(ctx, replica))
	require.Same(t, replica, s.Master())
	require.Same(t, killed, s.Replica())
	require.Eventually(t, func() bool { return client.Set(ctx, "k", "after", 0).Err() == nil }, 30*time.Second,
		20*time.Millisecond)
	require.Equal(t, "after", replica.Client().Get(ctx, "k").Val())

	killed.Restart()
	back := killed.Client()
	require.NoError(t, pollUntil(func(ctx context.Context) error {
		role, err := killed.info(ctx, back, "replication", "role")
		if err == nil && role != "slave" {
			err = fmt.Errorf("role is %s", role)
		}
		return err
	}))
}
