package sidecar

import (
	"context"
	"strings"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/proto"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

// gate admits calls over gRPC.
type gate struct {
	turns    *turns
	metrics  *metrics.Metrics
	traces   tracer
	longest  time.Duration   // longest time of a unary call, including the time to read its request
	draining context.Context // ends when health checks begin to fail
}

const healthPrefix = "/grpc.health.v1.Health/"

// untimedKey marks the context of a call that came without a deadline.
type untimedKey struct{}

// tap bounds the time of a call. It runs before the request is read. An interceptor would come too late: gRPC doesn't
// call it if the request never arrives in full.
func (g *gate) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	if strings.HasPrefix(info.FullMethodName, healthPrefix) ||
		strings.HasPrefix(info.FullMethodName, "/grpc.reflection.") {
		return ctx, nil
	}
	if _, timed := ctx.Deadline(); !timed {
		ctx = context.WithValue(ctx, untimedKey{}, true)
	}
	ctx, cancel := context.WithTimeout(ctx, g.longest)
	context.AfterFunc(ctx, cancel) // not deferred: the call goes on after tap; when it ends, gRPC cancels ctx
	return ctx, nil
}

func (g *gate) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (
	_ any, err error,
) {
	if strings.HasPrefix(info.FullMethod, healthPrefix) {
		return handler(ctx, req) // health checks need no turn: a server with a busy client is healthy
	}
	began, wants := time.Now(), asks(info.FullMethod, req)
	if !wants.MayWait {
		defer func() { g.metrics.ObserveCall(doorOf(req), time.Since(began)) }()
	}
	ctx, end := g.traces.grpc(ctx, info.FullMethod, doorOf(req))
	defer func() { end(err) }()
	untimed, _ := ctx.Value(untimedKey{}).(bool)
	leave, err := g.turns.enter(ctx, grpcOrigin(ctx), wants, !untimed)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	defer leave()
	return handler(ctx, req)
}

// doorOf returns the door through which a request over gRPC came: the interface of the sidecar, as metrics name it.
func doorOf(req any) string {
	if _, ok := req.(*rls.RateLimitRequest); ok {
		return metrics.Envoy
	}
	return metrics.GRPC
}

// asks returns the description of a request to any of the services.
func asks(method string, req any) call.Asks {
	a := call.Asks{MayWait: method == refillerv1.Buckets_Wait_FullMethodName}
	if m, ok := req.(proto.Message); ok {
		a.Size = proto.Size(m)
	}
	if inFlow, ok := req.(interface{ GetFlow() string }); ok {
		a.Flow = inFlow.GetFlow()
	}
	switch req := req.(type) {
	case *rls.RateLimitRequest:
		a.Key = envoy.Key(req)
	case *refillerv1.TakeAllRequest:
		if all := req.GetRequests(); len(all) > 0 {
			a.Key = all[0].GetKey()
		}
	case interface{ GetKey() string }:
		a.Key = req.GetKey()
	}
	return a
}

// stream passes on the streams of reflection and of health watches, and ends them when the server drains. Otherwise
// they would not end. They need no turn, because HTTP/2 bounds the number of streams.
func (g *gate) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, cancel := context.WithCancel(ss.Context())
	defer cancel()
	defer context.AfterFunc(g.draining, cancel)()
	return handler(srv, boundStream{ss, ctx})
}

type boundStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s boundStream) Context() context.Context { return s.ctx }

func grpcOrigin(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return originOf(nil, nil)
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
		return originOf(p.Addr, &info.State)
	}
	return originOf(p.Addr, nil)
}
