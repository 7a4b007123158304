package engine

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

type recorder chan string

func (r recorder) Printf(_ context.Context, format string, args ...any) {
	select {
	case r <- fmt.Sprintf(format, args...):
	default:
	}
}

// If a connection can't be made, go-redis writes nothing to stderr and continues to dial.
func TestAConnectionThatCanNotBeMadeIsTheErrorOfItsCall(t *testing.T) {
	logged := make(recorder, 1)
	redis.SetLogger(logged) // for all of this package
	dialed := 0
	s := &Sockets{}
	refuse := func(context.Context, string, string) (net.Conn, error) {
		dialed++
		return nil, &net.OpError{Op: "dial", Err: os.ErrPermission}
	}
	rdb := redis.NewClient(&redis.Options{
		Dialer: s.Dialer(refuse), DialerRetries: 1, MaxRetries: -1, PoolSize: 2, PipelinePoolSize: -1,
	})
	for range 20 {
		var failed *net.OpError
		require.ErrorAs(t, rdb.Ping(t.Context()).Err(), &failed)
		require.Equal(t, "dial", failed.Op)
		_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error { return p.Ping(t.Context()).Err() })
		require.ErrorIs(t, err, os.ErrPermission)
	}
	require.Equal(t, 40, dialed)
	require.NoError(t, rdb.Close())
	require.Empty(t, s.conns)
	require.Empty(t, logged)
}

// opaqueConn hides the connection below it, as TLS does.
type opaqueConn struct{ net.Conn }

func TestRetiredConnectionsAnswerAndAreNotUsedAgain(t *testing.T) {
	server := testenv.Redis(t)
	for name, wrap := range map[string]func(net.Conn) net.Conn{
		"plain": func(c net.Conn) net.Conn { return c }, "opaque": func(c net.Conn) net.Conn { return opaqueConn{c} },
	} {
		for end, retire := range map[string]func(*Sockets){"distrust": (*Sockets).Distrust, "drop": (*Sockets).Drop} {
			t.Run(name+"/"+end, func(t *testing.T) {
				var dialed atomic.Int64
				s, o := &Sockets{}, server.ClientOptions()
				o.Dialer = s.Dialer(func(ctx context.Context, network, addr string) (net.Conn, error) {
					dialed.Add(1)
					conn, err := new(net.Dialer).DialContext(ctx, network, addr)
					return wrap(conn), err
				})
				rdb := redis.NewClient(o)
				defer func() { require.NoError(t, rdb.Close()) }()
				for i := range 3 {
					for range 3 {
						require.NoError(t, rdb.Ping(t.Context()).Err())
						require.EqualValues(t, i+1, dialed.Load())
					}
					retire(s)
				}
			})
		}
	}
	s, o := &Sockets{}, server.ClientOptions()
	o.Dialer = s.Dialer(new(net.Dialer).DialContext)
	rdb := redis.NewClient(o)
	defer func() { _ = rdb.Close() }()
	popped := make(chan error, 1)
	go func() { popped <- rdb.BLPop(t.Context(), 0, "list").Err() }()
	blocked := func() bool {
		return server.Client().InfoMap(t.Context(), "clients").Item("Clients", "blocked_clients") == "1"
	}
	require.Eventually(t, blocked, 10*time.Second, ms)
	s.Distrust()
	require.NoError(t, rdb.RPush(t.Context(), "list", "a").Err())
	require.NoError(t, <-popped, "a call under way gets its answer")
}

func TestAReadWithoutADeadlineEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		defer func() { _ = theirs.Close() }()
		conn, err := new(Sockets).Dialer(func(context.Context, string, string) (net.Conn, error) { return ours, nil })(
			t.Context(), "", "")
		require.NoError(t, err)
		require.NoError(t, conn.SetReadDeadline(time.Time{}))
		began := time.Now()
		_, err = conn.Read(make([]byte, 1))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.Equal(t, probeTime+graceRead, time.Since(began))
	})
}
