package limit

import (
	"context"
	"errors"
	"net/http"

	"github.com/tokenrefill/refiller/fetch"
)

// Outcome is the response of a server to a caller if no decision about the caller's tokens could be made. The
// middlewares and the sidecar get it from [OutcomeOf]. If Open is set, the caller has not caused the error. A
// middleware then responds that it is unavailable, whatever the field HTTP is. Otherwise it would respond with 404 if a
// bucket is missing, as if the page were missing.
type Outcome struct {
	Code string // a word that programs can compare
	HTTP int    // the status
	GRPC uint32 // the status, as google.golang.org/grpc/codes numbers it
	// Open reports whether a server that fails open lets the caller pass. It is false if the caller caused the error. It
	// is also false if letting the caller pass would turn the limit off, as with a flood of new keys that a template
	// refuses.
	Open bool
}

// The codes of gRPC that occur here.
const (
	canceled           = 1
	invalidArgument    = 3
	deadlineExceeded   = 4
	notFound           = 5
	alreadyExists      = 6
	resourceExhausted  = 8
	failedPrecondition = 9
	outOfRange         = 11
	internal           = 13
	unavailable        = 14
)

// outcomes is searched in this order, because an error may match several entries. An unavailable Redis comes before the
// deadline that it caused, and a bad id before the option that has it.
var outcomes = []struct {
	err error
	Outcome
}{
	{fetch.ErrInvalidKey, Outcome{"invalid_key", http.StatusBadRequest, invalidArgument, false}},
	{fetch.ErrInvalidAmount, Outcome{"invalid_amount", http.StatusBadRequest, invalidArgument, false}},
	{fetch.ErrInvalidTTL, Outcome{"invalid_ttl", http.StatusBadRequest, invalidArgument, false}},
	{fetch.ErrInvalidID, Outcome{"invalid_id", http.StatusBadRequest, invalidArgument, false}},
	{fetch.ErrInvalidOption, Outcome{"invalid_option", http.StatusBadRequest, invalidArgument, false}},
	{fetch.ErrUnknownBucket, Outcome{"unknown_bucket", http.StatusNotFound, notFound, true}},
	{fetch.ErrLazyBucket, Outcome{"lazy_bucket", http.StatusUnprocessableEntity, failedPrecondition, true}},
	{fetch.ErrTooManyBuckets, Outcome{"too_many_buckets", http.StatusTooManyRequests, resourceExhausted, false}},
	{fetch.ErrExceedsCapacity, Outcome{"exceeds_capacity", http.StatusUnprocessableEntity, outOfRange, false}},
	{fetch.ErrMalformedBucket, Outcome{"malformed_bucket", http.StatusConflict, failedPrecondition, true}},
	{fetch.ErrIDInUse, Outcome{"id_in_use", http.StatusConflict, alreadyExists, false}},
	{fetch.ErrRequestReused, Outcome{"request_reused", http.StatusConflict, alreadyExists, false}},
	{fetch.ErrNotHeld, Outcome{"not_held", http.StatusNotFound, notFound, false}},
	{fetch.ErrUnavailable, Outcome{"unavailable", http.StatusServiceUnavailable, unavailable, true}},
	{fetch.ErrClosed, Outcome{"shutting_down", http.StatusServiceUnavailable, unavailable, true}},
	{context.DeadlineExceeded, Outcome{"deadline", http.StatusGatewayTimeout, deadlineExceeded, true}},
	{context.Canceled, Outcome{"cancelled", http.StatusServiceUnavailable, canceled, true}},
}

// OutcomeOf returns the outcome of an error of a [Limiter] or of a fetch.Client. An unknown error is the server's
// fault: "internal".
func OutcomeOf(err error) Outcome {
	for _, o := range outcomes {
		if errors.Is(err, o.err) {
			return o.Outcome
		}
	}
	return Outcome{"internal", http.StatusInternalServerError, internal, true}
}
