// Package call has the parts that the protocols of the sidecar share. It reads fields of requests, and determines how a
// caller gets an error. It depends on no protocol.
package call

import (
	"errors"
	"fmt"
	"net/http"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/schedule"
)

// These are the errors of a request or of its caller. FailureOf returns the form in which a caller gets them.
var (
	ErrBadRequest   = errors.New("bad request")
	ErrBusy         = errors.New("the sidecar is busy")
	ErrDraining     = errors.New("the server is shutting down")
	ErrMediaType    = errors.New("the Content-Type must be application/json")
	ErrTooLarge     = errors.New("the request is too large")
	ErrSlow         = errors.New("the request took too long to arrive")
	ErrNoRoute      = errors.New("no such path")
	ErrUnknownLimit = errors.New("no limit has this name")
	ErrForeign      = errors.New("a web page of another origin may not call the sidecar")
	ErrHost         = errors.New("the Host header must be localhost or a loopback address, such as 127.0.0.1")
	ErrMethod       = errors.New("the method is not allowed for this path")

	// ErrUsedMissing is returned for a settlement without the number of used tokens. The sidecar does not guess that
	// number.
	ErrUsedMissing = fmt.Errorf("%w: used: it is missing", ErrBadRequest)
)

// Failure is the form in which a caller gets an error.
type Failure struct {
	Name string // in JSON
	HTTP int
	GRPC codes.Code
}

// failures has the forms of the errors of requests. limit.OutcomeOf has the forms of the SDK's errors.
var failures = []struct {
	err error
	Failure
}{
	{ErrBadRequest, Failure{"bad_request", http.StatusBadRequest, codes.InvalidArgument}},
	{ErrNoRoute, Failure{"no_such_path", http.StatusNotFound, codes.Unimplemented}},
	{ErrUnknownLimit, Failure{"unknown_limit", http.StatusNotFound, codes.NotFound}},
	{schedule.ErrPast, Failure{"past", http.StatusUnprocessableEntity, codes.OutOfRange}},
	{schedule.ErrHorizon, Failure{"beyond_horizon", http.StatusUnprocessableEntity, codes.OutOfRange}},
	{schedule.ErrIDTaken, Failure{"id_in_use", http.StatusConflict, codes.AlreadyExists}},
	{schedule.ErrInvalidID, Failure{"invalid_id", http.StatusBadRequest, codes.InvalidArgument}},
	{schedule.ErrInvalidRange, Failure{"bad_request", http.StatusBadRequest, codes.InvalidArgument}},
	{ErrForeign, Failure{"foreign_origin", http.StatusForbidden, codes.PermissionDenied}},
	{ErrHost, Failure{"foreign_host", http.StatusForbidden, codes.PermissionDenied}},
	{ErrMethod, Failure{"wrong_method", http.StatusMethodNotAllowed, codes.Unimplemented}},
	{ErrSlow, Failure{"slow_request", http.StatusRequestTimeout, codes.DeadlineExceeded}},
	{ErrTooLarge, Failure{"too_large", http.StatusRequestEntityTooLarge, codes.ResourceExhausted}},
	{ErrMediaType, Failure{"wrong_media_type", http.StatusUnsupportedMediaType, codes.InvalidArgument}},
	{ErrBusy, Failure{"busy", http.StatusServiceUnavailable, codes.ResourceExhausted}},
	{ErrDraining, Failure{"shutting_down", http.StatusServiceUnavailable, codes.Unavailable}},
}

// FailureOf returns the form in which a caller gets err.
func FailureOf(err error) Failure {
	for _, f := range failures {
		if errors.Is(err, f.err) {
			return f.Failure
		}
	}
	o := limit.OutcomeOf(err)
	return Failure{o.Code, o.HTTP, codes.Code(o.GRPC)}
}

// GRPCError converts err to an error of gRPC; nil stays nil.
func GRPCError(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(FailureOf(err).GRPC, err.Error())
}
