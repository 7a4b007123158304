package fetch

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
)

// Reason says why a bucket's server did not answer a call.
type Reason uint8

// Why a bucket's server did not answer.
const (
	ReasonNone       Reason = iota
	ReasonDeadline          // no answer in time
	ReasonConnection        // no connection could be made, or it failed
	ReasonPool              // no connection was free, or too many calls waited for one
	ReasonLoading           // LOADING: it reads its data
	ReasonBusy              // BUSY: a script or function runs too long
	ReasonReadOnly          // READONLY: it is a replica
	ReasonMasterDown        // MASTERDOWN, NOREPLICAS: replication is broken
	ReasonMemory            // OOM: it is over its memory limit
	ReasonDisk              // MISCONF: it can't write to its disk
	ReasonCluster           // MOVED, ASK, TRYAGAIN, CLUSTERDOWN, CROSSSLOT: the slot is elsewhere, or nowhere
	ReasonScript            // NOSCRIPT: it forgot the script twice
	ReasonRefused           // any other error, such as NOAUTH and NOPERM
	ReasonDistance          // the call's time was too short for the round trip, so the server may be healthy
	reasons
)

// String names the reason as logs and metrics do.
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

// errorCodes are the words that open an error of Redis. Some show that the server itself is in no state to serve; the
// others are about what was asked, or are answered when it is asked again.
var errorCodes = []struct {
	code   string
	reason Reason
	server bool
}{
	{"LOADING", ReasonLoading, true}, {"BUSY", ReasonBusy, true}, {"READONLY", ReasonReadOnly, true},
	{"MASTERDOWN", ReasonMasterDown, true}, {"NOREPLICAS", ReasonMasterDown, true}, {"OOM", ReasonMemory, true},
	{"MISCONF", ReasonDisk, true}, {"CLUSTERDOWN", ReasonCluster, true}, {"MOVED", ReasonCluster, false},
	{"ASK", ReasonCluster, false}, {"TRYAGAIN", ReasonCluster, false}, {"CROSSSLOT", ReasonCluster, false},
	{"NOSCRIPT", ReasonScript, false},
}

// refusal returns the reason of an error that Redis answered, and whether the server itself is in no state to serve.
func refusal(err error) (why Reason, server bool) {
	for _, c := range errorCodes {
		if redis.HasErrorPrefix(err, c.code+" ") {
			return c.reason, c.server
		}
	}
	return ReasonRefused, false
}

// ReasonOf returns why a call ended with ErrUnavailable; ReasonNone for other errors. It is where every failure of a
// server or its connection is classified.
func ReasonOf(err error) Reason {
	var (
		open    *openError
		far     *distanceError
		refused redis.Error
	)
	switch {
	case !errors.Is(err, ErrUnavailable):
		return ReasonNone
	case errors.As(err, &far):
		return ReasonDistance
	case errors.As(err, &open):
		return open.reason
	case starved(err):
		return ReasonPool
	case timedOut(err):
		return ReasonDeadline
	case errors.As(err, &refused):
		why, _ := refusal(refused)
		return why
	}
	return ReasonConnection
}

// openError is the cause of an ErrUnavailable that no call was made for.
type openError struct{ reason Reason }

func (e *openError) Error() string { return "not asked, since calls fail: " + e.reason.String() }

// evidence returns how the error of a round trip counts for the server: see engine.Sender.
func evidence(err error) error {
	if err == nil || errors.Is(err, redis.Nil) {
		return nil
	}
	var refused redis.Error
	switch {
	case errors.As(err, &refused):
		if _, server := refusal(refused); server {
			return err
		}
		return nil
	case starved(err) || errors.Is(err, context.Canceled) || errors.Is(err, redis.ErrClosed):
		return engine.ErrNoEvidence
	}
	return err
}

// answered reports whether err is an answer of the server about the bucket.
func answered(err error) bool {
	for _, e := range [...]error{
		lua.ErrUnknownBucket, lua.ErrMalformedBucket, lua.ErrBadReply, lua.ErrRequestReused, lua.ErrTooManyBuckets,
		lua.ErrIDInUse, lua.ErrNotHeld, lua.ErrOtherEra, ErrLazyBucket, ErrExceedsCapacity, lua.ErrInvalidAmount,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// failure returns the error of a call that ended. ctx is its caller's.
func failure(ctx context.Context, err error) error {
	if err == nil {
		return nil // before far, which is on the heap
	}
	var far *distanceError
	switch {
	case answered(err) || errors.Is(err, ErrUnavailable):
		return err
	case errors.Is(err, engine.ErrClosed) || errors.Is(err, ErrClosed):
		return ErrClosed
	case errors.Is(err, context.Canceled) && errors.Is(ctx.Err(), context.Canceled):
		return fmt.Errorf("fetch: %w", context.Canceled)
	case errors.As(err, &far):
		return fmt.Errorf("%w: %w", ErrUnavailable, far)
	case timedOut(err) && !starved(err):
		return fmt.Errorf("%w: no answer in time: %w", ErrUnavailable, context.DeadlineExceeded)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// notRun reports whether an error proves that a call did not take effect: the server refused it, or it was never sent.
// A cancellation is noticed only before a call is sent.
func notRun(err error) bool {
	var (
		refused redis.Error
		socket  *net.OpError
	)
	return errors.Is(err, context.Canceled) || errors.As(err, &refused) || starved(err) ||
		errors.Is(err, redis.ErrClosed) ||
		errors.As(err, &socket) && socket.Op == "dial"
}

// timedOut reports whether err is of a deadline, the socket's or a context's.
func timedOut(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// starved reports whether err is of a wait for a connection.
func starved(err error) bool {
	return errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) || errors.Is(err, engine.ErrFull)
}

// unreached reports whether err is not of the server's making: it did not answer.
func unreached(err error) bool {
	var refused redis.Error
	return err != nil && !answered(err) && !errors.As(err, &refused)
}
