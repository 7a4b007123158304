package main

import (
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/examples/internal/walk"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestRequestsBeyondTheLimitAreDenied(t *testing.T) { walk.Through(t, newRouter) }

func TestARequestIsJudgedByTheStatusThatIsSent(t *testing.T) {
	router, err := newRouter(testenv.Redis(t).Client())
	require.NoError(t, err)
	get := func(path string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		router.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w
	}
	for range 3 {
		w := get("/no-such-route")
		require.Equal(t, http.StatusNotFound, w.Code)
		require.Equal(t, "404 page not found", w.Body.String())
		require.Equal(t, http.StatusInternalServerError, get("/fails-late").Code)
	}
	w := get("/orders/7")
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, "order 7, 2 requests left\n", w.Body.String(), "the tokens of failed requests were returned")
}
