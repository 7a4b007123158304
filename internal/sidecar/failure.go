package sidecar

import (
	"errors"
	"fmt"
	"net/http"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tokenrefill/refiller/limit"
)

var (
	errBadRequest = errors.New("bad request")
	errBusy       = errors.New("this client has too many calls under way")
	errDraining   = errors.New("the server is shutting down")
	errMediaType  = errors.New("want content-type application/json")
	errTooLarge   = errors.New("the request is too large")
	errSlow       = errors.New("the request took too long to arrive")
	errNoRoute    = errors.New("no such path")
	errMethod     = errors.New("another method is wanted")

	// errUsedMissing refuses a settlement that doesn't say what was used: to give all
	// back would be a guess.
	errUsedMissing = fmt.Errorf("%w: used: it is missing", errBadRequest)
)

// failure is how an error looks to a caller.
type failure struct {
	Name string // in JSON
	HTTP int
	GRPC codes.Code
}

// errorResult is the body of an answer over HTTP that says what failed.
type errorResult struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// failures are those of requests; what the SDK answers is in limit.OutcomeOf.
var failures = []struct {
	err error
	failure
}{
	{errBadRequest, failure{"bad_request", http.StatusBadRequest, codes.InvalidArgument}},
	{errNoRoute, failure{"no_such_path", http.StatusNotFound, codes.Unimplemented}},
	{errMethod, failure{"wrong_method", http.StatusMethodNotAllowed, codes.Unimplemented}},
	{errSlow, failure{"slow_request", http.StatusRequestTimeout, codes.DeadlineExceeded}},
	{errTooLarge, failure{"too_large", http.StatusRequestEntityTooLarge, codes.ResourceExhausted}},
	{errMediaType, failure{"wrong_media_type", http.StatusUnsupportedMediaType, codes.InvalidArgument}},
	{errBusy, failure{"too_many_calls", http.StatusTooManyRequests, codes.ResourceExhausted}},
	{errDraining, failure{"shutting_down", http.StatusServiceUnavailable, codes.Unavailable}},
}

func failureOf(err error) failure {
	for _, f := range failures {
		if errors.Is(err, f.err) {
			return f.failure
		}
	}
	o := limit.OutcomeOf(err)
	return failure{o.Code, o.HTTP, codes.Code(o.GRPC)}
}

// grpcError is err as gRPC sends it; nil stays nil.
func grpcError(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(failureOf(err).GRPC, err.Error())
}
