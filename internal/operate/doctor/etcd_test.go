package doctor

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestAnEtcdThatKeepsEverythingIsAWarning(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	client := etcd.Client()
	require.Equal(t, Unknown, EtcdCompaction(t.Context(), client, "/refiller").Level)
	var writers errgroup.Group
	for range 50 {
		writers.Go(func() error {
			for range manyWrites / 50 {
				if _, err := client.Put(t.Context(), "/refiller/x", "1"); err != nil {
					return err
				}
			}
			return nil
		})
	}
	require.NoError(t, writers.Wait())
	f := EtcdCompaction(t.Context(), client, "/refiller")
	require.Equal(t, Warning, f.Level)
	require.Contains(t, f.Advice, "--auto-compaction-mode=periodic")
	now, err := client.Get(t.Context(), "x")
	require.NoError(t, err)
	_, err = client.Compact(t.Context(), now.Header.Revision)
	require.NoError(t, err)
	require.Equal(t, OK, EtcdCompaction(t.Context(), client, "/refiller").Level)

	f = EtcdSpace(t.Context(), client, etcd.Endpoints()[0])
	require.Equal(t, OK, f.Level, f.Detail)
	etcd.Members()[0].Kill()
	require.Equal(t, Unknown, EtcdSpace(t.Context(), client, etcd.Endpoints()[0]).Level)
}

func TestAnEndpointThatDoesNotAnswerIsNamed(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	gone := fmt.Sprintf("127.0.0.1:%d", testenv.Ports(t, 1)[0])
	all := []string{gone, etcd.Endpoints()[0]}
	f, alive := EtcdEndpoints(t.Context(), etcd.Client(), all)
	require.Equal(t, Warning, f.Level)
	require.Equal(t, "1 of 2 answer; no reply from "+gone, f.Detail)
	require.Equal(t, all[1], alive)
	f, _ = EtcdEndpoints(t.Context(), etcd.Client(), all[1:])
	require.Equal(t, OK, f.Level, f.Detail)
}

func TestAnEtcdWithoutSpaceIsAFailure(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1, testenv.WithArgs("--quota-backend-bytes", "131072"))
	client := etcd.Client()
	var err error
	for range 1000 {
		_, err = client.Put(t.Context(), "/refiller/x", string(make([]byte, 4096)))
		if err != nil {
			break
		}
	}
	require.Error(t, err)
	f := EtcdSpace(t.Context(), client, etcd.Endpoints()[0])
	require.Equal(t, Failure, f.Level)
	require.Contains(t, f.Detail, "NOSPACE")
}
