package sidecar

import (
	"context"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/types/known/durationpb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
)

// bucketsServer answers over gRPC.
type bucketsServer struct {
	refillerv1.UnimplementedBucketsServer // for methods that a later version of the interface adds
	client                                *fetch.Client
	limits                                Limits
}

// Take implements refillerv1.BucketsServer.
func (s *bucketsServer) Take(ctx context.Context, req *refillerv1.TakeRequest) (*refillerv1.Result, error) {
	res, err := s.client.Take(ctx, req.GetKey(), tokens(req.Tokens))
	if err != nil {
		return nil, grpcError(err)
	}
	return resultProto(req.GetKey(), res), nil
}

// Return implements refillerv1.BucketsServer.
func (s *bucketsServer) Return(ctx context.Context, req *refillerv1.ReturnRequest) (*refillerv1.ReturnResponse, error) {
	n := tokens(req.Tokens)
	if err := s.client.Return(ctx, req.GetKey(), n); err != nil {
		return nil, grpcError(err)
	}
	return &refillerv1.ReturnResponse{Key: req.GetKey(), Tokens: n}, nil
}

// Peek implements refillerv1.BucketsServer.
func (s *bucketsServer) Peek(ctx context.Context, req *refillerv1.PeekRequest) (*refillerv1.Result, error) {
	res, err := s.client.Peek(ctx, req.GetKey())
	if err != nil {
		return nil, grpcError(err)
	}
	return resultProto(req.GetKey(), res), nil
}

// Wait implements refillerv1.BucketsServer.
func (s *bucketsServer) Wait(ctx context.Context, req *refillerv1.WaitRequest) (*refillerv1.WaitResponse, error) {
	timeout := s.limits.Wait
	if t := req.GetTimeout(); t != nil {
		timeout = t.AsDuration() // of what is out of range, the nearest
		if err := s.limits.checkTimeout("timeout", timeout); err != nil {
			return nil, grpcError(err)
		}
	}
	n := tokens(req.Tokens)
	ok, waited, err := wait(ctx, s.client, req.GetKey(), n, timeout)
	if err != nil {
		return nil, grpcError(err)
	}
	answer := &refillerv1.WaitResponse{Key: req.GetKey(), Ok: ok, Waited: durationpb.New(waited)}
	if ok {
		answer.Taken = n
	}
	return answer, nil
}

// tokens is 1 where a request says nothing.
func tokens(n *int64) int64 {
	if n == nil {
		return 1
	}
	return *n
}

func resultProto(key string, r fetch.Result) *refillerv1.Result {
	return &refillerv1.Result{
		Key: key, Ok: r.OK, Taken: r.Taken, Remaining: r.Remaining, Limit: r.Limit,
		RetryAfter: durationProto(r.RetryAfter), ResetAfter: durationProto(r.ResetAfter), Source: r.Source.String(),
	}
}

// durationProto is nil for a time that isn't known.
func durationProto(d time.Duration) *durationpb.Duration {
	if d == fetch.Never {
		return nil
	}
	return durationpb.New(d)
}

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
	if strings.HasPrefix(info.FullMethodName, healthPrefix) || strings.HasPrefix(info.FullMethodName, "/grpc.reflection.") {
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
		return nil, grpcError(err)
	}
	defer g.calls.leave(client)
	return handler(ctx, req)
}

// stream ends streams when the server drains: reflection and health watches have
// no end of their own.
func (g *gate) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	client := grpcClient(ss.Context())
	if err := g.calls.enter(client); err != nil {
		return grpcError(err)
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
