package lua

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/policy"
)

// Limits of a request.
const (
	// MaxRequestIDLen is the length of the longest request id, in bytes.
	MaxRequestIDLen = 128
	// MinRequestMemory and MaxRequestMemory bound how long a request is
	// remembered.
	MinRequestMemory = time.Millisecond
	MaxRequestMemory = 7 * 24 * time.Hour
)

var (
	// ErrInvalidRequest is returned for a memory that is out of range, and for an invalid request id. An id has 1 to
	// MaxRequestIDLen bytes, all of them printable ASCII characters other than the space.
	ErrInvalidRequest = errors.New("refiller: invalid request id")
	// ErrRequestReused is returned for a take whose request id was used for another take before. The takes differ in the
	// number of tokens to take or to leave, in the flow, or in the buckets. Nothing was taken.
	ErrRequestReused = errors.New("refiller: request id is in use for another take")
)

// CheckRequestID returns an error if id can't name a request.
func CheckRequestID(id string) error {
	if id == "" || len(id) > MaxRequestIDLen {
		return fmt.Errorf("%w: it has %d bytes; want 1 to %d", ErrInvalidRequest, len(id), MaxRequestIDLen)
	}
	for i := range len(id) {
		if id[i] <= ' ' || id[i] > '~' {
			return fmt.Errorf("%w %q: want printable ASCII without spaces", ErrInvalidRequest, id)
		}
	}
	return nil
}

// requestInfix separates the bucket from the id of a request in the request's key.
const requestInfix = ":req:"

// TakeOnce makes a take for a request. If it is called several times with the same id, the tokens are taken once. Each
// later call gets the reply of the call that took them. The id is remembered for memory, in whole milliseconds from
// MinRequestMemory to MaxRequestMemory. The run is one take: its Count is 1, unless it is UpTo. A denial takes nothing
// and is not remembered, so the request may be made again. The errors are those of Take, ErrInvalidRequest and
// ErrRequestReused.
func TakeOnce(ctx context.Context, c Client, key, id string, run policy.Run, memory time.Duration) (TakeReply, error) {
	return TakeOnceFor(ctx, c, key, Flow{}, id, run, memory)
}

// TakeOnceFor is like TakeOnce, for a flow of the bucket. If the id was used for another flow, the error is
// ErrRequestReused.
func TakeOnceFor(ctx context.Context, c Client, key string, flow Flow, id string, run policy.Run,
	memory time.Duration) (TakeReply, error) {
	n := run.N * run.Count
	if _, err := totalOf([]policy.Run{run}); err != nil {
		return TakeReply{}, err
	}
	if run.Count != 1 && !run.UpTo {
		return TakeReply{}, fmt.Errorf("%w: %d takes for one request", ErrInvalidAmount, run.Count)
	}
	if err := checkRequest(id, memory); err != nil {
		return TakeReply{}, err
	}
	if err := policy.CheckFlow(flow.Name); err != nil {
		return TakeReply{}, err
	}
	args := append(appendRuns(make([]any, 0, 5), []policy.Run{run}), memory.Milliseconds(), flow.Name)
	keys := flow.appendKeys([]string{TokensKey(key), ControlKey(key), RequestKey(key, id)}, key)
	r, code, err := takeOnceScript.ask(ctx, c, keys, args, codeDone, codeDenied, codeReused)
	if IsTryAgain(err) && flow.Divided {
		return TakeOnceFor(ctx, c, key, Flow{Name: flow.Name}, id, run, memory)
	}
	if err != nil {
		return TakeReply{}, err
	}
	switch code {
	case codeDone:
		reply := TakeReply{OK: true, Remaining: r.Int(), Taken: r.Int()}
		reply.Version.Era = r.Int()
		reply.Repeated = r.Int() == 1
		reply.Terms = r.terms()
		reply.Paid = r.Int()
		return reply, r.End()
	case codeReused:
		return TakeReply{}, r.fail(fmt.Errorf("%w: %q of bucket %q asked for something else than %d tokens for flow %q",
			ErrRequestReused, id, key, n, flow.Name))
	}
	return r.denial()
}

func checkRequest(id string, memory time.Duration) error {
	if err := CheckRequestID(id); err != nil {
		return err
	}
	if memory < MinRequestMemory || memory > MaxRequestMemory {
		return fmt.Errorf("%w: memory of %s; want %s to %s", ErrInvalidRequest, memory, MinRequestMemory, MaxRequestMemory)
	}
	return nil
}
