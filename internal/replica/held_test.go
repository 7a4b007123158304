package replica_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// A consumer with a block has died. The status shows the block. In a strict bucket it has its room until its lease
// ends, and then it is dropped.
func TestTheBlockOfADeadConsumerIsDroppedWhenItsTimeIsOver(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb, url := server.Client(), "redis://"+server.Addr()
	r := running(t, parse(t, url, 1, "  - {key: checkout, capacity: 100, rate: 400/s, strict: true}\n"), replica.Options{})
	eventually(t, "the bucket exists", func() bool { return rdb.Exists(t.Context(), "{checkout}:ctl").Val() == 1 })
	reply, err := lua.Lease(t.Context(), rdb, "checkout",
		lua.LeaseCall{ID: "dead", Seq: 1, Want: 40, TTL: 5 * time.Second})
	require.NoError(t, err)
	require.EqualValues(t, 40, reply.Granted)

	shown := func() int64 {
		list := r.Status(t.Context(), admin.Query{Limit: 1}).Buckets
		require.Len(t, list, 1)
		return list[0].Outstanding
	}
	eventually(t, "the status shows the held tokens", func() bool { return shown() == 40 })
	eventually(t, "the metric shows the held tokens", func() bool {
		return strings.Contains(metrics(t, r), `refiller_bucket_outstanding_tokens{bucket="checkout",region=""} 40`)
	})
	eventually(t, "the bucket is full again", func() bool {
		p, err := lua.Peek(t.Context(), rdb, "checkout", 1)
		require.NoError(t, err)
		require.LessOrEqual(t, p.Tokens+p.Outstanding, int64(100), "refills leave room for held tokens")
		return p.Tokens == 100
	})
	eventually(t, "no tokens are held", func() bool { return shown() == 0 })
	require.Zero(t, rdb.Exists(t.Context(), lua.OutstandingKey("checkout"), lua.DueKey("checkout")).Val())
}
