package etcdconn_test

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

const patience = 30 * time.Second

// A change is reported once, both if the watch receives it and if etcd is unavailable when the value changes.
func TestAChangeOfTheValueIsReported(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	client := etcd.Client()
	put := func(value string) {
		t.Helper()
		_, err := client.Put(t.Context(), "/refiller/config", value)
		require.NoError(t, err)
	}
	key := etcdconn.NewKey(etcd.Client(), "/refiller/config", hclog.NewNullLogger())
	require.NoError(t, key.Read(t.Context()))
	require.Nil(t, key.Value(), "the key does not exist yet")
	put("one")
	require.NoError(t, key.Read(t.Context()))
	require.Equal(t, "one", string(key.Value()))

	put("two") // between the reading and the watch
	ctx, cancel := context.WithCancel(t.Context())
	reported := make(chan string, 10)
	var running sync.WaitGroup
	running.Go(func() { key.Run(ctx, func() { reported <- string(key.Value()) }) })
	defer running.Wait()
	defer cancel()
	next := func(want string) {
		t.Helper()
		select {
		case got := <-reported:
			require.Equal(t, want, got)
		case <-time.After(patience):
			require.Fail(t, "no change is reported", want)
		}
	}
	next("two")
	put("two") // the same value again is no change
	put("three")
	next("three")
	_, err := client.Delete(t.Context(), "/refiller/config")
	require.NoError(t, err)
	put("four")
	next("four")

	member := etcd.Members()[0]
	member.Kill()
	require.Equal(t, "four", string(key.Value()), "the last value stays")
	member.Restart()
	require.NoError(t, etcd.WaitReady(t.Context()))
	put("five")
	next("five")

	// After etcd has lost its data, its revisions begin below the revision of the watch.
	member.Kill()
	require.NoError(t, os.RemoveAll(filepath.Join(member.Dir(), "data")))
	member.Restart()
	require.NoError(t, etcd.WaitReady(t.Context()))
	require.Equal(t, "five", string(key.Value()), "the last value stays")
	put("six")
	next("six")
	put("seven")
	next("seven")
	require.Empty(t, reported)
}
