// Package httpapi serves buckets and limits over HTTP with JSON, as openapi.yaml describes.
package httpapi

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"os"
	"path"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
)

// OpenAPI describes the operations.
//
//go:embed openapi.yaml
var OpenAPI []byte

// waitPath is the path of calls that wait for tokens.
const waitPath = "/v1/wait"

// checkPath is the path of checks by proxies. The result of a check is in the status and the headers.
const checkPath = "/v1/check"

// Config has the content and the bounds of a Handler.
type Config struct {
	Client   *fetch.Client
	Limits   limits.Access
	Envoy    EnvoyDoor        // nil if there are no limits for Envoy
	Body     int              // the most bytes of a request
	Wait     time.Duration    // the longest wait for tokens
	Patience time.Duration    // how long a client may take to read the reply
	Metrics  *metrics.Metrics // nil if nothing is counted
	Logger   hclog.Logger
}

// Door returns the door of a request, which is the interface that metrics name.
func Door(r *http.Request) string {
	switch r.URL.Path {
	case checkPath:
		return metrics.Check
	case envoyPath:
		return metrics.Envoy
	}
	return metrics.HTTP
}

// Route is one operation.
type Route struct {
	Method, Path string
	// call returns the value to send as JSON. It is nil if the operation writes its reply itself.
	call func(http.ResponseWriter, *http.Request) (any, error)
}

// Handler serves the operations over HTTP.
type Handler struct {
	config Config
	routes []Route
	mux    *http.ServeMux
}

// New makes a Handler.
func New(config Config) *Handler {
	h := &Handler{config: config, mux: http.NewServeMux()}
	h.routes = []Route{
		{http.MethodPost, "/v1/take", h.take},
		{http.MethodPost, "/v1/take-all", h.takeAll},
		{http.MethodPost, "/v1/return", h.giveBack},
		{http.MethodGet, "/v1/peek", h.peek},
		{http.MethodPost, waitPath, h.wait},
		{http.MethodPost, "/v1/reserve", h.reserve},
		{http.MethodPost, "/v1/settle", h.settle},
		{http.MethodPost, "/v1/cancel", h.cancel},
		{http.MethodPost, "/v1/limits/{limit}/take", h.takeLimit},
		{http.MethodGet, "/v1/limits/{limit}/peek", h.peekLimit},
		{http.MethodPost, "/v1/limits/{limit}/undo", h.undoLimit},
		{http.MethodPost, "/v1/limits/{limit}/reserve", h.reserveInstant},
		{http.MethodPost, "/v1/limits/{limit}/cancel", h.cancelInstant},
	}
	for _, route := range h.routes {
		h.mux.HandleFunc(route.Method+" "+route.Path, func(w http.ResponseWriter, r *http.Request) {
			answer, err := route.call(w, r)
			if err != nil {
				Fail(w, err, config.Logger)
				return
			}
			write(w, http.StatusOK, answer, config.Logger)
		})
		h.mux.HandleFunc(route.Path, func(w http.ResponseWriter, _ *http.Request) {
			RefuseMethod(w, route.Method, config.Logger)
		})
	}
	h.routes = append(h.routes, Route{Method: http.MethodGet, Path: checkPath})
	h.mux.HandleFunc(checkPath, h.check)
	if config.Envoy != nil {
		h.mux.HandleFunc(envoyPath, h.envoy)
	}
	h.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { Fail(w, call.ErrNoRoute, config.Logger) })
	return h
}

// ServeHTTP implements http.Handler. Unlike http.ServeMux it redirects no request: a path that isn't clean is unknown.
// Percent-encoded slashes may be part of a limit's name, and don't separate parts of the path.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if p := r.URL.EscapedPath(); p != path.Clean(p) {
		Fail(w, call.ErrNoRoute, h.config.Logger)
		return
	}
	h.mux.ServeHTTP(w, r)
}

// Routes returns the operations.
func (h *Handler) Routes() []Route { return h.routes }

// read reads a JSON body that has a key, and waits for the call's turn.
func (h *Handler) read(w http.ResponseWriter, r *http.Request, into fields) error {
	size, err := h.parse(w, r, into)
	if err != nil {
		return err
	}
	key, _ := into["key"].(*string)
	asks := call.Asks{Key: *key, Size: size, MayWait: r.URL.Path == waitPath}
	if flow, ok := into["flow"].(**string); ok && *flow != nil {
		asks.Flow = **flow
	}
	return call.Await(r.Context(), asks)
}

// parse reads the JSON body and returns its size.
func (h *Handler) parse(w http.ResponseWriter, r *http.Request, into fields) (int, error) {
	body, err := h.body(w, r)
	if err != nil {
		return 0, err
	}
	return len(body), decode(body, into)
}

// body reads a body of JSON. It requires the media type of JSON. Otherwise a web page could make a browser send such a
// request without a preflight request (CORS).
func (h *Handler) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	if media, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return nil, call.ErrMediaType
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, int64(h.config.Body)))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, fmt.Errorf("%w: more than %d bytes", call.ErrTooLarge, tooLarge.Limit)
	case errors.Is(err, os.ErrDeadlineExceeded):
		w.Header().Set("Connection", "close")
		return nil, call.ErrSlow
	case err != nil:
		return nil, fmt.Errorf("%w: read the body: %w", call.ErrBadRequest, err)
	}
	return body, nil
}

// errorAnswer is the body of the reply to a call that failed.
type errorAnswer struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// RefuseMethod writes the reply to a call with another method than the path wants.
func RefuseMethod(w http.ResponseWriter, want string, log hclog.Logger) {
	w.Header().Set("Allow", want)
	Fail(w, fmt.Errorf("%w: %s", call.ErrMethod, want), log)
}

// Fail writes the reply to a call that failed.
func Fail(w http.ResponseWriter, err error, log hclog.Logger) {
	fail(w, err, call.FailureOf(err).HTTP, log)
}

// fail writes the reply to a call that failed. status may differ from the status of the error.
func fail(w http.ResponseWriter, err error, status int, log hclog.Logger) {
	what := call.FailureOf(err)
	message := err.Error()
	if what.HTTP == http.StatusInternalServerError {
		log.Error("call failed", "error", err)
		message = "internal error"
	}
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	write(w, status, errorAnswer{what.Name, message}, log)
}

func write(w http.ResponseWriter, status int, answer any, log hclog.Logger) {
	body, err := json.Marshal(answer)
	if err != nil {
		log.Error("answer can't be encoded", "error", err)
		status, body = http.StatusInternalServerError, []byte(`{"code":"internal","message":"internal error"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // an error means that the client has disconnected
}
