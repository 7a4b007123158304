// Command gin limits the requests to a Gin engine. Each client may make three requests at once, and one more for each
// minute that passes. It needs a Redis on 127.0.0.1:6379.
package main

import (
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/gin-gonic/gin"
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
	gin.SetMode(gin.ReleaseMode)
	g := gin.New()
	g.Use(limited(limits.Wrap))
	g.GET("/orders/:id", func(c *gin.Context) {
		d, _ := httplimit.FromContext(c.Request.Context())
		c.String(http.StatusOK, "order %s, %d requests left\n", c.Param("id"), d.Remaining)
	})
	g.GET("/broken", func(c *gin.Context) {
		c.String(http.StatusInternalServerError, "sorry\n") // the middleware returns the request's token to the bucket
	})
	g.GET("/fails-late", func(c *gin.Context) {
		c.Status(http.StatusOK)
		c.AbortWithStatus(http.StatusInternalServerError) // the token is returned, too
	})
	return g, nil
}

// limited converts a middleware for net/http into a handler for Gin.
func limited(wrap func(http.Handler) http.Handler) gin.HandlerFunc {
	return func(c *gin.Context) {
		passed := false
		wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			passed = true
			c.Request = r
			c.Next()
			// The handlers have written to c.Writer and not to w. So the middleware has not seen their status, and is
			// given it here, when no handler can change it any more.
			w.WriteHeader(c.Writer.Status())
		})).ServeHTTP(c.Writer, c.Request)
		if !passed {
			c.Abort()
		}
	}
}
