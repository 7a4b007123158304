package sidecar

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
)

// admit makes each call over HTTP wait for its turn. It records the duration of calls that do not wait for tokens.
func (s *Server) admit(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		origin := originOf(connOf(r.Context()).addr, r.TLS)
		leave := func() {}
		defer func() { leave() }()
		began, mayWait := time.Now(), false
		turn := func(ctx context.Context, a call.Asks) error {
			mayWait = a.MayWait
			entered, err := s.turns.enter(ctx, origin, a, false)
			if err == nil {
				leave = entered
			}
			return err
		}
		next.ServeHTTP(w, r.WithContext(call.WithTurn(r.Context(), turn)))
		if !mayWait {
			s.metrics.ObserveCall(httpapi.Door(r), time.Since(began))
		}
	})
}

// closeConnections makes clients close connections that are too old, and all connections when the server drains.
// Otherwise a client might send a request on a connection just when the server closes it.
func (s *Server) closeConnections(next http.Handler) http.Handler {
	most := s.opts.Limits.ConnectionAge
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		old := most > 0 && time.Since(connOf(r.Context()).begun) >= most
		if old || s.draining.Err() != nil {
			w.Header().Set("Connection", "close")
		}
		next.ServeHTTP(w, r)
	})
}

// refuseForeign refuses requests that a web page of another origin makes a browser send. Otherwise any page could take
// tokens, because a browser reaches the loopback addresses of its machine. A page can use a cross-site request, or a
// host name that resolves to such an address (DNS rebinding).
func (s *Server) refuseForeign(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := foreign(r); err != nil {
			httpapi.Fail(w, err, s.log)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func foreign(r *http.Request) error {
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		if site != "same-origin" && site != "none" {
			return fmt.Errorf("%w: Sec-Fetch-Site is %q", call.ErrForeign, site)
		}
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return nil
	}
	if tcp, ok := local.(*net.TCPAddr); ok && tcp.IP.IsLoopback() && !isLoopbackHost(r.Host) {
		return fmt.Errorf("%w: it is %q", call.ErrHost, r.Host)
	}
	return nil
}

// isLoopbackHost reports whether a Host header, with or without a port, is a loopback address, localhost or a name
// below localhost. No other name is trusted, since DNS may resolve it to any address.
func isLoopbackHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if ip, err := netip.ParseAddr(name); err == nil {
		return ip.Unmap().IsLoopback()
	}
	return name == "localhost" || strings.HasSuffix(name, ".localhost")
}

// withServerPages serves requests about the server itself, and passes other requests to next. Requests about the server
// are never refused because of a client's other calls.
func (s *Server) withServerPages(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/livez", "/readyz":
			s.plain(w, r, "text/plain; charset=utf-8", []byte("ok\n"))
		case "/openapi.yaml":
			s.plain(w, r, "application/yaml", httpapi.OpenAPI)
		case "/rlconfig":
			if s.envoy == nil {
				s.notFound(w, r)
				return
			}
			s.plain(w, r, "text/plain; charset=utf-8", []byte(s.envoy.Dump()))
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

// plain answers a GET or HEAD request with a fixed body, such as a probe or the OpenAPI description.
func (s *Server) plain(w http.ResponseWriter, r *http.Request, kind string, body []byte) {
	switch {
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		httpapi.RefuseMethod(w, http.MethodGet, s.log)
	case r.URL.Path == "/readyz" && s.draining.Err() != nil:
		httpapi.Fail(w, call.ErrDraining, s.log)
	default:
		w.Header().Set("Content-Type", kind)
		_, _ = w.Write(body) // an error means that the client has disconnected
	}
}

// notFound answers requests for unknown paths with 404.
func (s *Server) notFound(w http.ResponseWriter, _ *http.Request) {
	httpapi.Fail(w, call.ErrNoRoute, s.log)
}
