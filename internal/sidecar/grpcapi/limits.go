package grpcapi

import (
	"context"
	"fmt"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
	"github.com/tokenrefill/refiller/limit/schedule"
)

// Limits serves limits by name over gRPC.
type Limits struct {
	refillerv1.UnimplementedLimitsServer // for methods that a later version of the interface adds
	Access                               limits.Access
	Metrics                              *metrics.Metrics // nil if nothing is counted
}

// Take implements refillerv1.LimitsServer.
func (s *Limits) Take(ctx context.Context, req *refillerv1.TakeLimitRequest) (*refillerv1.LimitResult, error) {
	return s.ask(ctx, req, func(ctx context.Context, l *limits.Limit) (limits.Answer, error) {
		a, err := l.Take(ctx, req.GetKey(), req.Flow, tokens(req.Tokens))
		s.Metrics.Decided(metrics.GRPC, l.Name(), a.Result, err)
		return a, err
	})
}

// Peek implements refillerv1.LimitsServer.
func (s *Limits) Peek(ctx context.Context, req *refillerv1.PeekLimitRequest) (*refillerv1.LimitResult, error) {
	return s.ask(ctx, req, func(ctx context.Context, l *limits.Limit) (limits.Answer, error) {
		return l.Peek(ctx, req.GetKey())
	})
}

// Undo implements refillerv1.LimitsServer.
func (s *Limits) Undo(ctx context.Context, req *refillerv1.UndoLimitRequest) (*refillerv1.UndoLimitResponse, error) {
	err := s.call(ctx, req, func(ctx context.Context, l *limits.Limit) error {
		return l.Undo(ctx, req.GetKey(), req.GetUndo())
	})
	if err != nil {
		return nil, err
	}
	return &refillerv1.UndoLimitResponse{Name: req.GetName(), Key: req.GetKey()}, nil
}

// Reserve implements refillerv1.LimitsServer.
func (s *Limits) Reserve(
	ctx context.Context, req *refillerv1.ReserveInstantRequest,
) (*refillerv1.ReserveInstantResponse, error) {
	if err := req.GetAt().CheckValid(); err != nil { // this is also an error if the instant is missing
		return nil, call.GRPCError(fmt.Errorf("%w: at: %w", call.ErrBadRequest, err))
	}
	var r schedule.Reservation
	err := s.call(ctx, req, func(ctx context.Context, l *limits.Limit) error {
		sched, err := l.Schedule()
		if err != nil {
			return err
		}
		r, err = sched.Reserve(ctx, req.GetKey(), req.GetId(), req.GetAt().AsTime())
		s.Metrics.Decided(metrics.GRPC, l.Name(), r.Result, err)
		return err
	})
	if err != nil {
		return nil, err
	}
	answer := &refillerv1.ReserveInstantResponse{
		Name: req.GetName(), Result: resultProto(req.GetKey(), r.Result), Id: req.GetId(), At: timestamppb.New(r.At),
		Repeated: r.Repeated, DeniedBy: r.DeniedBy,
	}
	if !r.OK {
		answer.Next = timestamppb.New(r.Next)
	}
	return answer, nil
}

// Cancel implements refillerv1.LimitsServer.
func (s *Limits) Cancel(
	ctx context.Context, req *refillerv1.CancelInstantRequest,
) (*refillerv1.CancelInstantResponse, error) {
	var cancelled bool
	err := s.call(ctx, req, func(ctx context.Context, l *limits.Limit) error {
		sched, err := l.Schedule()
		if err == nil {
			cancelled, err = sched.Cancel(ctx, req.GetKey(), req.GetId())
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &refillerv1.CancelInstantResponse{
		Name: req.GetName(), Key: req.GetKey(), Id: req.GetId(), Cancelled: cancelled,
	}, nil
}

// request has the fields that all requests have.
type request interface {
	GetName() string
	GetKey() string
}

// ask makes a call to a limit that returns a decision.
func (s *Limits) ask(
	ctx context.Context, req request, do func(context.Context, *limits.Limit) (limits.Answer, error),
) (*refillerv1.LimitResult, error) {
	var a limits.Answer
	err := s.call(ctx, req, func(ctx context.Context, l *limits.Limit) (err error) {
		a, err = do(ctx, l)
		return err
	})
	if err != nil {
		return nil, err
	}
	r := &refillerv1.LimitResult{
		Name: req.GetName(), Result: resultProto(req.GetKey(), a.Result), Wait: durationpb.New(a.Wait),
		DeniedBy: a.DeniedBy, Undo: a.Undo,
	}
	if a.Next != nil {
		r.Next = durationpb.New(*a.Next)
	}
	return r, nil
}

// call makes a call to the limit that a request names. It returns errors of gRPC.
func (s *Limits) call(ctx context.Context, req request, do func(context.Context, *limits.Limit) error) error {
	l, ctx, cancel, err := s.Access.Open(ctx, req.GetName())
	if err == nil {
		defer cancel()
		err = do(ctx, l)
	}
	return call.GRPCError(err)
}
