package httplimit_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/window"
	httplimit "github.com/tokenrefill/refiller/middleware/httplimit"
	"github.com/tokenrefill/refiller/policy"
)

// Each API key can make 60 requests at once, and earns one request a second. For requests without an API key, the
// client's address is the key.
func Example() {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ContextTimeoutEnabled: true})
	defer rdb.Close()
	buckets, err := lazy.New(rdb, lazy.Config{Capacity: 60, Rate: policy.PerSecond(1)})
	if err != nil {
		fmt.Println(err)
		return
	}
	abuse, err := httplimit.NewAbuseLog(rdb, "abuse", 10_000)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	running.Go(func() { _ = abuse.Run(ctx) }) // always nil

	m, err := httplimit.New(httplimit.Config{
		Limiter:        buckets,
		Key:            httplimit.FirstOf(httplimit.ByHeader("X-API-Key"), httplimit.ByIP()),
		TrustedProxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")},
		Jitter:         5 * time.Second,
		SkipFailed:     true,
		OnLimit:        abuse.Record,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("GET /orders/{id}", http.NotFoundHandler())
	fmt.Println(http.ListenAndServe("127.0.0.1:8080", m.Wrap(mux)))
}

// A middleware in one process, for a test or a single server.
func ExampleMiddleware_Wrap() {
	limiter, err := window.NewLocal(window.Config{Limit: 1, Window: time.Minute}, time.Now)
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err := httplimit.New(httplimit.Config{Limiter: limiter, Key: httplimit.ByIP(), Name: "minutely"})
	if err != nil {
		fmt.Println(err)
		return
	}
	handler := m.Wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for range 2 {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
		fmt.Println(w.Code, w.Header().Get("RateLimit-Policy"))
	}
	// Output:
	// 200 "minutely";q=1;w=60
	// 429 "minutely";q=1;w=60
}
