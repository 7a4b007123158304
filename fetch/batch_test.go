package fetch

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/policy"
)

// Some takes of a bucket can't share an entry of a script call. They are answered in the order of their arrival,
// however many other buckets are in the batch, and whether or not the first takes fit.
func TestTakesOfABatchAreAnsweredInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		buckets := map[string]policy.Policy{}
		for i := range mostBuckets + 2 {
			buckets[fmt.Sprint("user:", i)] = hourly(5)
		}
		f := newFake(buckets)
		c := newClient(t, f)
		c.nodes.bySlot = false
		s := c.nodes.single
		var batch []*engine.Request[ask]
		add := func(key string, a ask) *ask {
			r := s.queue.Request()
			r.Body = a
			r.Body.key = key
			r.Body.kind = configured{}
			r.Body.bucket = unseenBucket
			r.Body.info = unseen
			batch = append(batch, r)
			return &r.Body
		}
		take := func(key string, n int64) *ask { return add(key, ask{run: policy.Run{N: n, Count: 1}}) }
		line := func(key string, n int64) *ask { return add(key, ask{line: []policy.Run{{N: n, Count: 1}}}) }
		take("user:0", 1)
		line("user:0", 1) // the second call begins
		for i := range mostBuckets - 1 {
			take(fmt.Sprint("user:", i+1), 1) // the first one is full
		}
		key := fmt.Sprint("user:", mostBuckets)
		first := take(key, 5)
		second := take(key, 1)
		third := line(key, 2)
		other := fmt.Sprint("user:", mostBuckets+1)
		fits, behind := take(other, 4), line(other, 2)
		_, err := c.sender(s, f)(context.Background(), batch)
		require.NoError(t, err)
		require.True(t, first.reply.OK)
		require.False(t, second.reply.OK)
		require.False(t, third.reply.OK)
		require.True(t, fits.reply.OK)
		require.False(t, behind.reply.OK)
	})
}
