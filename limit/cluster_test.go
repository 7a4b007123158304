package limit_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit/lazy"
)

// A master of a Cluster that is silent delays only the keys on that master. Package fetch has the same test for
// buckets.
func TestAFrozenMasterTakesNothingFromOtherKeysOfALimiter(t *testing.T) {
	t.Parallel()
	const keys, takes = 8, 50
	cluster := testenv.Cluster(t)
	l, err := lazy.New(cluster.Client(), burst)
	require.NoError(t, err)
	peek := func(key string) error {
		_, err := l.Peek(t.Context(), key, fetch.WithTimeout(2*time.Second)) // less than the client's timeout of a read
		return err
	}
	master := cluster.Nodes()[0]
	var silent, others []string
	for i := 0; len(silent) < keys || len(others) < keys; i++ {
		key := fmt.Sprint("user:", i)
		require.NoError(t, peek(key))
		if cluster.Owner(cluster.Slot(key)).Addr() == master.Addr() {
			silent = append(silent, key)
		} else {
			others = append(others, key)
		}
	}
	master.Pause()
	defer master.Resume()
	ended := make(chan struct{})
	var asking, answered sync.WaitGroup
	defer asking.Wait()
	for _, key := range silent[:keys] {
		asking.Go(func() {
			for {
				select {
				case <-ended:
					return
				default:
					_, _ = l.Peek(t.Context(), key, fetch.WithTimeout(20*time.Millisecond))
				}
			}
		})
	}
	for _, key := range others[:keys] {
		answered.Go(func() {
			for range takes {
				if !assert.NoError(t, peek(key)) {
					return
				}
			}
		})
	}
	answered.Wait()
	close(ended)
}
