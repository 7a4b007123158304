package fetch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
)

// Reason is the reason for which a bucket's server did not answer a call.
type Reason uint8

// The reasons for which a bucket's server did not answer.
const (
	ReasonNone       Reason = iota
	ReasonDeadline          // no answer in time
	ReasonConnection        // no connection could be made, or it failed
	ReasonPool              // no connection was free, or too many calls waited for one
	ReasonLoading           // LOADING: the server reads its data
	ReasonBusy              // BUSY: a script or function runs too long
	ReasonReadOnly          // READONLY: the server is a replica
	ReasonMasterDown        // MASTERDOWN, NOREPLICAS: replication is broken
	ReasonMemory            // OOM: the server is over its memory limit
	ReasonDisk              // MISCONF: the server can't write to its disk
	ReasonCluster           // MOVED, ASK, TRYAGAIN, CLUSTERDOWN, CROSSSLOT: the server can't serve the keys' slot
	ReasonScript            // NOSCRIPT: the server lost the script twice
	ReasonRefused           // any other error, such as NOAUTH and NOPERM
	ReasonDistance          // the call's time was too short for the round trip, so the server may be healthy
	reasons
)

// String returns the name of the reason in logs and metrics.
func (r Reason) String() string {
	names := [...]string{
		"none", "deadline", "connection", "pool", "loading", "busy", "readonly", "masterdown", "memory", "disk", "cluster",
		"script", "refused", "distance",
	}
	if int(r) >= len(names) {
		return "invalid"
	}
	return names[r]
}

// errorCodes are the words with which errors of Redis begin, and their causes. The errors with the reach unfit show
// that the server itself can't serve calls. The others concern only one call, or don't occur again when the call is
// repeated.
var errorCodes = []struct {
	code  string
	cause cause
}{
	{"LOADING", cause{ReasonLoading, unfit}}, {"BUSY", cause{ReasonBusy, unfit}},
	{"READONLY", cause{ReasonReadOnly, unfit}}, {"MASTERDOWN", cause{ReasonMasterDown, unfit}},
	{"NOREPLICAS", cause{ReasonMasterDown, unfit}}, {"OOM", cause{ReasonMemory, unfit}},
	{"MISCONF", cause{ReasonDisk, unfit}}, {"CLUSTERDOWN", cause{ReasonCluster, unfit}},
	{"MOVED", cause{ReasonCluster, rejected}}, {"ASK", cause{ReasonCluster, rejected}},
	{"TRYAGAIN", cause{ReasonCluster, rejected}}, {"CROSSSLOT", cause{ReasonCluster, rejected}},
	{"NOSCRIPT", cause{ReasonScript, rejected}},
}

// cause is the classification of the error of a call. Everything that is done about an error follows from its cause.
type cause struct {
	reason Reason // ReasonNone: it is not the server's fault
	reach  reach
}

// reach is the progress of a call.
type reach uint8

const (
	answered    reach = iota // the server answered, perhaps with an error about the bucket
	rejected                 // the server refused the call, which did not run
	unfit                    // the server refused it because of its own state
	unsent                   // it was not sent, which shows nothing about the server
	unconnected              // no connection could be made
	lost                     // it may have run, but there is no answer
)

// causeOf classifies an error. Other functions only check a single property of an error, such as timedOut or the code
// NOPERM.
func causeOf(err error) cause {
	if err == nil { // before the variables, since they are allocated on the heap
		return cause{}
	}
	var (
		redisError redis.Error
		far        *distanceError
		open       *openError
		socket     *net.OpError
	)
	switch {
	case slices.ContainsFunc(answers, func(answer error) bool { return errors.Is(err, answer) }):
		return cause{}
	case errors.As(err, &redisError):
		for _, c := range errorCodes {
			if redis.HasErrorPrefix(redisError, c.code+" ") {
				return c.cause
			}
		}
		return cause{ReasonRefused, rejected}
	case errors.As(err, &far):
		return cause{ReasonDistance, lost}
	case errors.As(err, &open):
		return cause{open.reason, unsent}
	case errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) || errors.Is(err, engine.ErrFull):
		return cause{ReasonPool, unsent}
	case errors.Is(err, engine.ErrClosed) || errors.Is(err, ErrClosed):
		return cause{ReasonNone, unsent}
	case errors.Is(err, redis.ErrClosed) || errors.Is(err, context.Canceled): // before it was sent
		return cause{ReasonConnection, unsent}
	}
	c := cause{ReasonConnection, lost}
	if timedOut(err) {
		c.reason = ReasonDeadline
	}
	if errors.As(err, &socket) && socket.Op == "dial" {
		c.reach = unconnected
	}
	return c
}

// answers are the errors that are answers of a server, or of this package, about a bucket.
var answers = []error{
	lua.ErrUnknownBucket, lua.ErrMalformedBucket, lua.ErrBadReply, lua.ErrRequestReused, lua.ErrTooManyBuckets,
	lua.ErrIDInUse, lua.ErrNotHeld, lua.ErrOtherEra, ErrLazyBucket, ErrExceedsCapacity, lua.ErrInvalidAmount,
}

// timedOut reports whether err means that the deadline of a socket or of a context has passed.
func timedOut(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// ReasonOf returns the reason for which a call ended with ErrUnavailable, and ReasonNone for other errors.
func ReasonOf(err error) Reason {
	if !errors.Is(err, ErrUnavailable) {
		return ReasonNone
	}
	return causeOf(err).reason
}

// openError is the cause of an ErrUnavailable if no call was made, because the breaker is open.
type openError struct{ reason Reason }

func (e *openError) Error() string { return "not asked, since calls fail: " + e.reason.String() }

// evidence converts the error of a round trip to the error that an engine.Sender has to return for it.
func evidence(err error) error {
	switch causeOf(err).reach {
	case answered, rejected:
		return nil
	case unsent:
		return engine.ErrNoEvidence
	}
	return err
}

// failure converts the error of a call to the error that its caller gets. ctx is the context of the caller.
func failure(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	c := causeOf(err)
	switch {
	case c.reach == answered || errors.Is(err, ErrUnavailable):
		return err
	case c.reason == ReasonNone: // and it isn't an answer, so something was closed
		return ErrClosed
	case errors.Is(err, context.Canceled) && errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("fetch: %w", context.Canceled)
	case c.reason == ReasonDeadline:
		return fmt.Errorf("%w: no answer in time: %w", ErrUnavailable, context.DeadlineExceeded)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}
