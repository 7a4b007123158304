package pool

import (
	"context"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// A replica whose user may not write shares does not become a candidate for coordinator before its user may.
func TestAReplicaWithoutRightsIsNoCandidate(t *testing.T) {
	t.Parallel()
	ctx, etcd := t.Context(), testenv.Etcd(t, 1)
	admin := etcd.Client()
	grant := func(key string, may clientv3.PermissionType) {
		_, err := admin.RoleGrantPermission(ctx, "eu", key, clientv3.GetPrefixRangeEnd(key), may)
		require.NoError(t, err)
	}
	for _, name := range []string{"root", "eu"} {
		_, err := admin.RoleAdd(ctx, name)
		require.NoError(t, err)
		_, err = admin.UserAdd(ctx, name, "secret")
		require.NoError(t, err)
		_, err = admin.UserGrantRole(ctx, name, name)
		require.NoError(t, err)
	}
	grant(testPrefix+"/", clientv3.PermissionType(clientv3.PermRead))
	_, err := admin.AuthEnable(ctx)
	require.NoError(t, err)
	as := func(user string) *clientv3.Client {
		client, err := clientv3.New(clientv3.Config{Endpoints: etcd.Endpoints(), Username: user, Password: "secret"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = client.Close() })
		return client
	}
	admin = as("root")
	timing := Timing{Report: 100 * time.Millisecond, Lease: 400 * time.Millisecond}
	c := newCoordinator(newEtcdRegistry(as("eu"), testPrefix), timing, hclog.NewNullLogger())
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	c.AwaitRights(short)
	require.Error(t, short.Err(), "AwaitRights waits for the rights")
	grant(testPrefix+"/", clientv3.PermissionType(clientv3.PermReadWrite))
	long, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	c.AwaitRights(long)
	require.NoError(t, long.Err())
	entries, _, err := c.registry.load(ctx)
	require.NoError(t, err)
	require.Empty(t, entries, "checking the rights writes nothing")
}
