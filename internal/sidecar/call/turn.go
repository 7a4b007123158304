package call

import "context"

// Asks describes a call that is about to run.
type Asks struct {
	Key     string // of the bucket or limit, as it is in the request
	Flow    string // of a take, as it is in the request; empty if the request names none
	Size    int    // bytes of the request
	MayWait bool   // the call may wait for tokens
}

// Turn waits until a call may run.
type Turn func(context.Context, Asks) error

type turnKey struct{}

// WithTurn returns a context with which Await waits for turn.
func WithTurn(ctx context.Context, turn Turn) context.Context {
	return context.WithValue(ctx, turnKey{}, turn)
}

// Await waits until the call of ctx may run. If ctx has no Turn, the call may run at once. Await must be called after
// the request was read and checked, and before it has any effect. So a call that fails here has had no effect.
func Await(ctx context.Context, a Asks) error {
	turn, ok := ctx.Value(turnKey{}).(Turn)
	if !ok {
		return nil
	}
	return turn(ctx, a)
}
