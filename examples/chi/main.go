// Command chi limits the requests to a chi router. Each client may make three requests at once, and one more for each
// minute that passes. It needs a Redis on 127.0.0.1:6379.
package main

import (
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/limit/lazy"
	httplimit "github.com/tokenrefill/refiller/middleware/httplimit"
	"github.com/tokenrefill/refiller/policy"
)

func main() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	router, err := newRouter(rdb)
	if err == nil {
		err = http.ListenAndServe("127.0.0.1:8080", router)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func newRouter(rdb redis.UniversalClient) (http.Handler, error) {
	limiter, err := lazy.New(rdb, lazy.Config{Capacity: 3, Rate: policy.Rate{Tokens: 1, Per: time.Minute}})
	if err != nil {
		return nil, err
	}
	limits, err := httplimit.New(httplimit.Config{Limiter: limiter, Key: httplimit.ByIP(), Timeout: 5 * time.Second,
		SkipFailed: true})
	if err != nil {
		return nil, err
	}
	r := chi.NewRouter()
	r.Use(limits.Wrap)
	r.Get("/orders/{id}", func(w http.ResponseWriter, r *http.Request) {
		d, _ := httplimit.FromContext(r.Context())
		fmt.Fprintf(w, "order %s, %d requests left\n", chi.URLParam(r, "id"), d.Remaining)
	})
	r.Get("/broken", func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "sorry", http.StatusInternalServerError) // the middleware returns its token
	})
	return r, nil
}
