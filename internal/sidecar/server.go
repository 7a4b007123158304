package sidecar

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/grpcapi"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

const (
	maxHeader = 64 << 10 // a proxy may send the headers of its client with a check
	// maxStreams bounds the calls on one connection over HTTP/2. A proxy sends the calls of all its clients over a few
	// connections.
	maxStreams = 4096
)

// Server serves buckets and limits. [Listen] makes a Server, and Run runs it once.
type Server struct {
	opts       Options
	log        hclog.Logger
	metrics    *metrics.Metrics
	httpLns    []*listener
	adminLns   []*listener
	grpcLns    []*listener
	turns      *turns
	health     *health.Server
	http       *http.Server
	admin      *http.Server
	grpc       *grpc.Server
	envoy      *envoy.Server // nil if there are no limits for Envoy
	limits     atomic.Pointer[limits.Set]
	draining   context.Context
	startDrain context.CancelFunc
	sleep      func(time.Duration)
}

// Listen opens the addresses. Connections wait until Run accepts them.
func Listen(opts Options) (*Server, error) {
	if opts.Logger == nil {
		opts.Logger = hclog.NewNullLogger()
	}
	if opts.Client == nil {
		return nil, fmt.Errorf("%w: the client is nil", ErrOptions)
	}
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	counts := metrics.New(opts.Registry)
	refusals := newRefusals(counts, opts.Logger)
	s := &Server{opts: opts, log: opts.Logger, metrics: counts, turns: newTurns(opts.Limits, refusals),
		health: health.NewServer(), sleep: time.Sleep}
	s.limits.Store(opts.Named)
	s.draining, s.startDrain = context.WithCancel(context.Background())
	conns := newClients(opts.Limits.Connections)
	var errs []error
	for _, group := range []struct {
		addresses []string
		listeners *[]*listener
	}{{opts.HTTP, &s.httpLns}, {opts.Admin, &s.adminLns}, {opts.GRPC, &s.grpcLns}} {
		for _, a := range group.addresses {
			ln, err := listen(a, conns, refusals)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			*group.listeners = append(*group.listeners, ln)
		}
	}
	if err := errors.Join(errs...); err != nil {
		s.closeListeners()
		return nil, err
	}
	var decide httpapi.EnvoyDoor
	if opts.Envoy != nil {
		decide = func(ctx context.Context, req *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
			return s.envoy.Decide(ctx, req)
		}
	}
	api := httpapi.New(httpapi.Config{
		Envoy:  decide,
		Client: opts.Client, Limits: s.access(), Body: opts.Limits.Body, Wait: opts.Limits.Wait,
		Patience: opts.Limits.Patience, Metrics: counts, Logger: s.log,
	})
	s.http = s.newHTTP(s.withServerPages(newTracer(opts.Traces).http(s.admit(api))), opts.TLS)
	s.admin = s.newHTTP(s.withServerPages(http.HandlerFunc(s.notFound)), nil)
	s.grpc = s.newGRPC()
	return s, nil
}

// UseEnvoy puts other limits for Envoy in force. It may only be called if Options.Envoy was set.
func (s *Server) UseEnvoy(limits *envoy.Limits) { s.envoy.Use(limits) }

// UseLimits puts other named limits in force.
func (s *Server) UseLimits(named *limits.Set) { s.limits.Store(named) }

func (s *Server) access() limits.Access {
	return limits.Access{InForce: s.limits.Load, Deadline: s.opts.CallDeadline}
}

// HTTPAddrs returns the addresses for HTTP, in the order of the options.
func (s *Server) HTTPAddrs() []net.Addr { return addrs(s.httpLns) }

// AdminAddrs returns the addresses for probes and metrics, in the order of the options.
func (s *Server) AdminAddrs() []net.Addr { return addrs(s.adminLns) }

// GRPCAddrs returns the addresses for gRPC, in the order of the options.
func (s *Server) GRPCAddrs() []net.Addr { return addrs(s.grpcLns) }

func addrs(lns []*listener) []net.Addr {
	out := make([]net.Addr, len(lns))
	for i, ln := range lns {
		out[i] = ln.Addr()
	}
	return out
}

func (s *Server) closeListeners() {
	for _, ln := range slices.Concat(s.httpLns, s.adminLns, s.grpcLns) {
		_ = ln.Close() // it may be closed already
	}
}

func (s *Server) newHTTP(h http.Handler, config *tls.Config) *http.Server {
	l := s.opts.Limits
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	config = config.Clone()
	if config != nil { // config is a copy, because http.Server changes it
		// A plain listener may be served before one with TLS. Then http.Server supports HTTP/2 only if it is named here.
		config.NextProtos = []string{"h2", "http/1.1"}
	}
	return &http.Server{
		Handler:           s.closeConnections(s.refuseForeign(h)),
		TLSConfig:         config,
		ReadHeaderTimeout: l.Patience,
		ReadTimeout:       l.Patience,
		WriteTimeout:      l.QueueWait + 3*l.Patience,
		IdleTimeout:       6 * l.Patience,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          s.log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}), // errors of clients
		ConnContext:       withConn,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
	}
}

func (s *Server) newGRPC() *grpc.Server {
	l := s.opts.Limits
	g := &gate{
		turns: s.turns, metrics: s.metrics, traces: newTracer(s.opts.Traces),
		longest: l.QueueWait + l.Wait + 2*l.Patience, draining: s.draining,
	}
	opts := []grpc.ServerOption{
		grpc.ForceServerCodecV2(newAnyText()),
		grpc.UnaryInterceptor(g.unary), grpc.StreamInterceptor(g.stream), grpc.InTapHandle(g.tap),
		grpc.MaxRecvMsgSize(l.Body), grpc.MaxHeaderListSize(maxHeader), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(l.Patience), grpc.WaitForHandlers(true),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: 6 * l.Patience, Timeout: l.Patience, MaxConnectionAge: l.ConnectionAge, MaxConnectionAgeGrace: g.longest,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	if s.opts.TLS != nil {
		opts = append(opts, grpc.Creds(perListener{credentials.NewTLS(s.opts.TLS), s.log}))
	}
	srv := grpc.NewServer(opts...)
	refillerv1.RegisterBucketsServer(srv, &grpcapi.Buckets{Client: s.opts.Client, Longest: l.Wait})
	refillerv1.RegisterLimitsServer(srv, &grpcapi.Limits{Access: s.access(), Metrics: s.metrics})
	if s.opts.Envoy != nil {
		s.envoy = envoy.NewServer(s.opts.Envoy, s.opts.Client, s.metrics, s.log)
		rls.RegisterRateLimitServiceServer(srv, s.envoy)
	}
	healthpb.RegisterHealthServer(srv, s.health)
	for name := range srv.GetServiceInfo() {
		s.health.SetServingStatus(name, healthpb.HealthCheckResponse_SERVING)
	}
	reflection.Register(srv)
	return srv
}

// perListener uses TLS for TCP, and leaves Unix sockets plain.
type perListener struct {
	credentials.TransportCredentials
	log hclog.Logger
}

// ServerHandshake implements credentials.TransportCredentials.
func (p perListener) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if c.LocalAddr().Network() == "unix" {
		return c, nil, nil
	}
	secured, info, err := p.TransportCredentials.ServerHandshake(c)
	if err != nil {
		p.log.Debug("TLS handshake failed", "protocol", "grpc", "address", c.RemoteAddr().String(), "error", err)
	}
	return secured, info, err
}

// Run serves until ctx ends, and then drains as [Drain] describes. If a listener fails, it drains without the delay and
// returns an error. Run may be called only once.
func (s *Server) Run(ctx context.Context) error {
	var serving sync.WaitGroup
	failed := make(chan error, len(s.httpLns)+len(s.adminLns)+len(s.grpcLns))
	serveHTTP := func(server *http.Server, ln net.Listener, secured bool) {
		serve := server.Serve
		if secured && ln.Addr().Network() != "unix" {
			serve = func(ln net.Listener) error { return server.ServeTLS(ln, "", "") }
		}
		if err := serve(ln); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("sidecar: serve http on %s: %w", ln.Addr(), err)
		}
	}
	for _, ln := range s.httpLns {
		serving.Go(func() { serveHTTP(s.http, ln, s.opts.TLS != nil) })
	}
	for _, ln := range s.adminLns {
		serving.Go(func() { serveHTTP(s.admin, ln, false) })
	}
	for _, ln := range s.grpcLns {
		serving.Go(func() {
			if err := s.grpc.Serve(ln); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				failed <- fmt.Errorf("sidecar: serve grpc on %s: %w", ln.Addr(), err)
			}
		})
	}
	var err error
	delay := s.opts.Drain.Delay
	select {
	case <-ctx.Done():
	case err = <-failed:
		delay = 0
	}
	s.drain(delay)
	s.closeListeners() // a server that was stopped before it served leaves its listener open
	serving.Wait()
	return err
}

func (s *Server) drain(delay time.Duration) {
	running, calls := s.turns.calls.Load()
	s.log.Info("draining", "running", running, "queued", calls-running, "delay", delay, "timeout", s.opts.Drain.Timeout)
	s.health.Shutdown()
	s.startDrain()
	s.sleep(delay)
	within, cancel := context.WithTimeout(context.Background(), s.opts.Drain.Timeout)
	defer cancel()
	var closing sync.WaitGroup
	closing.Go(func() {
		if s.http.Shutdown(within) != nil {
			_ = s.http.Close()
		}
	})
	closing.Go(func() {
		defer context.AfterFunc(within, func() {
			for _, ln := range s.grpcLns { // otherwise Stop would wait for connections without a request
				ln.hangUp()
			}
			s.grpc.Stop()
		})()
		s.grpc.GracefulStop()
	})
	closing.Wait()
	s.turns.close()
	_ = s.admin.Close() // the admin server answers health checks until here
	s.log.Info("drained")
}
