package call

import "context"

// Asks describes a call that is about to run.
type Asks struct {
	Key   string // of the bucket or limit, as the request has it
	Flow  string // of a take, likewise; empty if the request names none
	Size  int    // bytes of the request
	Waits bool   // the call may wait for tokens
}

// Turn waits until a call may run.
type Turn func(context.Context, Asks) error

type turnKey struct{}

// WithTurn returns a context with which Await waits for turn.
func WithTurn(ctx context.Context, turn Turn) context.Context {
	return context.WithValue(ctx, turnKey{}, turn)
}

// Await waits until the call of ctx may run, which is at once if it has no Turn. It is called after the request has
// been read and checked, and before it has any effect. A call that fails here has had no effect.
func Await(ctx context.Context, a Asks) error {
	turn, ok := ctx.Value(turnKey{}).(Turn)
	if !ok {
		return nil
	}
	return turn(ctx, a)
}
