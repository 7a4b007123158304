package sidecar

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/fair"
	"github.com/tokenrefill/refiller/lua"
)

// waitingBench starts a bench with an empty bucket "mail". Over each protocol, one call waits for a token of the
// bucket. The wait lasts at least as long as due.
func waitingBench(t *testing.T, drain Drain, due time.Duration) (b *bench, overHTTP <-chan reply,
	overGRPC <-chan error) {
	t.Helper()
	b = start(t, func(o *Options, _ *bench) { o.Drain = drain })
	b.empty("mail", due)
	b.bucket("checkout", 3)
	replies, errs := make(chan reply, 1), make(chan error, 1)
	conn := b.dial()
	go func() {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, b.url("/v1/wait"), jsonBody(`{"key":"mail"}`))
		if err != nil {
			t.Error(err)
			return
		}
		req.Header.Set("Content-Type", "application/json")
		res, err := new(http.Client).Do(req)
		if err != nil {
			replies <- reply{}
			return
		}
		defer res.Body.Close()
		replies <- reply{status: res.StatusCode}
	}()
	go func() {
		r, err := refillerv1.NewBucketsClient(conn).Wait(t.Context(), &refillerv1.WaitRequest{Key: "mail"})
		if err == nil && !r.GetOk() {
			t.Errorf("the take was denied: %v", r)
		}
		errs <- err
	}()
	b.underWay(2)
	return b, replies, errs
}

func TestDrainTurnsHealthThenFinishesWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	b, overHTTP, overGRPC := waitingBench(t, Drain{Delay: time.Hour, Timeout: patience}, 25*time.Second)
	delay, over := make(chan time.Duration, 1), make(chan struct{})
	b.server.sleep = func(d time.Duration) {
		delay <- d
		<-over
	}
	health := healthpb.NewHealthClient(b.dial())
	watch, err := health.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	require.NoError(t, err)
	first, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_SERVING, first.GetStatus())
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/readyz", "").status)

	ended := make(chan error, 1)
	go func() { ended <- b.stop() }()
	second, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, healthpb.HealthCheckResponse_NOT_SERVING, second.GetStatus())
	_, err = watch.Recv()
	require.Error(t, err, "a watch doesn't delay the end")

	// Load balancers have not noticed the drain yet, so calls are still served.
	require.Equal(t, time.Hour, <-delay)
	r := b.do(http.MethodGet, "/readyz", "")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "shutting_down", r.json(t)["code"])
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/livez", "").status)
	require.Equal(t, http.StatusOK, b.post("/v1/take", `{"key":"checkout"}`).status)

	// After the delay no new client is accepted, but waits under way continue.
	close(over)
	eventually(t, func() bool {
		_, err := http.Get(b.url("/livez")) //nolint:bodyclose // there is none once it fails
		return err != nil
	}, "new connections are refused")
	select {
	case err := <-ended:
		t.Fatalf("Run returned with calls under way: %v", err)
	default:
	}
	_, err = lua.Grant(t.Context(), b.rdb, "mail", 2)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, (<-overHTTP).status)
	require.NoError(t, <-overGRPC)
	require.NoError(t, <-ended)
	require.EqualValues(t, 0, b.tokens("mail"))
}

// While the server drains, it asks clients to close the connections that they keep. So no client sends a request on a
// connection that is being closed.
func TestDrainFailsNoClientThatKeepsItsConnections(t *testing.T) {
	t.Parallel()
	const clients = 50
	b := start(t, func(o *Options, _ *bench) { o.Drain = Drain{Delay: time.Hour, Timeout: patience} })
	b.bucket("checkout", 1_000_000)
	draining, over := make(chan struct{}), make(chan struct{})
	b.server.sleep = func(time.Duration) {
		close(draining)
		<-over
	}
	var gone atomic.Int64 // clients that a load balancer would have sent elsewhere
	var calling, first sync.WaitGroup
	first.Add(clients)
	for range clients {
		calling.Go(func() {
			transport := &http.Transport{}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport}
			for i := 0; ; i++ {
				// The transport doesn't repeat a POST. It would repeat other requests, which could hide a failure.
				req, err := http.NewRequest(http.MethodPost, b.url("/v1/take"), jsonBody(`{"key":"checkout"}`))
				if err == nil {
					req.Header.Set("Content-Type", "application/json")
					var res *http.Response
					res, err = client.Do(req)
					if err == nil {
						_, _ = io.Copy(io.Discard, res.Body)
						_ = res.Body.Close()
						if res.Close {
							gone.Add(1)
							return
						}
					}
				}
				if err != nil {
					t.Error(err)
					return
				}
				if i == 0 {
					first.Done()
				}
			}
		})
	}
	first.Wait()
	ended := make(chan error, 1)
	go func() { ended <- b.stop() }()
	<-draining
	eventually(t, func() bool { return gone.Load() == clients || t.Failed() }, "all clients have closed their connections")
	close(over)
	calling.Wait()
	require.NoError(t, <-ended)
}

func TestDrainEndsWithinItsBound(t *testing.T) {
	t.Parallel()
	b, overHTTP, overGRPC := waitingBench(t, Drain{Timeout: 200 * time.Millisecond}, 30*time.Second)
	began := time.Now()
	require.NoError(t, b.stop())
	require.Less(t, time.Since(began), patience, "the waits would have taken half a minute")
	require.NotEqual(t, http.StatusOK, (<-overHTTP).status)
	require.Equal(t, codes.Unavailable, status.Code(<-overGRPC))
	b.underWay(0)
}

// A client that connects and sends nothing doesn't delay the end of a drain.
func TestDrainDoesNotWaitForASilentConnection(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) {
		o.Limits.Patience, o.Drain = time.Hour, Drain{Timeout: 200 * time.Millisecond}
	})
	for _, ln := range []*listener{b.server.grpcLns[0], b.server.httpLns[0]} {
		c, err := net.Dial("tcp", ln.Addr().String())
		require.NoError(t, err)
		defer c.Close()
		eventually(t, func() bool {
			ln.mu.Lock()
			defer ln.mu.Unlock()
			return len(ln.open) == 1
		}, "accepted")
	}
	ended := make(chan error, 1)
	go func() { ended <- b.stop() }()
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(patience):
		t.Fatal("the drain waits for a silent connection")
	}
}

// A call may last longer than its connection, which a drain closes at its timeout.
func TestRunReturnsAfterTheLastCall(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) { o.Drain = Drain{} })
	leave := b.occupy()
	ended := make(chan error, 1)
	go func() { ended <- b.stop() }()
	eventually(t, func() bool {
		err := b.server.turns.calls.Enter(t.Context(), "another client", 1, time.Millisecond)
		if err == nil {
			b.server.turns.calls.Leave("another client")
		}
		return errors.Is(err, fair.ErrClosed)
	}, "no new client is accepted")
	select {
	case err := <-ended:
		t.Fatalf("Run returned with a call under way: %v", err)
	default:
	}
	leave()
	require.NoError(t, <-ended)
}

func TestAListenerThatFailsEndsTheServer(t *testing.T) {
	t.Parallel()
	for name, listenersOf := range map[string]func(*Server) interface{ Close() error }{
		"http": func(s *Server) interface{ Close() error } { return s.httpLns[0] },
		"grpc": func(s *Server) interface{ Close() error } { return s.grpcLns[0] },
	} {
		b := start(t, func(o *Options, _ *bench) { o.Drain.Delay = time.Hour })
		require.NoError(t, listenersOf(b.server).Close())
		eventually(t, func() bool { return b.server.draining.Err() != nil }, name)
		require.ErrorContains(t, b.stop(), "serve "+name)
	}
}
