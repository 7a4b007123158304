package httpapi

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/flowname"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
	httplimit "github.com/tokenrefill/refiller/middleware/httplimit"
	"github.com/tokenrefill/refiller/policy"
)

// question has the parameters of a check, from its query.
type question struct {
	limit   *limits.Limit
	key     httplimit.KeyFunc
	flow    []levelFunc // levels of the flow's name; empty if the request names no flow
	tokens  int64
	deny    int // the status of a denial
	open    bool
	missing string // how to treat a request that lacks its key
	trusted []netip.Prefix
}

// These are the ways to treat a request that lacks the key that the query names.
const (
	missingRefuse = ""      // reply 400, because it is unknown whose tokens to take
	missingAllow  = "allow" // let it pass
	missingDeny   = "deny"  // deny it
)

// check decides whether a request that a proxy describes may pass. It replies 200 or 429, with the headers that the
// client gets. It trusts what the proxy writes about the client.
func (h *Handler) check(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		RefuseMethod(w, http.MethodGet, h.config.Logger)
		return
	}
	q, err := h.question(r)
	if err != nil {
		Fail(w, err, h.config.Logger)
		return
	}
	r = client(r)
	request := httplimit.NewRequest(r, q.trusted)
	key, err := q.key(request)
	switch {
	case errors.Is(err, httplimit.ErrNoKey) && q.missing != missingRefuse:
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(q.withoutKey())
		return
	case err != nil:
		Fail(w, fmt.Errorf("%w: by: %w", call.ErrBadRequest, err), h.config.Logger)
		return
	}
	flow, err := q.flowOf(request)
	if err != nil {
		Fail(w, err, h.config.Logger)
		return
	}
	limiter, err := q.limit.For(key, flow)
	if err != nil {
		Fail(w, err, h.config.Logger)
		return
	}
	asks := call.Asks{
		Key: q.limit.Name() + " " + key, Size: len(r.URL.RawQuery), MayWait: q.limit.Wait() > 0,
	}
	if flow != nil {
		asks.Flow = *flow
	}
	if err := call.Await(r.Context(), asks); err != nil {
		Fail(w, err, h.config.Logger)
		return
	}
	deadline := h.config.Limits.Deadline()
	a := &checkAnswer{ResponseWriter: w}
	m, err := httplimit.New(httplimit.Config{
		Limiter: limiter, Name: q.limit.Name(), TrustedProxies: q.trusted, FailOpen: q.open,
		Key:    func(httplimit.Request) (string, error) { return q.limit.Key(key), nil },
		Weight: func(*http.Request) int64 { return q.tokens }, XHeaders: true,
		Timeout: q.limit.Timeout(deadline), Status: q.deny,
		OnError: func(_ httplimit.Request, err error) {
			a.failed = err
			h.config.Metrics.Decided(metrics.Check, q.limit.Name(), fetch.Result{}, err)
		},
		OnLimit: func(_ httplimit.Request, d httplimit.Decision) {
			h.config.Metrics.Decided(metrics.Check, q.limit.Name(), d.Result, nil)
		},
	})
	if err != nil { // New can only refuse values from the query
		Fail(w, fmt.Errorf("%w: %w", call.ErrBadRequest, err), h.config.Logger)
		return
	}
	if wait := q.limit.Wait(); wait > 0 {
		until := time.Now().Add(wait + deadline + h.config.Patience)
		if err := http.NewResponseController(w).SetWriteDeadline(until); err != nil {
			Fail(w, fmt.Errorf("sidecar: extend the time to write: %w", err), h.config.Logger)
			return
		}
	}
	w.Header().Set("Cache-Control", "no-store")
	m.Wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if d, decided := httplimit.FromContext(r.Context()); decided {
			h.config.Metrics.Decided(metrics.Check, q.limit.Name(), d.Result, nil)
		}
		w.WriteHeader(http.StatusOK)
	})).ServeHTTP(a, r)
	if a.status != 0 {
		fail(w, a.failed, a.status, h.config.Logger)
	}
}

// checkAnswer suppresses the middleware's reply to a check that failed. That reply is only text for people.
type checkAnswer struct {
	http.ResponseWriter
	failed error // why there was no decision; nil if there was one
	status int   // of the reply that was suppressed; 0 if there was none
}

// WriteHeader implements http.ResponseWriter.
func (a *checkAnswer) WriteHeader(status int) {
	if a.failed != nil {
		a.status = status
		return
	}
	a.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (a *checkAnswer) Write(p []byte) (int, error) {
	if a.failed != nil {
		return len(p), nil
	}
	return a.ResponseWriter.Write(p)
}

// question reads the query. It refuses unknown parameters. Otherwise a misspelled parameter would be ignored silently.
func (h *Handler) question(r *http.Request) (question, error) {
	q := question{tokens: 1}
	bad := func(format string, args ...any) (question, error) {
		return q, fmt.Errorf("%w: %w", call.ErrBadRequest, fmt.Errorf(format, args...))
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return bad("query: %w", err)
	}
	for name, values := range query {
		if name != "by" && name != "flow_by" && name != "trusted" && len(values) > 1 {
			return bad("%s: given twice", name)
		}
		for _, v := range values {
			switch name {
			case "limit":
			case "key", "by":
			case "flow_by":
				level, err := levelBy(v)
				if err != nil {
					return bad("flow_by: %w", err)
				}
				q.flow = append(q.flow, level)
			case "tokens":
				q.tokens, err = strconv.ParseInt(v, 10, 64)
				if err != nil || q.tokens < 1 || q.tokens > policy.MaxTokens {
					return bad("tokens: %q is not a whole number from 1 to %d", v, int64(policy.MaxTokens))
				}
			case "deny":
				q.deny, err = strconv.Atoi(v)
				if err != nil || q.deny < 400 || q.deny > 499 {
					return bad("deny: %q is not a status from 400 to 499", v)
				}
			case "open":
				q.open, err = strconv.ParseBool(v)
				if err != nil {
					return bad("open: %q is neither true nor false", v)
				}
			case "missing":
				q.missing = v
				if v != missingAllow && v != missingDeny {
					return bad("missing: %q is neither allow nor deny", v)
				}
			case "trusted":
				p, err := netip.ParsePrefix(v)
				if err != nil {
					return bad("trusted: %w", err)
				}
				q.trusted = append(q.trusted, p)
			default:
				return bad("%s: unknown parameter; want one of limit, key, by, flow_by, tokens, deny, open, missing, trusted", name)
			}
		}
	}
	q.limit, err = h.config.Limits.InForce().Get(query.Get("limit"))
	if err != nil {
		return q, err
	}
	if len(q.flow) > mostLevels {
		return bad("flow_by: given %d times; want at most %d", len(q.flow), mostLevels)
	}
	q.key, err = keyOf(query)
	if err != nil {
		return bad("%w", err)
	}
	return q, nil
}

// withoutKey returns the status for a request that lacks its key.
func (q question) withoutKey() int {
	switch {
	case q.missing == missingAllow:
		return http.StatusOK
	case q.deny != 0:
		return q.deny
	}
	return http.StatusTooManyRequests
}

// flowOf returns the name of the request's flow. It returns nil, which is the flow without a name, if the query names
// no flow or if the request lacks a level of the name.
func (q question) flowOf(r httplimit.Request) (*string, error) {
	var levels []string
	for _, of := range q.flow {
		text, err := of(r)
		if err != nil {
			return nil, fmt.Errorf("%w: flow_by: %w", call.ErrBadRequest, err)
		}
		if text == "" {
			return nil, nil
		}
		levels = append(levels, flowname.Level(text))
	}
	if len(levels) == 0 {
		return nil, nil
	}
	name := flowname.Fit(strings.Join(levels, "/"))
	return &name, nil
}

// mostLevels is the largest number of levels in the name of a flow.
const mostLevels = 3

// levelFunc returns the text of a level of a flow's name. The text is empty if the request has none.
type levelFunc func(httplimit.Request) (string, error)

// levelBy parses the list of parts of a request that may name a level. The first part that the request has becomes the
// level.
func levelBy(text string) (levelFunc, error) {
	var alternatives []levelFunc
	for one := range strings.SplitSeq(text, ",") {
		name, isHeader := strings.CutPrefix(one, "header:")
		switch {
		case one == "ip":
			alternatives = append(alternatives, func(r httplimit.Request) (string, error) {
				if !r.IP.IsValid() {
					return "", nil
				}
				return httplimit.ByIP()(r)
			})
		case isHeader && name != "":
			alternatives = append(alternatives, func(r httplimit.Request) (string, error) {
				if n := len(r.Header.Values(name)); n > 1 {
					return "", fmt.Errorf("the request has %[2]d headers %[1]s", name, n)
				}
				return r.Header.Get(name), nil
			})
		default:
			return nil, fmt.Errorf("%q is neither ip nor header:NAME", one)
		}
	}
	return func(r httplimit.Request) (string, error) {
		for _, of := range alternatives {
			if text, err := of(r); err != nil || text != "" {
				return text, err
			}
		}
		return "", nil
	}, nil
}

// keyOf returns the key that a query names. It is a fixed text, or parts of the request that are joined. Each part may
// have alternatives.
func keyOf(query url.Values) (httplimit.KeyFunc, error) {
	if query.Has("key") == query.Has("by") {
		return nil, errors.New("want either key or by")
	}
	key := func(httplimit.Request) (string, error) { return query.Get("key"), nil }
	if by := query["by"]; len(by) > 0 {
		var parts []httplimit.KeyFunc
		for _, b := range by {
			var alternatives []httplimit.KeyFunc
			for one := range strings.SplitSeq(b, ",") {
				name, isHeader := strings.CutPrefix(one, "header:")
				switch {
				case one == "ip":
					alternatives = append(alternatives, httplimit.ByIP())
				case isHeader && name != "":
					alternatives = append(alternatives, httplimit.ByHeader(name))
				default:
					return nil, fmt.Errorf("by: %q is neither ip nor header:NAME", one)
				}
			}
			parts = append(parts, httplimit.FirstOf(alternatives...))
		}
		key = httplimit.Join(parts...)
	}
	return key, nil
}

// client returns the request as the proxy received it. The proxy wrote the client's address at the right end of
// X-Forwarded-For. Without that header the request has no address.
func client(r *http.Request) *http.Request {
	hops := strings.Split(strings.Join(r.Header.Values("X-Forwarded-For"), ","), ",")
	last := len(hops) - 1
	r = r.Clone(r.Context())
	r.RemoteAddr = strings.TrimSpace(hops[last])
	r.Header.Set("X-Forwarded-For", strings.Join(hops[:last], ","))
	return r
}
