package sidecar

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/testing/openapi"
)

// createsBuckets are the paths of calls that a template's max_keys may refuse.
var createsBuckets = map[string]bool{
	"/v1/take": true, "/v1/take-all": true, "/v1/wait": true, "/v1/reserve": true, "/v1/limits/{limit}/take": true,
	"/v1/check": true,
}

// Every status of an operation's reply must be in the document. Every status in the document must occur in this test.
// The replies are to real requests, unless a request can't cause the failure on demand.
func TestTheDocumentHasTheStatusesOfTheAnswers(t *testing.T) {
	t.Parallel()
	d := openapi.Read(t, httpapi.OpenAPI)
	b := start(t, func(o *Options, b *bench) {
		o.Named, o.Deadline = b.named(namedLimits), patience
	})
	slow := start(t, func(o *Options, _ *bench) {
		o.Limits.Patience = 300 * time.Millisecond
	})
	b.bucket("checkout", 3)
	require.NoError(t, b.rdb.MSet(t.Context(), "{other}:lazy:api", "no number", "{other}:sched:mail", "no set").Err())
	require.NoError(t, b.rdb.MSet(t.Context(), "other", "no number", "{other}:ctl", "no hash").Err())
	for _, id := range []string{"settled", "cancelled"} {
		require.Equal(t, http.StatusOK, b.post("/v1/reserve", `{"key":"checkout","ttl_ms":60000,"id":"`+id+`"}`).status)
	}
	seen := make(map[string]map[int]bool) // by path
	see := func(path string, r reply, what string) {
		path, _, _ = strings.Cut(path, "?")
		path = limitInPath.ReplaceAllString(path, "/v1/limits/{limit}/")
		ops := d.Paths[path]
		if len(ops) == 0 || r.status == http.StatusMethodNotAllowed {
			return // not an operation
		}
		for _, op := range ops {
			d.Check(t, d.Answer(t, op, r.status), r.media(), r.body, what)
		}
		if seen[path] == nil {
			seen[path] = make(map[int]bool)
		}
		seen[path][r.status] = true
	}
	for path, ops := range d.Paths {
		see(path, onPath(b, path), path)
		if ops["post"] != nil {
			see(path, reply{status: http.StatusRequestTimeout, body: sendHalf(t, slow, real(path))}, path+" slowly")
		}
	}
	see("/v1/wait", b.post("/v1/wait", `{"key":"checkout","tokens":3,"timeout_ms":1}`), "a wait that is denied")
	see("/v1/take", b.post("/v1/take", `{"key":"checkout","tokens":3}`), "a take that is denied")
	see("/v1/take-all", b.post("/v1/take-all", `{"requests":[{"key":"checkout","tokens":3}]}`),
		"a take of all that is denied")
	see("/v1/reserve", b.post("/v1/reserve", `{"key":"checkout","tokens":3,"ttl_ms":1000}`),
		"a reservation that is denied")
	see("/v1/check", b.do(http.MethodGet, "/v1/check?limit=api&key=check&tokens=4", ""), "a check of too many tokens")
	see("/v1/check", b.do(http.MethodGet, "/v1/check?limit=pool&key=none", ""), "a check without a bucket")
	see("/v1/check", b.do(http.MethodGet, "/v1/check?limit=api&key=check&tokens=3", ""), "a check")
	see("/v1/check", b.do(http.MethodGet, "/v1/check?limit=api&key=check", ""), "a check that is denied")
	for _, c := range append(badRequests(), badCallsOfLimits()...) {
		see(c.path, b.do(c.method, c.path, c.body, c.header...), c.name)
	}
	b.redis.Kill()
	for path := range d.Paths {
		see(path, onPath(b, path), path+" without Redis")
	}
	for path := range d.Paths {
		// The reasons are other calls, a web page, a bug, and the end of a call's time.
		others := []error{call.ErrBusy, call.ErrForeign, fmt.Errorf("bug"), contextDeadline}
		if path == "/v1/check" {
			others = others[:3] // a check that is late is a check without a decision, which is 503
		}
		for _, err := range others {
			see(path, failing(t, err), path)
		}
		if createsBuckets[path] {
			see(path, failing(t, fetch.ErrTooManyBuckets), path)
		}
		for _, op := range d.Paths[path] {
			var documented []int
			for status := range op.Responses {
				n, err := strconv.Atoi(status)
				require.NoError(t, err)
				documented = append(documented, n)
			}
			require.ElementsMatch(t, slices.Collect(maps.Keys(seen[path])), documented, path)
		}
	}
}

func TestTheDocumentIsServed(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	r := b.do(http.MethodGet, "/openapi.yaml", "")
	require.Equal(t, http.StatusOK, r.status)
	require.Equal(t, "application/yaml", r.header.Get("Content-Type"))
	require.Equal(t, httpapi.OpenAPI, r.body)
	var v any
	require.NoError(t, yaml.Unmarshal(r.body, &v))
}
