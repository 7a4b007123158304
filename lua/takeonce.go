package lua

import (
	"context"
	"errors"
	"fmt"
	"time"
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
	// ErrInvalidRequest is returned for a request id that is empty, longer than
	// MaxRequestIDLen bytes, or has other characters than the printable ones of
	// ASCII without the space; and for a memory that is out of range.
	ErrInvalidRequest = errors.New("refiller: invalid request id")
	// ErrRequestReused is returned for a take whose request id took another number
	// of tokens before. Nothing was taken.
	ErrRequestReused = errors.New("refiller: request id is in use for another take")
)

// CheckRequestID reports whether id can name a request.
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

// RequestKey is the key under which the bucket remembers a request.
func RequestKey(key, id string) string { return "{" + key + "}:req:" + id }

// TakeOnce is Take for a request: however often it is called with the same id
// within the memory, whole milliseconds from MinRequestMemory to
// MaxRequestMemory, the tokens are taken once, and each call after that has the
// answer of the one that took them. A denial takes nothing and is not remembered:
// the request may be made again. The reply to a take that was remembered tells
// the policy of the time of the call. Beside Take's errors there are
// ErrInvalidRequest and ErrRequestReused.
func TakeOnce(ctx context.Context, c Client, key, id string, n int64, memory time.Duration) (TakeReply, error) {
	if err := checkAmount(n); err != nil {
		return TakeReply{}, err
	}
	if err := CheckRequestID(id); err != nil {
		return TakeReply{}, err
	}
	if memory < MinRequestMemory || memory > MaxRequestMemory {
		return TakeReply{}, fmt.Errorf("%w: memory of %s; want %s to %s", ErrInvalidRequest, memory, MinRequestMemory, MaxRequestMemory)
	}
	v, err := onceScript.run(ctx, c, append(bucketKeys(key), RequestKey(key, id)), n, memory.Milliseconds())
	if err != nil {
		return TakeReply{}, err
	}
	r, code, err := open(v, key, codeDone, codeDenied, codeReused, codeMalformed)
	if err != nil {
		return TakeReply{}, err
	}
	switch code {
	case codeDone:
		reply := TakeReply{OK: true, Taken: n, Remaining: r.int(), Terms: r.terms()}
		return reply, r.end()
	case codeReused:
		took := r.int()
		if err := r.end(); err != nil {
			return TakeReply{}, err
		}
		return TakeReply{}, fmt.Errorf("%w: %q took %d tokens of bucket %q, not %d", ErrRequestReused, id, took, key, n)
	case codeMalformed:
		k := r.int()
		if err := r.end(); err != nil {
			return TakeReply{}, err
		}
		if k == 4 {
			return TakeReply{}, fmt.Errorf("%w %q: the key %q does not hold a request", ErrMalformedBucket, key, RequestKey(key, id))
		}
		return TakeReply{}, malformed(key, k)
	}
	return r.denial()
}
