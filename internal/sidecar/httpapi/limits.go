package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"time"
	"unicode/utf8"

	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

// limitAnswer is the decision of a named limit.
type limitAnswer struct {
	Name string `json:"name"`
	answer.Result
	WaitMS   int64    `json:"wait_ms"`             // how long the caller has to wait before it may proceed
	NextMS   *int64   `json:"next_ms,omitempty"`   // of a lazy bucket: the time until it has a token
	DeniedBy []string `json:"denied_by,omitempty"` // of several limits: those that denied
	Undo     string   `json:"undo,omitempty"`      // the argument for /undo
}

func newLimitAnswer(l *limits.Limit, key string, a limits.Answer) limitAnswer {
	r := limitAnswer{
		Name: l.Name(), Result: answer.NewResult(key, a.Result), WaitMS: millis(a.Wait), DeniedBy: a.DeniedBy, Undo: a.Undo,
	}
	if a.Next != nil {
		next := millis(*a.Next)
		r.NextMS = &next
	}
	return r
}

// millis converts d to milliseconds and rounds up.
func millis(d time.Duration) int64 { return (d + time.Millisecond - 1).Milliseconds() }

// limit returns the limit that the path names, and a context for a call to it.
func (h *Handler) limit(r *http.Request) (*limits.Limit, context.Context, context.CancelFunc, error) {
	return h.config.Limits.Open(r.Context(), r.PathValue("limit"))
}

// takeLimitRequest is the body of a take of a limit.
type takeLimitRequest struct {
	amount
	flow *string // nil if the request names no flow
}

func (r *takeLimitRequest) fields() fields {
	f := r.amount.fields()
	f["flow"] = &r.flow
	return f
}

func (h *Handler) takeLimit(w http.ResponseWriter, r *http.Request) (any, error) {
	var req takeLimitRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	l, ctx, cancel, err := h.limit(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	a, err := l.Take(ctx, req.key, req.flow, req.tokens)
	h.config.Metrics.Decided(metrics.HTTP, l.Name(), a.Result, err)
	if err != nil {
		return nil, err
	}
	return newLimitAnswer(l, req.key, a), nil
}

func (h *Handler) peekLimit(_ http.ResponseWriter, r *http.Request) (any, error) {
	key, err := onlyKey(r)
	if err != nil {
		return nil, err
	}
	l, ctx, cancel, err := h.limit(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	a, err := l.Peek(ctx, key)
	if err != nil {
		return nil, err
	}
	return newLimitAnswer(l, key, a), nil
}

// undoRequest is the body of an undo.
type undoRequest struct{ key, undo string }

func (r *undoRequest) fields() fields { return fields{"key": &r.key, "undo": &r.undo} }

// undone is the reply to an undo.
type undone struct {
	Name string `json:"name"`
	Key  string `json:"key"`
}

func (h *Handler) undoLimit(w http.ResponseWriter, r *http.Request) (any, error) {
	var req undoRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	l, ctx, cancel, err := h.limit(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	if err := l.Undo(ctx, req.key, req.undo); err != nil {
		return nil, err
	}
	return undone{l.Name(), req.key}, nil
}

// instantRequest is the body of a reservation of an instant.
type instantRequest struct{ key, id, at string }

func (r *instantRequest) fields() fields { return fields{"key": &r.key, "id": &r.id, "at": &r.at} }

// instantAnswer is the reply to a reservation of an instant.
type instantAnswer struct {
	Name string `json:"name"`
	answer.Result
	ID       string     `json:"id"`
	At       time.Time  `json:"at"`
	Repeated bool       `json:"repeated"`
	DeniedBy []string   `json:"denied_by,omitempty"`
	Next     *time.Time `json:"next,omitempty"` // of a denial: the next instant that fits
}

func (h *Handler) reserveInstant(w http.ResponseWriter, r *http.Request) (any, error) {
	var req instantRequest
	if err := h.read(w, r, req.fields()); err != nil {
		return nil, err
	}
	at, err := time.Parse(time.RFC3339Nano, req.at)
	if err != nil {
		return nil, fmt.Errorf("%w: at: %q is not a time such as 2027-03-01T09:00:00Z", call.ErrBadRequest, req.at)
	}
	l, ctx, cancel, err := h.limit(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	s, err := l.Schedule()
	if err != nil {
		return nil, err
	}
	res, err := s.Reserve(ctx, req.key, req.id, at)
	h.config.Metrics.Decided(metrics.HTTP, l.Name(), res.Result, err)
	if err != nil {
		return nil, err
	}
	a := instantAnswer{l.Name(), answer.NewResult(req.key, res.Result), req.id, res.At, res.Repeated, res.DeniedBy, nil}
	if !res.OK {
		a.Next = &res.Next
	}
	return a, nil
}

// cancelledAnswer is the reply to a cancellation. Cancelled reports whether there was something to cancel.
type cancelledAnswer struct {
	Name      string `json:"name"`
	Key       string `json:"key"`
	ID        string `json:"id"`
	Cancelled bool   `json:"cancelled"`
}

func (h *Handler) cancelInstant(w http.ResponseWriter, r *http.Request) (any, error) {
	var req settleRequest
	if err := h.read(w, r, req.cancelFields()); err != nil {
		return nil, err
	}
	l, ctx, cancel, err := h.limit(r)
	if err != nil {
		return nil, err
	}
	defer cancel()
	s, err := l.Schedule()
	if err != nil {
		return nil, err
	}
	ok, err := s.Cancel(ctx, req.key, req.id)
	if err != nil {
		return nil, err
	}
	return cancelledAnswer{l.Name(), req.key, req.id, ok}, nil
}

// onlyKey reads a query that has only a key, and waits for the call's turn.
func onlyKey(r *http.Request) (string, error) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return "", fmt.Errorf("%w: query: %w", call.ErrBadRequest, err)
	}
	for name, values := range query {
		if name != "key" || len(values) != 1 {
			return "", fmt.Errorf("%w: query: want the parameter key once, and no other parameter", call.ErrBadRequest)
		}
	}
	key := query.Get("key")
	if !utf8.ValidString(key) {
		return "", fmt.Errorf("%w: key: it is not UTF-8", call.ErrBadRequest)
	}
	return key, call.Await(r.Context(), call.Asks{Key: key, Size: len(key)})
}
