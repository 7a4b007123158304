package httpapi

import (
	"fmt"
	"net/http"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/policy"
)

// amount has the members of a body that name a key and a number of tokens.
type amount struct {
	key    string
	tokens int64
}

func (r *amount) fields() fields {
	r.tokens = 1
	return fields{"key": &r.key, "tokens": &r.tokens}
}

// terms are the members that takes, waits and reservations share.
type terms struct {
	amount
	leave string
	flow  *string // nil if the request names no flow
}

func (r *terms) fields() fields {
	f := r.amount.fields()
	f["leave"] = &r.leave
	f["flow"] = &r.flow
	return f
}

// takeRequest is the body of a take.
type takeRequest struct {
	terms
	requestID *string // nil if the take has no id
}

func (r *takeRequest) fields() fields {
	f := r.terms.fields()
	f["request_id"] = &r.requestID
	return f
}

func (h *Handler) take(w http.ResponseWriter, r *http.Request) (any, error) {
	var req takeRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	opts, err := call.Options(req.leave, req.flow, req.requestID)
	if err != nil {
		return nil, err
	}
	res, err := h.config.Client.Take(r.Context(), req.key, req.tokens, opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewResult(req.key, res), nil
}

// takeAllRequest is the body of a take of several buckets.
type takeAllRequest struct {
	requests  []*partRequest
	leave     string
	requestID *string // nil if the take has no id
}

// partRequest is a member of a take of several buckets.
type partRequest struct {
	amount
	flow *string // nil if the request names no flow
}

func (r *partRequest) fields() fields {
	f := r.amount.fields()
	f["flow"] = &r.flow
	return f
}

func (r *takeAllRequest) fields() fields {
	return fields{"leave": &r.leave, "request_id": &r.requestID, "requests": objects(func() fields {
		r.requests = append(r.requests, new(partRequest))
		return r.requests[len(r.requests)-1].fields()
	})}
}

func (h *Handler) takeAll(w http.ResponseWriter, r *http.Request) (any, error) {
	var req takeAllRequest
	size, err := h.parse(w, r, req.fields())
	if err != nil {
		return nil, err
	}
	reqs := make([]fetch.Request, len(req.requests))
	for i, one := range req.requests {
		reqs[i] = fetch.Request{Key: one.key, N: one.tokens}
		reqs[i].Flow, err = call.FlowName(one.flow)
		if err != nil {
			return nil, err
		}
	}
	opts, err := call.Options(req.leave, nil, req.requestID)
	if err != nil {
		return nil, err
	}
	asks := call.Asks{Size: size}
	if len(reqs) > 0 {
		asks.Key = reqs[0].Key
	}
	if err := call.Await(r.Context(), asks); err != nil {
		return nil, err
	}
	res, err := h.config.Client.TakeAll(r.Context(), reqs, opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewAll(reqs, res), nil
}

// returnRequest is the body of a return.
type returnRequest struct {
	amount
	source string // the source in the reply that granted the tokens
}

func (r *returnRequest) fields() fields {
	f := r.amount.fields()
	f["source"] = &r.source
	return f
}

func (h *Handler) giveBack(w http.ResponseWriter, r *http.Request) (any, error) {
	var req returnRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	if err := call.Returnable(req.source); err != nil {
		return nil, err
	}
	if err := h.config.Client.Return(r.Context(), req.key, req.tokens); err != nil {
		return nil, err
	}
	return answer.Return{Key: req.key, Tokens: req.tokens}, nil
}

func (h *Handler) peek(_ http.ResponseWriter, r *http.Request) (any, error) {
	key, err := onlyKey(r)
	if err != nil {
		return nil, err
	}
	res, err := h.config.Client.Peek(r.Context(), key)
	if err != nil {
		return nil, err
	}
	return answer.NewResult(key, res), nil
}

// waitRequest is the body of a wait.
type waitRequest struct {
	terms
	timeoutMS int64
}

func (r *waitRequest) fields(longest time.Duration) fields {
	r.timeoutMS = longest.Milliseconds()
	f := r.terms.fields()
	f["timeout_ms"] = &r.timeoutMS
	return f
}

func (h *Handler) wait(w http.ResponseWriter, r *http.Request) (any, error) {
	var req waitRequest
	if err := h.read(w, r, req.fields(h.config.Wait)); err != nil {
		return nil, err
	}
	if most := h.config.Wait.Milliseconds(); req.timeoutMS < 1 || req.timeoutMS > most {
		return nil, fmt.Errorf("%w: timeout_ms: %d is not from 1 to %d", call.ErrBadRequest, req.timeoutMS, most)
	}
	opts, err := call.Options(req.leave, req.flow, nil)
	if err != nil {
		return nil, err
	}
	timeout := time.Duration(req.timeoutMS) * time.Millisecond
	if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(timeout + h.config.Patience)); err != nil {
		return nil, fmt.Errorf("sidecar: extend the time to write: %w", err)
	}
	res, waited, err := call.Wait(r.Context(), h.config.Client, req.key, req.tokens, timeout, opts)
	if err != nil {
		return nil, err
	}
	return answer.NewWait(req.key, res, waited), nil
}

// reserveRequest is the body of a reservation.
type reserveRequest struct {
	terms
	ttlMS   int64
	id      *string // nil if the SDK chooses one
	overrun string
}

func (r *reserveRequest) fields() fields {
	r.overrun = overruns[policy.OverrunClamp]
	f := r.terms.fields()
	f["ttl_ms"] = &r.ttlMS
	f["id"] = &r.id
	f["overrun"] = &r.overrun
	return f
}

// overruns has the names of the ways to charge for tokens that were used beyond a reservation.
var overruns = map[policy.Overrun]string{policy.OverrunClamp: "clamp", policy.OverrunDebt: "debt"}

func (h *Handler) reserve(w http.ResponseWriter, r *http.Request) (any, error) {
	var req reserveRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	longest := policy.MaxHold.Milliseconds()
	if req.ttlMS < 1 || req.ttlMS > longest {
		return nil, fmt.Errorf("%w: ttl_ms: %d is not from 1 to %d", fetch.ErrInvalidTTL, req.ttlMS, longest)
	}
	opts, err := call.Options(req.leave, req.flow, nil)
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
		return nil, fmt.Errorf("%w: overrun: %q is neither clamp nor debt", call.ErrBadRequest, req.overrun)
	}
	if req.id != nil {
		opts = append(opts, fetch.WithReservationID(*req.id))
	}
	res, err := h.config.Client.Reserve(r.Context(), req.key, req.tokens, time.Duration(req.ttlMS)*time.Millisecond,
		opts...)
	if err != nil {
		return nil, err
	}
	return answer.NewReservation(res), nil
}

// settleRequest is the body of a settlement or of a cancellation. A cancellation has no used tokens.
type settleRequest struct {
	key, id string
	used    *int64 // nil if the request has no such number
}

func (r *settleRequest) fields() fields {
	return fields{"key": &r.key, "id": &r.id, "used": &r.used}
}

func (r *settleRequest) cancelFields() fields {
	f := r.fields()
	delete(f, "used")
	return f
}

func (h *Handler) settle(w http.ResponseWriter, r *http.Request) (any, error) {
	var req settleRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	if req.used == nil {
		return nil, call.ErrUsedMissing
	}
	return h.end(r, req.key, req.id, *req.used)
}

func (h *Handler) cancel(w http.ResponseWriter, r *http.Request) (any, error) {
	var req settleRequest
	if err := h.read(w, r, req.cancelFields()); err != nil {
		return nil, err
	}
	return h.end(r, req.key, req.id, 0)
}

// end ends a reservation. used is the number of its tokens that were used.
func (h *Handler) end(r *http.Request, key, id string, used int64) (any, error) {
	res, err := h.config.Client.Settle(r.Context(), key, id, used)
	if err != nil {
		return nil, err
	}
	return answer.NewSettlement(key, id, res), nil
}
