// Package grpcapi serves buckets and limits over gRPC. It only translates: packages fetch and limits decide.
package grpcapi

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/policy"
)

// Buckets serves buckets over gRPC.
type Buckets struct {
	refillerv1.UnimplementedBucketsServer // for methods that a later version of the interface adds
	Client                                *fetch.Client
	Longest                               time.Duration // longest wait for tokens that a call may ask for
}

// Take implements refillerv1.BucketsServer.
func (s *Buckets) Take(ctx context.Context, req *refillerv1.TakeRequest) (*refillerv1.Result, error) {
	opts, err := call.Options(req.GetLeave(), req.Flow, req.RequestId)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	res, err := s.Client.Take(ctx, req.GetKey(), tokens(req.Tokens), opts...)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	return resultProto(req.GetKey(), res), nil
}

// TakeAll implements refillerv1.BucketsServer.
func (s *Buckets) TakeAll(ctx context.Context, req *refillerv1.TakeAllRequest) (*refillerv1.TakeAllResponse, error) {
	reqs := make([]fetch.Request, len(req.GetRequests()))
	for i, one := range req.GetRequests() {
		flow, err := call.FlowName(one.Flow)
		if err != nil {
			return nil, call.GRPCError(err)
		}
		reqs[i] = fetch.Request{Key: one.GetKey(), N: tokens(one.Tokens), Flow: flow}
	}
	opts, err := call.Options(req.GetLeave(), nil, req.RequestId)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	res, err := s.Client.TakeAll(ctx, reqs, opts...)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	answer := &refillerv1.TakeAllResponse{Ok: res.OK, Denied: res.Denied, RetryAfter: durationProto(res.RetryAfter)}
	for i, one := range res.Results {
		answer.Results = append(answer.Results, resultProto(reqs[i].Key, one))
	}
	return answer, nil
}

// Return implements refillerv1.BucketsServer.
func (s *Buckets) Return(ctx context.Context, req *refillerv1.ReturnRequest) (*refillerv1.ReturnResponse, error) {
	n := tokens(req.Tokens)
	if err := call.Returnable(req.GetSource()); err != nil {
		return nil, call.GRPCError(err)
	}
	if err := s.Client.Return(ctx, req.GetKey(), n); err != nil {
		return nil, call.GRPCError(err)
	}
	return &refillerv1.ReturnResponse{Key: req.GetKey(), Tokens: n}, nil
}

// Peek implements refillerv1.BucketsServer.
func (s *Buckets) Peek(ctx context.Context, req *refillerv1.PeekRequest) (*refillerv1.Result, error) {
	res, err := s.Client.Peek(ctx, req.GetKey())
	if err != nil {
		return nil, call.GRPCError(err)
	}
	return resultProto(req.GetKey(), res), nil
}

// Wait implements refillerv1.BucketsServer.
func (s *Buckets) Wait(ctx context.Context, req *refillerv1.WaitRequest) (*refillerv1.WaitResponse, error) {
	timeout := s.Longest
	if t := req.GetTimeout(); t != nil {
		timeout = t.AsDuration() // a value out of range becomes the nearest duration
		if timeout <= 0 || timeout > s.Longest {
			err := fmt.Errorf("%w: timeout: %s; want more than 0 and at most %s", call.ErrBadRequest, timeout, s.Longest)
			return nil, call.GRPCError(err)
		}
	}
	opts, err := call.Options(req.GetLeave(), req.Flow, nil)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	n := tokens(req.Tokens)
	res, waited, err := call.Wait(ctx, s.Client, req.GetKey(), n, timeout, opts)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	return &refillerv1.WaitResponse{
		Key: req.GetKey(), Ok: res.OK, Taken: res.Taken, Waited: durationpb.New(waited), Source: answer.Source(res),
		Shadow: res.Shadow,
	}, nil
}

// Reserve implements refillerv1.BucketsServer.
func (s *Buckets) Reserve(ctx context.Context, req *refillerv1.ReserveRequest) (*refillerv1.ReserveResponse, error) {
	overrun, ok := map[refillerv1.Overrun]policy.Overrun{
		refillerv1.Overrun_OVERRUN_CLAMP: policy.OverrunClamp, refillerv1.Overrun_OVERRUN_DEBT: policy.OverrunDebt,
	}[req.GetOverrun()]
	if !ok {
		return nil, call.GRPCError(fmt.Errorf("%w: overrun: %d is not an Overrun", call.ErrBadRequest, req.GetOverrun()))
	}
	opts, err := call.Options(req.GetLeave(), req.Flow, nil)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	opts = append(opts, fetch.WithOverrun(overrun))
	if req.Id != nil {
		opts = append(opts, fetch.WithReservationID(req.GetId()))
	}
	ttl := req.GetTtl().AsDuration() // a value out of range becomes the nearest duration
	res, err := s.Client.Reserve(ctx, req.GetKey(), tokens(req.Tokens), ttl, opts...)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	answer := &refillerv1.ReserveResponse{Result: resultProto(res.Key, res.Result)}
	if !res.Until.IsZero() {
		answer.Id, answer.Until = res.ID, timestamppb.New(res.Until)
	}
	return answer, nil
}

// Settle implements refillerv1.BucketsServer.
func (s *Buckets) Settle(ctx context.Context, req *refillerv1.SettleRequest) (*refillerv1.SettleResponse, error) {
	if req.Used == nil {
		return nil, call.GRPCError(call.ErrUsedMissing)
	}
	return s.end(ctx, req.GetKey(), req.GetId(), req.GetUsed())
}

// Cancel implements refillerv1.BucketsServer.
func (s *Buckets) Cancel(ctx context.Context, req *refillerv1.CancelRequest) (*refillerv1.SettleResponse, error) {
	return s.end(ctx, req.GetKey(), req.GetId(), 0)
}

// end ends a reservation. used is the number of its tokens that were used.
func (s *Buckets) end(ctx context.Context, key, id string, used int64) (*refillerv1.SettleResponse, error) {
	res, err := s.Client.Settle(ctx, key, id, used)
	if err != nil {
		return nil, call.GRPCError(err)
	}
	return &refillerv1.SettleResponse{
		Key: key, Id: id, Returned: res.Returned, Clamped: res.Clamped, Void: res.Void, Charged: res.Charged, Owed: res.Owed,
		Forgiven: res.Forgiven, Remaining: res.Remaining, Again: res.Again,
	}, nil
}

// tokens returns the number of tokens in a request. It is 1 if the request has no number.
func tokens(n *int64) int64 {
	if n == nil {
		return 1
	}
	return *n
}

func resultProto(key string, r fetch.Result) *refillerv1.Result {
	return &refillerv1.Result{
		Key: key, Ok: r.OK, Taken: r.Taken, Remaining: r.Remaining, Limit: r.Limit,
		RetryAfter: durationProto(r.RetryAfter), ResetAfter: durationProto(r.ResetAfter), Source: answer.Source(r),
		OnFloor: r.OnFloor, Outstanding: r.Outstanding, Shadow: r.Shadow,
	}
}

// durationProto converts a time. It returns nil if the time isn't known.
func durationProto(d time.Duration) *durationpb.Duration {
	if d == fetch.Never {
		return nil
	}
	return durationpb.New(d)
}
