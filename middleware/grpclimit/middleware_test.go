package grpclimit

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

const patience = 20 * time.Second

// service echoes messages. If fail is set, unary calls fail. It keeps the decision of the last call.
type service struct {
	grpc_testing.UnimplementedTestServiceServer
	fail     atomic.Bool
	panics   atomic.Bool
	calls    atomic.Int64
	decision atomic.Pointer[Decision]
}

func (s *service) UnaryCall(ctx context.Context, _ *grpc_testing.SimpleRequest) (*grpc_testing.SimpleResponse, error) {
	s.calls.Add(1)
	s.decision.Store(nil)
	if d, ok := FromContext(ctx); ok {
		s.decision.Store(&d)
	}
	if s.panics.Load() {
		panic("a bug in the handler")
	}
	if s.fail.Load() {
		return nil, status.Error(codes.FailedPrecondition, "failed")
	}
	return &grpc_testing.SimpleResponse{}, nil
}

func (s *service) FullDuplexCall(stream grpc_testing.TestService_FullDuplexCallServer) error {
	s.decision.Store(nil)
	if d, ok := FromContext(stream.Context()); ok {
		s.decision.Store(&d)
	}
	for {
		_, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		s.calls.Add(1)
		if err := stream.Send(&grpc_testing.StreamingOutputCallResponse{}); err != nil {
			return err
		}
	}
}

// bench is a gRPC server behind a Middleware, and its client.
type bench struct {
	service *service
	client  grpc_testing.TestServiceClient
}

func start(t *testing.T, cfg Config, before ...grpc.UnaryServerInterceptor) *bench {
	t.Helper()
	if cfg.Key == nil {
		cfg.Key = ByMethod()
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = patience
	}
	m, err := New(cfg)
	require.NoError(t, err)
	s := grpc.NewServer(grpc.ChainUnaryInterceptor(append(before, m.Unary)...), grpc.StreamInterceptor(m.Stream))
	b := &bench{service: &service{}}
	grpc_testing.RegisterTestServiceServer(s, b.service)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ln) }()
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-ended)
	})
	conn, err := grpc.NewClient("passthrough:///"+ln.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	b.client = grpc_testing.NewTestServiceClient(conn)
	return b
}

func (b *bench) call(ctx context.Context) error {
	_, err := b.client.UnaryCall(ctx, &grpc_testing.SimpleRequest{})
	return err
}

// hourly returns a limiter in Redis that holds capacity tokens and gains one token an hour.
func hourly(t *testing.T, capacity int64) (*lazy.Limiter, *redis.Client) {
	t.Helper()
	rdb := testenv.Redis(t).Client()
	l, err := lazy.New(rdb, lazy.Config{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}})
	require.NoError(t, err)
	return l, rdb
}

const method = "/grpc.testing.TestService/UnaryCall"

func TestADeniedCallIsResourceExhaustedWithRetryInfo(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 2)
	b := start(t, Config{Limiter: l})
	require.NoError(t, b.call(t.Context()))
	require.NoError(t, b.call(t.Context()))
	d := b.service.decision.Load()
	require.Equal(t, "method:"+method, d.Key)
	require.True(t, d.OK)
	require.EqualValues(t, 0, d.Remaining)
	require.EqualValues(t, 2, d.Limit)

	err := b.call(t.Context())
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	details := status.Convert(err).Details()
	require.Len(t, details, 1)
	info, ok := details[0].(*errdetails.RetryInfo)
	require.True(t, ok)
	require.Equal(t, time.Hour, info.GetRetryDelay().AsDuration().Round(time.Minute))
	require.EqualValues(t, 2, b.service.calls.Load(), "the handler doesn't run for a denied call")
}

func TestConcurrentCallsAreAdmittedExactly(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 50)
	b := start(t, Config{Limiter: l})
	var admitted atomic.Int64
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() {
			for range 10 {
				switch err := b.call(t.Context()); status.Code(err) {
				case codes.OK:
					admitted.Add(1)
				case codes.ResourceExhausted:
				default:
					t.Error(err)
				}
			}
		})
	}
	callers.Wait()
	require.EqualValues(t, 50, admitted.Load())
}

func TestAStreamTakesOnceWhenItBegins(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 1)
	b := start(t, Config{Limiter: l})
	stream, err := b.client.FullDuplexCall(t.Context())
	require.NoError(t, err)
	for range 5 {
		require.NoError(t, stream.Send(&grpc_testing.StreamingOutputCallRequest{}))
		_, err = stream.Recv()
		require.NoError(t, err)
	}
	require.True(t, b.service.decision.Load().OK)
	require.NoError(t, stream.CloseSend())
	stream, err = b.client.FullDuplexCall(t.Context())
	require.NoError(t, err)
	_, err = stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Len(t, status.Convert(err).Details(), 1)
}

func TestAStreamTakesForEachMessageIfAskedTo(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 3)
	b := start(t, Config{Limiter: l, PerMessage: true})
	stream, err := b.client.FullDuplexCall(t.Context())
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, stream.Send(&grpc_testing.StreamingOutputCallRequest{}))
		_, err = stream.Recv()
		require.NoError(t, err)
	}
	require.NoError(t, stream.Send(&grpc_testing.StreamingOutputCallRequest{}))
	_, err = stream.Recv()
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.Len(t, status.Convert(err).Details(), 1)
	require.EqualValues(t, 3, b.service.calls.Load(), "the handler doesn't get the denied message")
}

func TestAWeightIsWhatACallTakes(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 5)
	var weight atomic.Int64
	b := start(t, Config{Limiter: l, Weight: func(_ context.Context, c Call) int64 {
		if _, ok := c.Message.(*grpc_testing.SimpleRequest); !ok {
			return 100
		}
		return weight.Load()
	}})
	require.NoError(t, b.call(t.Context()))
	require.Nil(t, b.service.decision.Load(), "a call with weight 0 passes without a decision")
	weight.Store(4)
	require.NoError(t, b.call(t.Context()))
	require.EqualValues(t, 1, b.service.decision.Load().Remaining)
	weight.Store(6)
	err := b.call(t.Context())
	require.Equal(t, codes.OutOfRange, status.Code(err), "the weight exceeds the limit")
	require.Empty(t, status.Convert(err).Details(), "the status has no retry delay")
}

// A limit of pacing, alone or in a Many, spaces calls out. A call may wait for its place for longer than the Timeout.
func TestACallWaitsForItsPlace(t *testing.T) {
	t.Parallel()
	spaced := pacing.Config{Name: "spaced", Rate: policy.PerSecond(2), MaxWait: time.Second}
	hourly := window.Config{Name: "hourly", Limit: 100, Window: time.Hour}
	for name, limiter := range map[string]func() (limit.Limiter, error){
		"many":  func() (limit.Limiter, error) { return limit.NewManyLocal(time.Now, hourly, spaced) },
		"alone": func() (limit.Limiter, error) { return pacing.NewLocal(spaced, time.Now) },
	} {
		synctest.Test(t, func(t *testing.T) {
			l, err := limiter()
			require.NoError(t, err)
			m, err := New(Config{Limiter: l, Key: ByMethod()})
			require.NoError(t, err)
			key := ""
			call := func(ctx context.Context) error {
				_, err := m.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: method},
					func(ctx context.Context, _ any) (any, error) {
						d, limited := FromContext(ctx)
						require.True(t, limited)
						key = d.Key
						return nil, nil
					})
				return err
			}
			start := time.Now()
			require.NoError(t, call(t.Context()), name)
			require.NoError(t, call(t.Context()), name)
			require.Equal(t, 500*time.Millisecond, time.Since(start), name)
			ctx, leave := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer leave()
			require.Equal(t, codes.DeadlineExceeded, status.Code(call(ctx)), "%s: the deadline comes before the turn", name)
			if many, ok := l.(*limit.Many); ok {
				p, err := many.Peek(t.Context(), key)
				require.NoError(t, err)
				require.EqualValues(t, 98, p.Limits[0].Remaining, "the other limit's token is back")
			}
		})
	}
}

func TestTokensOfFailedCallsGoBack(t *testing.T) {
	t.Parallel()
	recovered := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (answer any,
		err error) {
		defer func() {
			if recover() != nil {
				err = status.Error(codes.Internal, "panic")
			}
		}()
		return handler(ctx, req)
	}
	l, _ := hourly(t, 1)
	b := start(t, Config{Limiter: l, SkipFailed: true}, recovered)
	b.service.fail.Store(true)
	for range 3 {
		require.Equal(t, codes.FailedPrecondition, status.Code(b.call(t.Context())))
	}
	b.service.panics.Store(true)
	require.Equal(t, codes.Internal, status.Code(b.call(t.Context())))
	b.service.fail.Store(false)
	b.service.panics.Store(false)
	require.NoError(t, b.call(t.Context()))
	require.Equal(t, codes.ResourceExhausted, status.Code(b.call(t.Context())))
}

func TestShadowDeniesNothingAndReports(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 1)
	var reported atomic.Int64
	b := start(t, Config{Limiter: l, Shadow: true, OnLimit: func(_ context.Context, c Call, d Decision) {
		if c.Method == method && !d.OK {
			reported.Add(1)
		}
	}})
	for range 3 {
		require.NoError(t, b.call(t.Context()))
	}
	require.EqualValues(t, 2, reported.Load())
	require.False(t, b.service.decision.Load().OK)
}

// In shadow mode no call is refused, not even a call without a key.
func TestShadowRefusesNoCallWithoutAKey(t *testing.T) {
	t.Parallel()
	l, _ := hourly(t, 1)
	var reported atomic.Int64
	b := start(t, Config{Limiter: l, Shadow: true, Key: ByMetadata("x-tenant"),
		OnError: func(context.Context, Call, error) { reported.Add(1) }})
	require.NoError(t, b.call(t.Context()))
	require.EqualValues(t, 1, reported.Load())
}

func TestWithoutAnAnswerCallsAreRefusedUnlessFailOpen(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	l, err := lazy.New(server.Client(), lazy.Config{Capacity: 1, Rate: policy.PerSecond(1)})
	require.NoError(t, err)
	server.Kill()
	var reported atomic.Int64
	onError := func(_ context.Context, _ Call, err error) {
		if errors.Is(err, fetch.ErrUnavailable) {
			reported.Add(1)
		}
	}
	require.Equal(t, codes.Unavailable, status.Code(start(t, Config{Limiter: l, OnError: onError}).call(t.Context())))
	require.NoError(t, start(t, Config{Limiter: l, OnError: onError, FailOpen: true}).call(t.Context()))
	require.NoError(t, start(t, Config{Limiter: l, OnError: onError, Shadow: true}).call(t.Context()))
	require.EqualValues(t, 3, reported.Load())
}

func TestKeysDistinguishClients(t *testing.T) {
	t.Parallel()
	l, rdb := hourly(t, 1)
	b := start(t, Config{Limiter: l, Key: ByMetadata("X-Tenant")})
	as := func(values ...string) context.Context {
		md := metadata.MD{}
		md.Append("x-tenant", values...)
		return metadata.NewOutgoingContext(t.Context(), md)
	}
	require.NoError(t, b.call(as("a")))
	require.NoError(t, b.call(as("b")))
	require.Equal(t, codes.ResourceExhausted, status.Code(b.call(as("a"))))
	for _, none := range []context.Context{t.Context(), as(""), as("c", "d")} {
		require.Equal(t, codes.InvalidArgument, status.Code(b.call(none)))
	}
	for _, odd := range []string{"}", "{}", strings.Repeat("k", 2000)} {
		require.NoError(t, b.call(as(odd)))
		require.Equal(t, codes.ResourceExhausted, status.Code(b.call(as(odd))), "odd keys are limited like others")
	}
	keys, err := rdb.DBSize(t.Context()).Result()
	require.NoError(t, err)
	require.EqualValues(t, 5, keys)
}

// A key that can't be a bucket's name keeps its beginning, so that its template still matches. Otherwise the bucket
// would be unknown, and the call would pass with FailOpen.
func TestAnOddKeyIsStillItsTemplates(t *testing.T) {
	t.Parallel()
	c, err := fetch.New(testenv.Redis(t).Client(), fetch.WithTimeout(patience), fetch.WithTemplates(policy.Template{
		Prefix: "metadata:", Enforce: policy.EnforceLazy,
		Policy: policy.Policy{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
	}))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close(context.Background())) })
	b := start(t, Config{Limiter: c, Key: ByMetadata("X-Tenant"), FailOpen: true})
	for _, odd := range []string{"}", strings.Repeat("k", 2000)} {
		ctx := metadata.AppendToOutgoingContext(t.Context(), "x-tenant", odd)
		require.NoError(t, b.call(ctx))
		require.Equal(t, codes.ResourceExhausted, status.Code(b.call(ctx)))
	}
}

func TestEachKeyFunc(t *testing.T) {
	t.Parallel()
	from := func(addr net.Addr) context.Context { return peer.NewContext(t.Context(), &peer.Peer{Addr: addr}) }
	tcp := func(ip string) net.Addr { return &net.TCPAddr{IP: net.ParseIP(ip), Port: 7} }
	user := ByUser(func(ctx context.Context) string {
		u, _ := ctx.Value(contextKey{}).(string)
		return u
	})
	text := func(s string) KeyFunc { return func(context.Context, Call) (string, error) { return s, nil } }
	for name, c := range map[string]struct {
		key  KeyFunc
		ctx  context.Context
		want string // empty: an error is expected
	}{
		"method":                  {ByMethod(), t.Context(), "method:/s/m"},
		"IPv4":                    {ByPeer(), from(tcp("10.0.0.1")), "peer:10.0.0.1"},
		"IPv4 in IPv6":            {ByPeer(), from(tcp("::ffff:10.0.0.1")), "peer:10.0.0.1"},
		"IPv6 network":            {ByPeer(), from(tcp("2001:db8::1:2:3:4")), "peer:2001:db8::/64"},
		"Unix socket":             {ByPeer(), from(&net.UnixAddr{Net: "unix"}), "peer:unix"},
		"no peer":                 {ByPeer(), t.Context(), ""},
		"no address":              {ByPeer(), from(&net.IPNet{}), ""},
		"user":                    {user, context.WithValue(t.Context(), contextKey{}, "ann"), "user:ann"},
		"no user":                 {user, t.Context(), ""},
		"join":                    {Join(ByMethod(), text("x")), t.Context(), "11:method:/s/m|1:x"},
		"join with a missing key": {Join(ByMethod(), user), t.Context(), ""},
	} {
		got, err := c.key(c.ctx, Call{Method: "/s/m"})
		require.Equal(t, c.want, got, name)
		require.Equal(t, c.want == "", err != nil, name)
	}
	one, err := Join(text("a|1:b"), text("c"))(t.Context(), Call{})
	require.NoError(t, err)
	two, err := Join(text("a"), text("b|1:c"))(t.Context(), Call{})
	require.NoError(t, err)
	require.NotEqual(t, one, two, "different values give different keys")
}

type takeOnly struct{}

func (takeOnly) Take(context.Context, string, int64, ...fetch.CallOption) (fetch.Result, error) {
	return fetch.Result{}, nil
}

var _ limit.Limiter = takeOnly{}

func TestABadConfigIsRefusedByField(t *testing.T) {
	t.Parallel()
	for field, cfg := range map[string]Config{
		"Limiter":    {Key: ByMethod()},
		"Key":        {Limiter: takeOnly{}},
		"Timeout":    {Limiter: takeOnly{}, Key: ByMethod(), Timeout: 2 * time.Minute},
		"SkipFailed": {Limiter: takeOnly{}, Key: ByMethod(), SkipFailed: true},
	} {
		_, err := New(cfg)
		require.ErrorIs(t, err, ErrConfig)
		require.ErrorContains(t, err, field+":")
	}
}

// With SkipFailed, a client that cancels, or whose deadline is short, does not get its token back. Otherwise it could
// read a stream nearly to its end without using a token.
func TestHangingUpGivesNoTokenBack(t *testing.T) {
	t.Parallel()
	now := time.Now()
	l, err := lazy.NewLocal(lazy.Config{Capacity: 10, Rate: policy.Rate{Tokens: 1, Per: time.Hour}},
		func() time.Time { return now })
	require.NoError(t, err)
	m, err := New(Config{Limiter: l, Key: ByMethod(), SkipFailed: true})
	require.NoError(t, err)
	ctx, hangUp := context.WithCancel(t.Context())
	_, err = m.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: "/m"}, func(context.Context, any) (any, error) {
		hangUp()
		return nil, ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	ctx, hangUp = context.WithCancel(t.Context())
	err = m.Stream(nil, streamOf{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: "/m"}, func(any, grpc.ServerStream) error {
		hangUp()
		return ctx.Err()
	})
	require.ErrorIs(t, err, context.Canceled)
	r, err := l.Peek(t.Context(), "method:/m")
	require.NoError(t, err)
	require.EqualValues(t, 8, r.Remaining)
}

// streamOf is a stream with a context.
type streamOf struct {
	grpc.ServerStream
	ctx context.Context
}

func (s streamOf) Context() context.Context { return s.ctx }

// distant is a limiter that measures how far away its server is, as a fetch.Client does.
type distant struct {
	deadline bool // the call's context had one
	opts     int
}

func (d *distant) Timeout(string) time.Duration { return 700 * time.Millisecond }

func (d *distant) Take(ctx context.Context, _ string, _ int64, opts ...fetch.CallOption) (fetch.Result, error) {
	_, d.deadline = ctx.Deadline()
	d.opts = len(opts)
	return fetch.Result{OK: true, Taken: 1, Limit: 5}, nil
}

func TestAMeasuredDistanceSetsTheTimeout(t *testing.T) {
	t.Parallel()
	for timeout, bounded := range map[time.Duration]bool{0: false, time.Minute: true} {
		l := &distant{}
		m, err := New(Config{Limiter: l, Timeout: timeout, Key: ByMethod()})
		require.NoError(t, err)
		_, err = m.Unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: "/a.B/C"},
			func(context.Context, any) (any, error) { return nil, nil })
		require.NoError(t, err)
		require.Equal(t, bounded, l.deadline, "%s: the middleware sets a deadline", timeout)
		require.Equal(t, !bounded, l.opts == 1, "%s: the middleware passes the limiter's own timeout", timeout)
	}
}
