package testenv

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

func TestThreeEtcdMembersSurviveTheLossOfOne(t *testing.T) {
	t.Parallel()
	c := Etcd(t, 3)
	require.Len(t, c.Endpoints(), 3)
	client := c.Client()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	_, err := client.Put(ctx, "k", "v")
	require.NoError(t, err)
	leader, ok := c.Leader(ctx)
	require.True(t, ok)

	leader.Kill()
	require.NoError(t, c.WaitReady(ctx))
	_, err = client.Put(ctx, "k", "without the leader")
	require.NoError(t, err)
	next, ok := c.Leader(ctx)
	require.True(t, ok)
	require.NotSame(t, leader, next)

	leader.Restart()
	require.NoError(t, c.WaitReady(ctx))
	got, err := c.Client(leader.Endpoint()).Get(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "without the leader", string(got.Kvs[0].Value))

	// While two of three members are frozen, there is no majority, and calls fail. They work again once one is resumed.
	frozen := []*EtcdMember{c.Members()[0], c.Members()[1]}
	frozen[0].Pause()
	frozen[1].Pause()
	last := c.Client(c.Members()[2].Endpoint())
	short, cancelShort := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancelShort()
	_, err = last.Put(short, "k", "x")
	require.Error(t, err)
	frozen[0].Resume()
	require.NoError(t, pollUntil(func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_, err := last.Put(ctx, "k", "y")
		return err
	}))
}

func TestSingleEtcdRestartsWithItsData(t *testing.T) {
	t.Parallel()
	c := Etcd(t, 1, WithPassword("secret"))
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	_, err := c.Client().Put(ctx, "k", "v")
	require.NoError(t, err)

	anonymous, err := clientv3.New(clientv3.Config{Endpoints: c.Endpoints(), Logger: zap.NewNop()})
	require.NoError(t, err)
	defer func() { _ = anonymous.Close() }()
	_, err = anonymous.Get(ctx, "k")
	require.ErrorContains(t, err, "user name is empty")

	m := c.Members()[0]
	m.Kill()
	m.Restart()
	require.NoError(t, c.WaitReady(ctx))
	got, err := c.Client().Get(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, "v", string(got.Kvs[0].Value))
}

func TestEtcdSpeaksTLSToKnownClientsOnly(t *testing.T) {
	t.Parallel()
	c := Etcd(t, 1, WithTLS(NewCerts(t)), WithArgs("--max-txn-ops", "200"))
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	_, err := c.Client().Put(ctx, "k", "v")
	require.NoError(t, err)

	stranger, err := clientv3.New(clientv3.Config{
		Endpoints: c.Endpoints(), Logger: zap.NewNop(), TLS: NewCerts(t).ClientConfig(),
	})
	require.NoError(t, err)
	defer func() { _ = stranger.Close() }()
	short, cancelShort := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancelShort()
	_, err = stranger.Get(short, "k")
	require.Error(t, err)
}

func TestEtcdRefusesOtherSizesAndOptionsOfRedis(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*recorder){
		"1 or 3":         func(r *recorder) { Etcd(r, 2) },
		"WithAppendOnly": func(r *recorder) { Etcd(r, 1, WithAppendOnly()) },
	} {
		r := newRecorder(t, "refused")
		require.Contains(t, r.run(func() { start(r) }), name)
		require.True(t, r.Failed())
	}
}
