package sidecar

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/fetch"
)

//go:embed openapi.yaml
var openAPI []byte

// route is one operation over HTTP.
type route struct {
	method, path string
	// call answers with what is sent as JSON.
	call func(http.ResponseWriter, *http.Request) (any, error)
}

// front answers over HTTP.
type front struct {
	client   *fetch.Client
	limits   Limits
	calls    *clients
	draining func() bool
	log      hclog.Logger
	metrics  http.Handler // nil: none
	routes   []route
}

func newFront(client *fetch.Client, limits Limits, calls *clients, draining func() bool, log hclog.Logger) *front {
	f := &front{client: client, limits: limits, calls: calls, draining: draining, log: log}
	f.routes = []route{
		{http.MethodPost, "/v1/take", f.take},
		{http.MethodPost, "/v1/take-all", f.takeAll},
		{http.MethodPost, "/v1/return", f.giveBack},
		{http.MethodGet, "/v1/peek", f.peek},
		{http.MethodPost, "/v1/wait", f.wait},
		{http.MethodPost, "/v1/reserve", f.reserve},
		{http.MethodPost, "/v1/settle", f.settle},
		{http.MethodPost, "/v1/cancel", f.cancel},
	}
	return f
}

// ServeHTTP implements http.Handler.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.serveOwn(w, r) {
		return
	}
	client := clientOf(addrOf(r.Context()), r.TLS)
	if err := f.calls.enter(client); err != nil {
		f.fail(w, err)
		return
	}
	defer f.calls.leave(client)
	answer, err := f.call(w, r)
	if err != nil {
		f.fail(w, err)
		return
	}
	f.write(w, http.StatusOK, answer)
}

// serveAdmin answers what is about the server itself and nothing else.
func (f *front) serveAdmin(w http.ResponseWriter, r *http.Request) {
	if !f.serveOwn(w, r) {
		f.fail(w, errNoRoute)
	}
}

// serveOwn answers what is about the server itself, which is never refused for a
// client's other calls, and reports whether it was that.
func (f *front) serveOwn(w http.ResponseWriter, r *http.Request) bool {
	switch r.URL.Path {
	case "/livez", "/readyz", "/openapi.yaml":
		f.plain(w, r)
		return true
	case "/metrics":
		if f.metrics != nil {
			f.metrics.ServeHTTP(w, r)
			return true
		}
	}
	return false
}

func (f *front) call(w http.ResponseWriter, r *http.Request) (any, error) {
	allowed := ""
	for _, route := range f.routes {
		switch {
		case route.path != r.URL.Path:
		case route.method != r.Method:
			allowed = route.method
		default:
			return route.call(w, r)
		}
	}
	if allowed != "" {
		w.Header().Set("Allow", allowed)
		return nil, fmt.Errorf("%w: %s", errMethod, allowed)
	}
	return nil, errNoRoute
}

// plain answers probes and the description.
func (f *front) plain(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", http.MethodGet)
		f.fail(w, fmt.Errorf("%w: %s", errMethod, http.MethodGet))
		return
	}
	body, kind := []byte("ok\n"), "text/plain; charset=utf-8"
	switch {
	case r.URL.Path == "/openapi.yaml":
		body, kind = openAPI, "application/yaml"
	case r.URL.Path == "/readyz" && f.draining():
		f.fail(w, errDraining)
		return
	}
	w.Header().Set("Content-Type", kind)
	_, _ = w.Write(body) // the client has gone
}

// read reads the JSON body. It insists on the media type, so that no web page can
// have a browser send it without asking.
func (f *front) read(w http.ResponseWriter, r *http.Request, into fields) error {
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return errMediaType
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(f.limits.Body)))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return fmt.Errorf("%w: more than %d bytes", errTooLarge, tooLarge.Limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return errSlow
	case err != nil:
		return fmt.Errorf("%w: read the body: %w", errBadRequest, err)
	}
	return decode(body, into)
}

func (f *front) fail(w http.ResponseWriter, err error) {
	what := failureOf(err)
	message := err.Error()
	switch what.HTTP {
	case http.StatusInternalServerError:
		f.log.Error("call failed", "error", err)
		message = "internal error"
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		w.Header().Set("Retry-After", "1")
	}
	f.write(w, what.HTTP, errorResult{what.Name, message})
}

func (f *front) write(w http.ResponseWriter, status int, answer any) {
	body, err := json.Marshal(answer)
	if err != nil {
		f.log.Error("answer can't be encoded", "error", err)
		status, body = http.StatusInternalServerError, []byte(`{"code":"internal","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client has gone
}
