package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/hashicorp/go-hclog"
)

// Source provides the information that the server serves. Its methods are safe for concurrent use.
type Source interface {
	// Alive returns an error if the refill loop hangs.
	Alive() error
	// Ready returns an error if Redis doesn't answer or refuses the replica's calls.
	Ready(ctx context.Context) error
	// Status returns a snapshot with the buckets that the query asks for.
	Status(ctx context.Context, q Query) Status
	// Shares returns the shares of all regions in all pools in the last hour, by pool and region.
	Shares() []ShareHistory
}

const (
	probeTimeout    = 2 * time.Second
	shutdownTimeout = 2 * time.Second
	maxBuckets      = 1000 // in one reply of /status

	// MaxFlows is the largest number of flows of a bucket that a query may ask for.
	MaxFlows = 1000
)

// Handler returns a handler that serves the source, and metrics at /metrics.
func Handler(src Source, metrics http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", metrics)
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { probe(w, src.Alive()) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithTimeout(req.Context(), probeTimeout)
		defer cancel()
		probe(w, src.Ready(ctx))
	})
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, req *http.Request) {
		q, err := query(req, maxBuckets, 0)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		ctx, cancel := context.WithTimeout(req.Context(), probeTimeout)
		defer cancel()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(src.Status(ctx, q)) // an error means that the client has disconnected
	})
	mux.HandleFunc("GET /shares", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(src.Shares()) // an error means that the client has disconnected
	})
	page(mux, src)
	return mux
}

func probe(w http.ResponseWriter, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}

// query reads the parameters of a request. limit and flows are the defaults of the parameters with these names.
func query(req *http.Request, limit, flows int) (q Query, err error) {
	form := req.URL.Query()
	q = Query{Key: form.Get("key"), Search: form.Get("q"), Sort: Sort(form.Get("sort"))}
	if !slices.Contains(sorts, q.Sort) {
		return q, fmt.Errorf("sort %q: want one of key, fill, taken, age", q.Sort)
	}
	q.Offset, err = number(req, "offset", 0, 0, 1<<31-1)
	if err != nil {
		return q, err
	}
	q.Limit, err = number(req, "limit", limit, 0, maxBuckets)
	if err != nil {
		return q, err
	}
	q.Flows, err = number(req, "flows", flows, 0, MaxFlows)
	return q, err
}

func number(req *http.Request, name string, otherwise, least, most int) (int, error) {
	text := req.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%s %q: want a whole number from %d to %d", name, text, least, most)
	}
	return n, nil
}

// Serve serves requests on the listener until ctx ends. Then it gives requests under way a short time to finish, and
// closes the listener.
func Serve(ctx context.Context, ln net.Listener, h http.Handler, log hclog.Logger) error {
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second,
		IdleTimeout: time.Minute,
		ErrorLog:    log.StandardLogger(&hclog.StandardLoggerOptions{ForceLevel: hclog.Debug}), MaxHeaderBytes: 16 << 10,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("admin: %w", err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := srv.Shutdown(stop); err != nil {
		_ = srv.Close()
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("admin: %w", err)
	}
	return nil
}
