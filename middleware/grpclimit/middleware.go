package grpclimit

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/bucketname"
	"github.com/tokenrefill/refiller/internal/limitcall"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/limit"
)

// Middleware limits calls. [New] makes one; it is safe for concurrent use.
type Middleware struct {
	config Config
}

// Decision is the answer for a call.
type Decision struct {
	// Key is the key whose tokens were asked for.
	Key string
	// Weight is the number of tokens that were asked for.
	Weight int64
	// Result is the limiter's answer.
	fetch.Result
	// Wait is how long the call waited for its place, if a limit of pacing gave it one.
	Wait time.Duration

	taken limit.Decision // to give back
}

type contextKey struct{}

// FromContext returns the decision about the call that a handler serves. It returns false if the call passed without a
// decision, and in a stream with PerMessage.
func FromContext(ctx context.Context) (Decision, bool) {
	d, ok := ctx.Value(contextKey{}).(Decision)
	return d, ok
}

// Unary limits unary calls. It is a grpc.UnaryServerInterceptor.
func (m *Middleware) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo,
	handler grpc.UnaryHandler) (answer any, err error) {
	call := Call{info.FullMethod, req}
	d, err := m.decide(ctx, call)
	if err != nil {
		return nil, err
	}
	failed := true
	defer func() { m.settle(ctx, call, d, failed) }()
	answer, err = handler(withDecision(ctx, d), req)
	failed = err != nil
	return answer, err
}

// Stream limits streams. It is a grpc.StreamServerInterceptor.
func (m *Middleware) Stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo,
	handler grpc.StreamHandler) (err error) {
	call := Call{Method: info.FullMethod}
	if m.config.PerMessage {
		return handler(srv, messages{ss, m, call})
	}
	ctx := ss.Context()
	d, err := m.decide(ctx, call)
	if err != nil {
		return err
	}
	failed := true
	defer func() { m.settle(ctx, call, d, failed) }()
	err = handler(srv, decided{ss, withDecision(ctx, d)})
	failed = err != nil
	return err
}

// decided is a stream whose context has the decision.
type decided struct {
	grpc.ServerStream
	ctx context.Context
}

func (s decided) Context() context.Context { return s.ctx }

// messages is a stream that takes tokens for each message.
type messages struct {
	grpc.ServerStream
	middleware *Middleware
	call       Call
}

func (s messages) RecvMsg(message any) error {
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	call := s.call
	call.Message = message
	_, err := s.middleware.decide(s.Context(), call)
	return err
}

// withDecision returns a context that has the decision, for the handler. If d is nil, it returns ctx.
func withDecision(ctx context.Context, d *Decision) context.Context {
	if d == nil {
		return ctx
	}
	return context.WithValue(ctx, contextKey{}, *d)
}

// decide takes the tokens of a call. An error is the status with which the call is refused. If the decision is nil and
// there is no error, the call passes without a limit.
func (m *Middleware) decide(ctx context.Context, call Call) (*Decision, error) {
	d := Decision{Weight: 1}
	if m.config.Weight != nil {
		d.Weight = m.config.Weight(ctx, call)
		if d.Weight == 0 {
			return nil, nil
		}
	}
	key, err := m.config.Key(ctx, call)
	if err != nil {
		m.report(ctx, call, err)
		if m.config.Shadow {
			return nil, nil
		}
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	d.Key = bucketname.Fit(key)
	err = m.take(ctx, &d)
	if err != nil {
		m.report(ctx, call, err)
		return nil, m.refusal(ctx, err)
	}
	if d.OK {
		return &d, m.hold(ctx, call, &d)
	}
	if m.config.OnLimit != nil {
		m.config.OnLimit(ctx, call, d)
	}
	if m.config.Shadow {
		return &d, nil
	}
	return nil, denial(d)
}

// refusal returns the status of a call for which no decision could be made. If it returns nil, the call passes.
func (m *Middleware) refusal(ctx context.Context, err error) error {
	outcome := limit.OutcomeOf(err)
	switch {
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case m.config.Shadow, m.config.FailOpen && outcome.Open:
		return nil
	case outcome.Open:
		return status.Error(codes.Unavailable, "the limit can't be checked")
	}
	return status.Error(codes.Code(outcome.GRPC), err.Error())
}

// take takes tokens from the limiter, and sets the decision's Result and Wait.
func (m *Middleware) take(ctx context.Context, d *Decision) (err error) {
	ctx, cancel, opts := limitcall.Bound(ctx, m.config.Limiter, d.Key, m.config.Timeout, DefaultTimeout)
	defer cancel()
	d.taken, err = limitcall.Take(ctx, m.config.Limiter, d.Key, d.Weight, opts...)
	d.Result = d.taken.Result
	d.Wait = d.taken.Wait
	return err
}

// hold waits for the call's place. If the call ends meanwhile, its tokens are given back, its place remains unused, and
// the error is the call's status.
func (m *Middleware) hold(ctx context.Context, call Call, d *Decision) error {
	if d.Wait == 0 || m.config.Shadow {
		return nil
	}
	if timing.Sleep(ctx.Done(), d.Wait) {
		return nil
	}
	m.giveBack(ctx, call, d)
	return status.FromContextError(ctx.Err()).Err()
}

// denial returns the status of a denied call.
func denial(d Decision) error {
	if d.RetryAfter == fetch.Never {
		return status.Error(codes.ResourceExhausted, "over the limit")
	}
	s := status.New(codes.ResourceExhausted, fmt.Sprintf("over the limit; try again in %s", d.RetryAfter))
	if with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(d.RetryAfter)}); err == nil {
		s = with
	}
	return s.Err()
}

// settle gives the tokens of a failed call back. They stay taken if the call failed because its client left or gave it
// too little time. Otherwise a client that disconnects just before the end would use no tokens.
func (m *Middleware) settle(ctx context.Context, call Call, d *Decision, failed bool) {
	if m.config.SkipFailed && failed && d != nil && ctx.Err() == nil {
		m.giveBack(ctx, call, d)
	}
}

// giveBack returns the tokens of a call, if the limiter can take them back. The call may be over.
func (m *Middleware) giveBack(ctx context.Context, call Call, d *Decision) {
	if err := limitcall.GiveBack(ctx, m.config.Limiter, d.Key, d.taken, m.config.Timeout); err != nil {
		m.report(ctx, call, err)
	}
}

func (m *Middleware) report(ctx context.Context, call Call, err error) {
	if m.config.OnError != nil {
		m.config.OnError(ctx, call, err)
	}
}
