package sidecar

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/policy"
)

// bucketsServer answers over gRPC.
type bucketsServer struct {
	refillerv1.UnimplementedBucketsServer // for methods that a later version of the interface adds
	client                                *fetch.Client
	limits                                Limits
}

// Take implements refillerv1.BucketsServer.
func (s *bucketsServer) Take(ctx context.Context, req *refillerv1.TakeRequest) (*refillerv1.Result, error) {
	opts, err := leave(req.GetLeave())
	if err != nil {
		return nil, grpcError(err)
	}
	res, err := s.client.Take(ctx, req.GetKey(), tokens(req.Tokens), opts...)
	if err != nil {
		return nil, grpcError(err)
	}
	return resultProto(req.GetKey(), res), nil
}

// TakeAll implements refillerv1.BucketsServer.
func (s *bucketsServer) TakeAll(ctx context.Context, req *refillerv1.TakeAllRequest) (*refillerv1.TakeAllResponse, error) {
	reqs := make([]fetch.Request, len(req.GetRequests()))
	for i, one := range req.GetRequests() {
		reqs[i] = fetch.Request{Key: one.GetKey(), N: tokens(one.Tokens)}
	}
	opts, err := leave(req.GetLeave())
	if err != nil {
		return nil, grpcError(err)
	}
	res, err := s.client.TakeAll(ctx, reqs, opts...)
	if err != nil {
		return nil, grpcError(err)
	}
	answer := &refillerv1.TakeAllResponse{Ok: res.OK, Denied: res.Denied, RetryAfter: durationProto(res.RetryAfter)}
	for i, one := range res.Results {
		answer.Results = append(answer.Results, resultProto(reqs[i].Key, one))
	}
	return answer, nil
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
	opts, err := leave(req.GetLeave())
	if err != nil {
		return nil, grpcError(err)
	}
	n := tokens(req.Tokens)
	ok, waited, err := wait(ctx, s.client, req.GetKey(), n, timeout, opts)
	if err != nil {
		return nil, grpcError(err)
	}
	answer := &refillerv1.WaitResponse{Key: req.GetKey(), Ok: ok, Waited: durationpb.New(waited)}
	if ok {
		answer.Taken = n
	}
	return answer, nil
}

// Reserve implements refillerv1.BucketsServer.
func (s *bucketsServer) Reserve(ctx context.Context, req *refillerv1.ReserveRequest) (*refillerv1.ReserveResponse, error) {
	overrun, ok := map[refillerv1.Overrun]policy.Overrun{
		refillerv1.Overrun_OVERRUN_CLAMP: policy.OverrunClamp, refillerv1.Overrun_OVERRUN_DEBT: policy.OverrunDebt,
	}[req.GetOverrun()]
	if !ok {
		return nil, grpcError(fmt.Errorf("%w: overrun: %d is not known", errBadRequest, req.GetOverrun()))
	}
	opts, err := leave(req.GetLeave())
	if err != nil {
		return nil, grpcError(err)
	}
	opts = append(opts, fetch.WithOverrun(overrun))
	if req.Id != nil {
		opts = append(opts, fetch.WithReservationID(req.GetId()))
	}
	res, err := s.client.Reserve(ctx, req.GetKey(), tokens(req.Tokens), req.GetTtl().AsDuration(), opts...) // of what is out of range, the nearest
	if err != nil {
		return nil, grpcError(err)
	}
	answer := &refillerv1.ReserveResponse{Result: resultProto(res.Key, res.Result)}
	if !res.Until.IsZero() {
		answer.Id, answer.Until = res.ID, timestamppb.New(res.Until)
	}
	return answer, nil
}

// Settle implements refillerv1.BucketsServer.
func (s *bucketsServer) Settle(ctx context.Context, req *refillerv1.SettleRequest) (*refillerv1.SettleResponse, error) {
	if req.Used == nil {
		return nil, grpcError(errUsedMissing)
	}
	return s.end(ctx, req.GetKey(), req.GetId(), req.GetUsed())
}

// Cancel implements refillerv1.BucketsServer.
func (s *bucketsServer) Cancel(ctx context.Context, req *refillerv1.CancelRequest) (*refillerv1.SettleResponse, error) {
	return s.end(ctx, req.GetKey(), req.GetId(), 0)
}

// end ends a reservation of which so many tokens were used.
func (s *bucketsServer) end(ctx context.Context, key, id string, used int64) (*refillerv1.SettleResponse, error) {
	res, err := s.client.Settle(ctx, key, id, used)
	if err != nil {
		return nil, grpcError(err)
	}
	return &refillerv1.SettleResponse{
		Key: key, Id: id, Returned: res.Returned, Clamped: res.Clamped, Void: res.Void, Charged: res.Charged, Owed: res.Owed,
		Forgiven: res.Forgiven, Remaining: res.Remaining, Again: res.Again,
	}, nil
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
		RetryAfter: durationProto(r.RetryAfter), ResetAfter: durationProto(r.ResetAfter), Source: r.Source.String(), OnFloor: r.OnFloor,
		Outstanding: r.Outstanding, Shadow: r.Shadow,
	}
}

// durationProto is nil for a time that isn't known.
func durationProto(d time.Duration) *durationpb.Duration {
	if d == fetch.Never {
		return nil
	}
	return durationpb.New(d)
}
