package httplimit

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/tokenrefill/refiller/internal/bucketname"
	"github.com/tokenrefill/refiller/internal/limitcall"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/limit"
)

// Middleware limits requests. It is safe for concurrent use and starts no
// goroutine.
type Middleware struct {
	config Config
	now    func() time.Time
	random func(n int64) int64 // 0 to n-1
}

// Decision is the decision about a request.
type Decision struct {
	limit.Decision
	Key    string
	Weight int64
	Shadow bool // denied or not, the request passes
}

type contextKey struct{}

// FromContext returns the decision about a request. It returns false if the request passed without a decision.
func FromContext(ctx context.Context) (Decision, bool) {
	d, ok := ctx.Value(contextKey{}).(Decision)
	return d, ok
}

// Wrap puts the limiter in front of a handler.
func (m *Middleware) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, hr *http.Request) {
		r := NewRequest(hr, m.config.TrustedProxies)
		if r.IP.IsValid() && within(r.IP, m.config.Allow) {
			next.ServeHTTP(w, hr)
			return
		}
		weight := int64(1)
		if m.config.Weight != nil {
			weight = m.config.Weight(hr)
			if weight == 0 {
				next.ServeHTTP(w, hr)
				return
			}
		}
		key, err := m.config.Key(r)
		if err == nil && m.config.AllowKey != nil && m.config.AllowKey(key) {
			next.ServeHTTP(w, hr)
			return
		}
		var d Decision
		if err != nil {
			err = badRequest{err}
		} else {
			d, err = m.decide(r, bucketname.Fit(key), weight)
		}
		if err != nil {
			m.fail(w, r, err, next)
			return
		}
		hr = hr.WithContext(context.WithValue(hr.Context(), contextKey{}, d))
		r.Request = hr
		if !d.OK && m.config.OnLimit != nil {
			m.config.OnLimit(r, d)
		}
		if m.config.Shadow {
			m.serve(w, r, d, next)
			return
		}
		m.setHeaders(w.Header(), d)
		if !d.OK {
			m.deny(w, hr, d)
			return
		}
		if !m.hold(hr.Context(), d) {
			m.giveBack(r, d)
			http.Error(w, http.StatusText(http.StatusServiceUnavailable), http.StatusServiceUnavailable)
			return
		}
		m.serve(w, r, d, next)
	})
}

// decide asks the limiter.
func (m *Middleware) decide(r Request, key string, weight int64) (d Decision, err error) {
	d = Decision{Key: key, Weight: weight, Shadow: m.config.Shadow}
	ctx, cancel, opts := limitcall.Bound(r.Context(), m.config.Limiter, key, m.config.Timeout, DefaultTimeout)
	defer cancel()
	d.Decision, err = limitcall.Take(ctx, m.config.Limiter, d.Key, weight, opts...)
	if err != nil {
		return Decision{}, err
	}
	if d.Limits != nil {
		return d, nil
	}
	d.Limits = []limit.LimitResult{{Name: m.config.Name, Window: m.config.Window, Result: d.Result, Wait: d.Wait}}
	if !d.OK {
		d.DeniedBy = []string{m.config.Name}
	}
	return d, nil
}

// badRequest is an error that the request itself has caused.
type badRequest struct{ error }

func (b badRequest) Unwrap() error { return b.error }

// fail answers a request about which no decision could be made.
func (m *Middleware) fail(w http.ResponseWriter, r Request, err error, next http.Handler) {
	if m.config.OnError != nil {
		m.config.OnError(r, err)
	}
	code := http.StatusServiceUnavailable
	outcome := limit.OutcomeOf(err)
	var bad badRequest
	if errors.As(err, &bad) {
		outcome, code = limit.Outcome{}, http.StatusBadRequest
	} else if !outcome.Open {
		code = outcome.HTTP
	}
	// A client that left before the limiter's answer got no tokens. So its request must not pass, even if the middleware
	// fails open.
	if m.config.Shadow || m.config.FailOpen && outcome.Open && r.Context().Err() == nil {
		next.ServeHTTP(w, r.Request)
		return
	}
	http.Error(w, http.StatusText(code), code)
}

// deny answers a denied request.
func (m *Middleware) deny(w http.ResponseWriter, r *http.Request, d Decision) {
	if m.config.Denied != nil {
		m.config.Denied.ServeHTTP(w, r)
		return
	}
	if m.config.MessageKey != "" {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(m.config.Status)
		_ = json.NewEncoder(w).Encode(map[string]string{m.config.MessageKey: m.config.Message}) // the client may have left
		return
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(m.config.Status)
	// Writing can only fail because the client has left.
	_ = json.NewEncoder(w).Encode(problem{
		Type: quotaExceeded, Title: "Request cannot be satisfied as assigned quota has been exceeded",
		Status: m.config.Status, Detail: m.config.Message, Violated: d.DeniedBy,
	})
}

// hold delays a request by the time until its place, if a limit of pacing gave it a place, and by the delay of
// SlowDown. It reports whether the request's context lasted until then.
func (m *Middleware) hold(ctx context.Context, d Decision) bool {
	delay := d.Wait + m.slowDown(d)
	return delay == 0 || timing.Sleep(ctx.Done(), delay)
}

func (m *Middleware) slowDown(d Decision) time.Duration {
	s := m.config.SlowDown
	beyond := d.Limit - d.Remaining - s.After
	switch {
	case s.Step == 0 || beyond <= 0:
		return 0
	case beyond <= int64(s.Max/s.Step):
		return time.Duration(beyond) * s.Step
	}
	return s.Max
}

// serve calls the handler and gives the tokens of a failed request back. They stay taken if the request failed because
// its client left. Otherwise a client that disconnects in time would use no tokens.
func (m *Middleware) serve(w http.ResponseWriter, r Request, d Decision, next http.Handler) {
	if !m.config.SkipFailed || !d.OK {
		next.ServeHTTP(w, r.Request)
		return
	}
	var s status
	failed := true // stays true if the handler panics
	defer func() {
		if failed && !errors.Is(r.Context().Err(), context.Canceled) {
			m.giveBack(r, d)
		}
	}()
	next.ServeHTTP(s.watch(w), r.Request)
	failed = s.code >= http.StatusBadRequest
}

// giveBack returns a request's tokens, even if its client has left.
func (m *Middleware) giveBack(r Request, d Decision) {
	err := limitcall.GiveBack(r.Context(), m.config.Limiter, d.Key, d.Decision, m.config.Timeout)
	if err != nil && m.config.OnError != nil {
		m.config.OnError(r, err)
	}
}
