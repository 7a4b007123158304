package fetch

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// Reason says why a bucket's server did not answer a call.
type Reason uint8

// Why a bucket's server did not answer.
const (
	ReasonNone       Reason = iota
	ReasonDeadline          // no answer in time
	ReasonConnection        // no connection could be made, or it failed
	ReasonPool              // no connection was free
	ReasonLoading           // LOADING: it reads its data
	ReasonBusy              // BUSY: a script or function runs too long
	ReasonReadOnly          // READONLY: it is a replica
	ReasonMasterDown        // MASTERDOWN, NOREPLICAS: replication is broken
	ReasonMemory            // OOM: it is over its memory limit
	ReasonDisk              // MISCONF: it can't write to its disk
	ReasonCluster           // MOVED, ASK, TRYAGAIN, CLUSTERDOWN, CROSSSLOT: the slot is elsewhere, or nowhere
	ReasonScript            // NOSCRIPT: it forgot the script twice
	ReasonRefused           // any other error, such as NOAUTH and NOPERM
	reasons
)

// String names the reason as logs and metrics do.
func (r Reason) String() string {
	names := [...]string{
		"none", "deadline", "connection", "pool", "loading", "busy", "readonly", "masterdown", "memory", "disk", "cluster", "script", "refused",
	}
	if int(r) >= len(names) {
		return "invalid"
	}
	return names[r]
}

// errorCodes are the words that open an error of Redis.
var errorCodes = []struct {
	code   string
	reason Reason
}{
	{"LOADING", ReasonLoading}, {"BUSY", ReasonBusy}, {"READONLY", ReasonReadOnly}, {"MASTERDOWN", ReasonMasterDown}, {"NOREPLICAS", ReasonMasterDown},
	{"OOM", ReasonMemory}, {"MISCONF", ReasonDisk}, {"MOVED", ReasonCluster}, {"ASK", ReasonCluster}, {"TRYAGAIN", ReasonCluster},
	{"CLUSTERDOWN", ReasonCluster}, {"CROSSSLOT", ReasonCluster}, {"NOSCRIPT", ReasonScript},
}

// ReasonOf tells why a call ended with ErrUnavailable; ReasonNone for other
// errors. It is where every failure of a server or its connection is classified.
func ReasonOf(err error) Reason {
	var (
		shut    *shutError
		refused redis.Error
	)
	switch {
	case !errors.Is(err, ErrUnavailable):
		return ReasonNone
	case errors.As(err, &shut):
		return shut.reason
	case starved(err):
		return ReasonPool
	case timedOut(err):
		return ReasonDeadline
	case errors.As(err, &refused):
		for _, c := range errorCodes {
			if redis.HasErrorPrefix(refused, c.code+" ") {
				return c.reason
			}
		}
		return ReasonRefused
	}
	return ReasonConnection
}

// answered reports whether err is an answer of the server about the bucket.
func answered(err error) bool {
	return errors.Is(err, lua.ErrUnknownBucket) || errors.Is(err, lua.ErrMalformedBucket) || errors.Is(err, lua.ErrBadReply) ||
		errors.Is(err, lua.ErrRequestReused) || errors.Is(err, lua.ErrTooManyBuckets) || errors.Is(err, lua.ErrIDInUse) || errors.Is(err, lua.ErrNotHeld) ||
		errors.Is(err, lua.ErrOtherEra)
}

// failure is the error of a call that ended.
func failure(err error) error {
	switch {
	case err == nil || answered(err):
		return err
	case timedOut(err) && !starved(err):
		return fmt.Errorf("%w: no answer in time: %w", ErrUnavailable, context.DeadlineExceeded)
	}
	return fmt.Errorf("%w: %w", ErrUnavailable, err)
}

// notRun reports whether an error proves that a call did not take effect: the
// server refused it, or it was never sent. A cancellation is noticed only before
// a call is sent.
func notRun(err error) bool {
	var (
		refused redis.Error
		socket  *net.OpError
	)
	return errors.Is(err, errUnsent) || errors.Is(err, context.Canceled) || errors.As(err, &refused) || errors.As(err, &socket) && socket.Op == "dial" ||
		starved(err) || errors.Is(err, redis.ErrClosed)
}

// timedOut reports whether err is of a deadline, the socket's or a context's.
func timedOut(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

// starved reports whether err is of a wait for a connection.
func starved(err error) bool {
	return errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted)
}
