package testenv

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestAReplicaOfAClusterTakesOver(t *testing.T) {
	t.Parallel()
	c := Cluster(t, WithPassword("secret"))
	replicas := c.Replicate()
	require.Len(t, replicas, 3)
	c.Nodes()[1].Kill()
	promoted := replicas[1].Client()
	require.Eventually(t, func() bool {
		return strings.Contains(promoted.Info(t.Context(), "replication").Val(), "role:master")
	}, readyTimeout, time.Millisecond)
}

// A master that has just started doesn't accept keys for a while. A move of a slot to it waits, and loses no keys.
func TestAMoveWaitsForItsTarget(t *testing.T) {
	t.Parallel()
	const key = "{key0}"
	c := Cluster(t)
	client := c.Client()
	require.NoError(t, client.Set(t.Context(), key, "v", 0).Err())
	slot := c.Slot(key)
	to := c.Nodes()[0]
	if to == c.Owner(slot) {
		to = c.Nodes()[1]
	}
	to.Kill()
	to.Restart()
	require.NoError(t, c.MoveSlot(slot, to))
	require.Same(t, to, c.Owner(slot))
	require.Equal(t, "v", client.Get(t.Context(), key).Val())
}

func TestClusterServesKeysOfAllMasters(t *testing.T) {
	t.Parallel()
	c := Cluster(t, WithPassword("secret"))
	client := c.Client()
	require.Len(t, c.Nodes(), 3)
	owners := make(map[*RedisServer]bool)
	for i := range 30 {
		key := fmt.Sprintf("key%d", i)
		require.NoError(t, client.Set(t.Context(), key, i, 0).Err())
		owner := c.Owner(c.Slot(key))
		owners[owner] = true
		require.Equal(t, fmt.Sprint(i), owner.Client().Get(t.Context(), key).Val())
	}
	require.Len(t, owners, 3)

	t.Run("a slot that moves answers ask and then moved", func(t *testing.T) {
		const key, absent = "{key0}", "{key0}:absent"
		slot := c.Slot(key)
		from := c.Owner(slot)
		to := c.Nodes()[0]
		if to == from {
			to = c.Nodes()[1]
		}
		require.NoError(t, client.Set(t.Context(), key, "v", 0).Err())
		old := from.Client()

		m, err := c.StartMove(slot, to)
		require.NoError(t, err)
		require.Equal(t, "v", old.Get(t.Context(), key).Val(), "a key that has not moved is served by the former owner")
		require.ErrorContains(t, old.Get(t.Context(), absent).Err(), "ASK")
		require.NoError(t, m.MoveKeys(key))
		require.ErrorContains(t, old.Get(t.Context(), key).Err(), "ASK")
		require.Equal(t, "v", client.Get(t.Context(), key).Val(), "the cluster client follows ASK")
		require.NoError(t, m.MoveKeys())
		require.NoError(t, m.Finish())
		require.ErrorContains(t, old.Get(t.Context(), key).Err(), "MOVED")
		require.Equal(t, "v", client.Get(t.Context(), key).Val(), "the cluster client follows MOVED")
		require.Same(t, to, c.Owner(slot))

		require.NoError(t, c.MoveSlot(slot, from))
		require.Equal(t, "v", old.Get(t.Context(), key).Val())
		require.Equal(t, "0", old.Get(t.Context(), "key0").Val(), "all keys of the slot move")
		require.ErrorContains(t, c.MoveSlot(slot, from), "another node")
		require.ErrorContains(t, c.MoveSlot(16384, to), "0..16383")
	})

	t.Run("other masters serve their slots while a master is down", func(t *testing.T) {
		var keys []string // one key of each master
		for _, n := range c.Nodes() {
			for i := 0; len(keys) < 3; i++ {
				if key := fmt.Sprintf("key%d", i); c.Owner(c.Slot(key)) == n {
					keys = append(keys, key)
					break
				}
			}
		}
		c.Nodes()[0].Kill()
		require.Error(t, client.Get(t.Context(), keys[0]).Err())
		require.NoError(t, c.Nodes()[1].Client().Get(t.Context(), keys[1]).Err())
		require.NoError(t, c.Nodes()[2].Client().Get(t.Context(), keys[2]).Err())

		c.Nodes()[0].Restart()
		require.Eventually(t, func() bool {
			return errors.Is(client.Get(t.Context(), keys[0]).Err(), redis.Nil) // the master serves, but lost its data
		}, 20*time.Second, 20*time.Millisecond)
	})
}
