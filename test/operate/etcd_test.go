package operate

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestAnEtcdWithoutSpaceStopsNoRefillAndIsUsedAgain(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	etcd := testenv.Etcd(t, 1, testenv.WithArgs("--quota-backend-bytes", "262144"))
	client := etcd.Client()
	text := fmt.Sprintf("election: {mode: etcd, endpoints: [%q], ttl: 2s}\n", etcd.Endpoints()[0]) +
		counted(fmt.Sprintf("url: %q", server.URL()))
	leader := startNode(t, "leader", text)
	eventually(t, func() bool { return leader.status().Leading }, patience, 10*time.Millisecond, "the first replica leads")
	standby := startNode(t, "standby", text)
	standby.ready()
	awaitRefill(t, rdb, "the first refill")
	load := consume(t, rdb, "checkout")

	var full error
	for i := 0; full == nil; i++ {
		require.Less(t, i, 10_000)
		_, full = client.Put(t.Context(), "/others", string(make([]byte, 4096)))
	}
	require.ErrorContains(t, full, "space exceeded")

	// etcd renews a lease even without space, so the leader doesn't change.
	tokens, last := load.account(t, rdb, "checkout")
	epoch := leader.status().Epoch
	rest(t, 5*time.Second)
	require.True(t, leader.status().Leading)
	require.Equal(t, epoch, leader.status().Epoch)
	tokensThen, lastThen := load.account(t, rdb, "checkout")
	requireNothingLost(t, tokens, last, tokensThen, lastThen)

	// A candidate that has its record already is elected next. A candidate that starts later can't write a record.
	late := startNode(t, "late", text)
	late.ready()
	leader.Kill()
	eventually(t, func() bool { return standby.status().Leading }, patience, 10*time.Millisecond, "the standby is elected")
	standby.Kill()
	eventually(t, func() bool { return late.status().Racing }, patience, 10*time.Millisecond, "the late replica races")
	eventually(t, func() bool { return late.status().Leader == nil }, patience, 10*time.Millisecond, "the lease has ended")
	awaitRefill(t, rdb, "a refill by the late replica")
	require.NotEmpty(t, late.status().Election)
	late.logs("space exceeded")
	tokensThen, lastThen = load.account(t, rdb, "checkout")
	requireNothingLost(t, tokens, last, tokensThen, lastThen)

	// This is how etcd's documentation frees space.
	at, err := client.Get(t.Context(), "/others")
	require.NoError(t, err)
	_, err = client.Compact(t.Context(), at.Header.Revision)
	require.NoError(t, err)
	_, err = client.Defragment(t.Context(), etcd.Endpoints()[0])
	require.NoError(t, err)
	_, err = client.AlarmDisarm(t.Context(), &clientv3.AlarmMember{})
	require.NoError(t, err)
	eventually(t, func() bool { return late.status().Leading }, patience, 10*time.Millisecond, "the late replica leads")
	tokensThen, lastThen = load.account(t, rdb, "checkout")
	requireNothingLost(t, tokens, last, tokensThen, lastThen)
}

// While etcd doesn't answer, status reports that, and still shows the state of the buckets.
func TestStatusShowsBucketsWhileEtcdIsSilent(t *testing.T) {
	t.Parallel()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	n := startNode(t, "a", fmt.Sprintf("region: eu\nelection: {mode: etcd, endpoints: [%q], ttl: 2s}\n"+
		"pools: [{name: payments, rate: 100/s, capacity: 300, regions: {eu: {}}}]\n", etcd.Endpoints()[0])+
		limit(server.URL(), 1, "100/s"))
	eventually(t, func() bool {
		s := n.status()
		return s.Leading && s.Pools.Coordinator != nil
	}, patience,
		10*time.Millisecond)
	awaitRefill(t, server.Client(), "the first refill")
	etcd.Members()[0].Pause()
	defer etcd.Members()[0].Resume()
	eventually(t, func() bool {
		s := n.status()
		return s.Unknown && s.Pools.Coordinator == nil
	}, patience,
		10*time.Millisecond)
	for range 3 {
		rest(t, 1200*time.Millisecond) // longer than a second, for which status repeats an answer of etcd
		require.Empty(t, n.status().Buckets[0].Error)
	}
}
