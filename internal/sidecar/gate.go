package sidecar

import (
	"context"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// gate admits calls over gRPC.
type gate struct {
	calls    *clients
	longest  time.Duration   // a unary call may take, its request included
	draining context.Context // ends when health turns
}

const healthPrefix = "/grpc.health.v1.Health/"

// tap bounds the time of a call before its request is read, since no interceptor
// sees a request that never arrives in full.
func (g *gate) tap(ctx context.Context, info *tap.Info) (context.Context, error) {
	if strings.HasPrefix(info.FullMethodName, healthPrefix) ||
		strings.HasPrefix(info.FullMethodName, "/grpc.reflection.") {
		return ctx, nil
	}
	ctx, cancel := context.WithTimeout(ctx, g.longest)
	context.AfterFunc(ctx, cancel) // ctx ends with the call
	return ctx, nil
}

func (g *gate) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if strings.HasPrefix(info.FullMethod, healthPrefix) {
		return handler(ctx, req) // a busy client is not an unhealthy server
	}
	client := grpcClient(ctx)
	if err := g.calls.enter(client); err != nil {
		return nil, call.GRPCError(err)
	}
	defer g.calls.leave(client)
	return handler(ctx, req)
}

// stream ends streams when the server drains: reflection and health watches have
// no end of their own.
func (g *gate) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	client := grpcClient(ss.Context())
	if err := g.calls.enter(client); err != nil {
		return call.GRPCError(err)
	}
	defer g.calls.leave(client)
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

func grpcClient(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return clientOf(nil, nil)
	}
	if info, ok := p.AuthInfo.(credentials.TLSInfo); ok {
		return clientOf(p.Addr, &info.State)
	}
	return clientOf(p.Addr, nil)
}
