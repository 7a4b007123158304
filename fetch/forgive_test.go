package fetch

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// lateReply is a hook of a Redis client that holds one reply back.
type lateReply struct {
	next    atomic.Bool   // the next reply is held
	held    chan struct{} // closed when it has arrived
	release chan struct{} // closed to let it through
}

func newLateReply() *lateReply {
	return &lateReply{held: make(chan struct{}), release: make(chan struct{})}
}

func (l *lateReply) hold() {
	if l.next.CompareAndSwap(true, false) {
		close(l.held)
		<-l.release
	}
}

// DialHook implements redis.Hook.
func (l *lateReply) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (l *lateReply) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		l.hold()
		return err
	}
}

// ProcessPipelineHook implements redis.Hook.
func (l *lateReply) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		l.hold()
		return err
	}
}

// lateClient makes a Client and an empty bucket. The lateReply can hold back replies to the Client.
func lateClient(t *testing.T) (*Client, *lateReply) {
	t.Helper()
	rdb, late := testenv.Redis(t).Client(), newLateReply()
	require.NoError(t, lua.Load(t.Context(), rdb))
	p := hourly(5)
	p.Initial = new(int64)
	createBucket(t, rdb, "b", p)
	rdb.AddHook(late)
	return newClient(t, wrapped{rdb}, slow(), WithPublishedTemplates(false)), late
}

// The bucket denies a take. Then tokens are returned to the bucket. The reply with the denial arrives last.
func TestADenialFromBeforeAReturnIsForgotten(t *testing.T) {
	for name, take := range map[string]func(*Client) (bool, error){
		"take": func(c *Client) (bool, error) {
			r, err := c.Take(t.Context(), "b", 1)
			return r.OK, err
		},
		"take with a request id": func(c *Client) (bool, error) {
			r, err := c.Take(t.Context(), "b", 1, WithRequestID("r"))
			return r.OK, err
		},
		"several": func(c *Client) (bool, error) {
			all, err := c.TakeAll(t.Context(), []Request{{Key: "b", N: 1}})
			return all.OK, err
		},
		"reservation": func(c *Client) (bool, error) {
			r, err := c.Reserve(t.Context(), "b", 1, time.Minute)
			return r.OK, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, late := lateClient(t)
			late.next.Store(true)
			denied := make(chan bool, 1)
			go func() {
				ok, err := take(c)
				if err != nil {
					t.Error(err)
				}
				denied <- !ok
			}()
			<-late.held
			require.NoError(t, c.Return(t.Context(), "b", 2))
			close(late.release)
			require.True(t, <-denied)
			r, err := c.Take(t.Context(), "b", 1)
			require.NoError(t, err)
			require.True(t, r.OK, "the bucket has two tokens")

			// A later denial is remembered.
			for _, source := range []SourceKind{SourceShared, SourceCached} {
				r, err = c.Take(t.Context(), "b", 2)
				require.NoError(t, err)
				require.False(t, r.OK)
				require.Equal(t, source, r.Source.Kind)
			}
		})
	}
}

// A waiter is not refused because of a denial that its line got before a return.
func TestALineForgetsADenialFromBeforeAReturn(t *testing.T) {
	c, late := lateClient(t)
	late.next.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // the next token is due in an hour
	defer cancel()
	waited := make(chan error, 1)
	go func() { waited <- errOf(c.Wait(ctx, "b", 2)) }()
	<-late.held
	require.NoError(t, c.Return(t.Context(), "b", 2))
	close(late.release)
	require.NoError(t, <-waited)
}
