package sidecar

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tokenrefill/refiller/fetch"
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

// failures is looked through in order: an unavailable Redis counts before the
// deadline that it caused.
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
	{fetch.ErrInvalidKey, failure{"invalid_key", http.StatusBadRequest, codes.InvalidArgument}},
	{fetch.ErrInvalidAmount, failure{"invalid_amount", http.StatusBadRequest, codes.InvalidArgument}},
	{fetch.ErrInvalidTTL, failure{"invalid_ttl", http.StatusBadRequest, codes.InvalidArgument}},
	{fetch.ErrInvalidID, failure{"invalid_id", http.StatusBadRequest, codes.InvalidArgument}},
	{fetch.ErrUnknownBucket, failure{"unknown_bucket", http.StatusNotFound, codes.NotFound}},
	{fetch.ErrLazyBucket, failure{"lazy_bucket", http.StatusUnprocessableEntity, codes.FailedPrecondition}},
	{fetch.ErrTooManyBuckets, failure{"too_many_buckets", http.StatusTooManyRequests, codes.ResourceExhausted}},
	{fetch.ErrExceedsCapacity, failure{"exceeds_capacity", http.StatusUnprocessableEntity, codes.OutOfRange}},
	{fetch.ErrMalformedBucket, failure{"malformed_bucket", http.StatusConflict, codes.FailedPrecondition}},
	{fetch.ErrIDInUse, failure{"id_in_use", http.StatusConflict, codes.AlreadyExists}},
	{fetch.ErrNotHeld, failure{"not_held", http.StatusNotFound, codes.NotFound}},
	{fetch.ErrUnavailable, failure{"unavailable", http.StatusServiceUnavailable, codes.Unavailable}},
	{fetch.ErrClosed, failure{"shutting_down", http.StatusServiceUnavailable, codes.Unavailable}},
	{context.DeadlineExceeded, failure{"deadline", http.StatusGatewayTimeout, codes.DeadlineExceeded}},
	{context.Canceled, failure{"cancelled", http.StatusServiceUnavailable, codes.Canceled}},
}

// unforeseen is what is nobody's fault but ours.
var unforeseen = failure{"internal", http.StatusInternalServerError, codes.Internal}

func failureOf(err error) failure {
	for _, f := range failures {
		if errors.Is(err, f.err) {
			return f.failure
		}
	}
	return unforeseen
}

// grpcError is err as gRPC sends it; nil stays nil.
func grpcError(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(failureOf(err).GRPC, err.Error())
}
