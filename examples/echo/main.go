// Command echo limits the requests to an Echo server. Each client may make three requests at once, and one more for
// each minute that passes. It needs a Redis on 127.0.0.1:6379.
package main

import (
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/labstack/echo/v4"
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
	e := echo.New()
	e.Use(echo.WrapMiddleware(limits.Wrap), answerErrors)
	e.GET("/orders/:id", func(c echo.Context) error {
		d, _ := httplimit.FromContext(c.Request().Context())
		return c.String(http.StatusOK, fmt.Sprintf("order %s, %d requests left\n", c.Param("id"), d.Remaining))
	})
	e.GET("/broken", func(echo.Context) error {
		return echo.NewHTTPError(http.StatusInternalServerError, "sorry") // the middleware returns its token
	})
	return e, nil
}

// answerErrors sends the response for a handler's error before the limiter's middleware ends. Otherwise Echo would send
// it later, and the middleware couldn't use its status for SkipFailed.
func answerErrors(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if err := next(c); err != nil {
			c.Error(err)
		}
		return nil
	}
}
