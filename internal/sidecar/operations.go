package sidecar

import (
	"fmt"
	"net/http"
	"net/url"
	"time"
	"unicode/utf8"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/answer"
	"github.com/tokenrefill/refiller/policy"
)

// amount is the body of a return, and a member of a take of several buckets.
type amount struct {
	key    string
	tokens int64
}

func (r *amount) fields() fields {
	r.tokens = 1
	return fields{"key": &r.key, "tokens": &r.tokens}
}

// takeRequest is the body of a take.
type takeRequest struct {
	amount
	leave string
}

func (r *takeRequest) fields() fields {
	f := r.amount.fields()
	f["leave"] = &r.leave
	return f
}

func (f *front) take(w http.ResponseWriter, r *http.Request) (any, error) {
	var req takeRequest
	if err := f.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	opts, err := leave(req.leave)
	if err != nil {
		return nil, err
	}
	res, err := f.client.Take(r.Context(), req.key, req.tokens, opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewResult(req.key, res), nil
}

// takeAllRequest is the body of a take of several buckets.
type takeAllRequest struct {
	requests []*amount
	leave    string
}

func (r *takeAllRequest) fields() fields {
	return fields{"leave": &r.leave, "requests": objects(func() fields {
		r.requests = append(r.requests, new(amount))
		return r.requests[len(r.requests)-1].fields()
	})}
}

func (f *front) takeAll(w http.ResponseWriter, r *http.Request) (any, error) {
	var req takeAllRequest
	if err := f.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	reqs := make([]fetch.Request, len(req.requests))
	for i, one := range req.requests {
		reqs[i] = fetch.Request{Key: one.key, N: one.tokens}
	}
	opts, err := leave(req.leave)
	if err != nil {
		return nil, err
	}
	res, err := f.client.TakeAll(r.Context(), reqs, opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewAll(reqs, res), nil
}

func (f *front) giveBack(w http.ResponseWriter, r *http.Request) (any, error) {
	var req amount
	if err := f.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	if err := f.client.Return(r.Context(), req.key, req.tokens); err != nil {
		return nil, err
	}
	return answer.Return{Key: req.key, Tokens: req.tokens}, nil
}

func (f *front) peek(_ http.ResponseWriter, r *http.Request) (any, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("%w: query: %w", errBadRequest, err)
	}
	for name, values := range query {
		if name != "key" || len(values) != 1 {
			return nil, fmt.Errorf("%w: query: want key once and nothing else", errBadRequest)
		}
	}
	key := query.Get("key")
	if !utf8.ValidString(key) {
		return nil, fmt.Errorf("%w: key: it is not UTF-8", errBadRequest)
	}
	res, err := f.client.Peek(r.Context(), key)
	if err != nil {
		return nil, err
	}
	return answer.NewResult(key, res), nil
}

// waitRequest is the body of a wait.
type waitRequest struct {
	takeRequest
	timeoutMS int64
}

func (r *waitRequest) fields(longest time.Duration) fields {
	r.timeoutMS = longest.Milliseconds()
	f := r.takeRequest.fields()
	f["timeout_ms"] = &r.timeoutMS
	return f
}

func (f *front) wait(w http.ResponseWriter, r *http.Request) (any, error) {
	var req waitRequest
	if err := f.read(w, r, req.fields(f.limits.Wait)); err != nil {
		return nil, err
	}
	if most := f.limits.Wait.Milliseconds(); req.timeoutMS < 1 || req.timeoutMS > most {
		return nil, fmt.Errorf("%w: timeout_ms: %d is not from 1 to %d", errBadRequest, req.timeoutMS, most)
	}
	opts, err := leave(req.leave)
	if err != nil {
		return nil, err
	}
	timeout := time.Duration(req.timeoutMS) * time.Millisecond
	if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(timeout + f.limits.Patience)); err != nil {
		return nil, fmt.Errorf("sidecar: extend the time to write: %w", err)
	}
	ok, waited, err := wait(r.Context(), f.client, req.key, req.tokens, timeout, opts)
	if err != nil {
		return nil, err
	}
	res := answer.Wait{Key: req.key, OK: ok, WaitedMS: waited.Milliseconds()}
	if ok {
		res.Taken = req.tokens
	}
	return res, nil
}

// reserveRequest is the body of a reservation.
type reserveRequest struct {
	takeRequest
	ttlMS   int64
	id      *string // nil: the SDK chooses one
	overrun string
}

func (r *reserveRequest) fields() fields {
	r.overrun = overruns[policy.OverrunClamp]
	f := r.takeRequest.fields()
	f["ttl_ms"], f["id"], f["overrun"] = &r.ttlMS, &r.id, &r.overrun
	return f
}

// overruns are the names of what becomes of tokens that were used beyond a
// reservation.
var overruns = map[policy.Overrun]string{policy.OverrunClamp: "clamp", policy.OverrunDebt: "debt"}

func (f *front) reserve(w http.ResponseWriter, r *http.Request) (any, error) {
	var req reserveRequest
	if err := f.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	longest := policy.MaxHold.Milliseconds()
	if req.ttlMS < 1 || req.ttlMS > longest {
		return nil, fmt.Errorf("%w: ttl_ms: %d is not from 1 to %d", fetch.ErrInvalidTTL, req.ttlMS, longest)
	}
	opts, err := leave(req.leave)
	if err != nil {
		return nil, err
	}
	known := false
	for overrun, name := range overruns {
		if name == req.overrun {
			opts, known = append(opts, fetch.WithOverrun(overrun)), true
		}
	}
	if !known {
		return nil, fmt.Errorf("%w: overrun: %q is neither clamp nor debt", errBadRequest, req.overrun)
	}
	if req.id != nil {
		opts = append(opts, fetch.WithReservationID(*req.id))
	}
	res, err := f.client.Reserve(r.Context(), req.key, req.tokens, time.Duration(req.ttlMS)*time.Millisecond, opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewReservation(res), nil
}

// settleRequest is the body of a settlement, and without the tokens used of a
// cancellation.
type settleRequest struct {
	key, id string
	used    *int64 // nil: the request doesn't say
}

func (r *settleRequest) fields() fields {
	return fields{"key": &r.key, "id": &r.id, "used": &r.used}
}

func (r *settleRequest) cancelFields() fields {
	f := r.fields()
	delete(f, "used")
	return f
}

func (f *front) settle(w http.ResponseWriter, r *http.Request) (any, error) {
	var req settleRequest
	if err := f.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	if req.used == nil {
		return nil, errUsedMissing
	}
	return f.end(r, req.key, req.id, *req.used)
}

func (f *front) cancel(w http.ResponseWriter, r *http.Request) (any, error) {
	var req settleRequest
	if err := f.read(w, r, req.cancelFields()); err != nil {
		return nil, err
	}
	return f.end(r, req.key, req.id, 0)
}

// end ends a reservation of which so many tokens were used.
func (f *front) end(r *http.Request, key, id string, used int64) (any, error) {
	res, err := f.client.Settle(r.Context(), key, id, used)
	if err != nil {
		return nil, err
	}
	return answer.NewSettlement(key, id, res), nil
}
