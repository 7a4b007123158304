package sidecar

import (
	"fmt"
	"net/http"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
)

// admit lets a client have so many calls over HTTP under way.
func (s *Server) admit(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client := clientOf(addrOf(r.Context()), r.TLS)
		if err := s.calls.enter(client); err != nil {
			httpapi.Fail(w, err, s.log)
			return
		}
		defer s.calls.leave(client)
		next.ServeHTTP(w, r)
	})
}

// own answers what is about the server itself, which is never refused for a client's other calls, and leaves the rest
// to next.
func (s *Server) own(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/livez", "/readyz":
			s.plain(w, r, "text/plain; charset=utf-8", []byte("ok\n"))
		case "/openapi.yaml":
			s.plain(w, r, "application/yaml", httpapi.OpenAPI)
		case "/metrics":
			if s.opts.Metrics != nil {
				s.opts.Metrics.ServeHTTP(w, r)
				return
			}
			fallthrough
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// plain answers probes and the description.
func (s *Server) plain(w http.ResponseWriter, r *http.Request, kind string, body []byte) {
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", http.MethodGet)
		httpapi.Fail(w, fmt.Errorf("%w: %s", call.ErrMethod, http.MethodGet), s.log)
	case r.URL.Path == "/readyz" && s.draining.Err() != nil:
		httpapi.Fail(w, call.ErrDraining, s.log)
	default:
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(body) // the client has gone
	}
}

// nothing is at no path.
func (s *Server) nothing(w http.ResponseWriter, _ *http.Request) {
	httpapi.Fail(w, call.ErrNoRoute, s.log)
}
