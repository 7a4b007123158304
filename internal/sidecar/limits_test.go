package sidecar

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/policy"
)

// namedLimits has limits of each kind.
const namedLimits = `
limits:
  - {name: api, lazy: {capacity: 3, rate: 1/h}}
  - {name: hourly, window: {limit: 3, length: 1h}}
  - {name: monthly, window: {limit: 3, per: month, zone: Europe/Berlin}}
  - {name: smooth, window: {limit: 3, length: 1h, sliding: true}}
  - {name: calls, pacing: {rate: 1/m, max_wait: 2m}}
  - name: mail
    schedule:
      zone: Europe/Berlin
      windows: [{limit: 1, length: 1m}, {limit: 3, per: day}]
  - {name: pool, bucket: {prefix: "team:"}}
  - name: plan
    all:
      - {name: burst, lazy: {capacity: 3, rate: 1/h}}
      - {name: daily, window: {limit: 4, length: 24h}}
`

// named returns limits on the bench's Redis.
func (b *bench) named(file string) *limits.Set {
	b.t.Helper()
	set, err := limits.Parse("limits.yaml", []byte(file), b.rdb, b.client)
	require.NoError(b.t, err)
	return set
}

var limitInPath = regexp.MustCompile(`^/v1/limits/[^/]+/`)

// real returns a path of the description with a limit's name in it.
func real(path string) string {
	name := "api"
	if strings.HasSuffix(path, "/reserve") || strings.HasSuffix(path, "/cancel") {
		name = "mail"
	}
	return strings.ReplaceAll(path, "{limit}", name)
}

// badCallsOfLimits returns calls that cause the failures in the description.
func badCallsOfLimits() []badRequest {
	const post, get = http.MethodPost, http.MethodGet
	huge, form := strings.Repeat("k", 70_000), []string{"Content-Type", "text/plain"}
	cases := []badRequest{
		{"LimitNoTokens", post, "/v1/limits/api/take", `{"key":"checkout","tokens":0}`, nil,
			400, "invalid_amount", "want 1 to"},
		{"LimitExceeds", post, "/v1/limits/api/take", `{"key":"checkout","tokens":4}`, nil,
			422, "exceeds_capacity", "want 1 to 3"},
		{"PeekUnknownLimit", get, "/v1/limits/none/peek?key=a", "", nil, 404, "unknown_limit", "none"},
		{"PeekNoKey", get, "/v1/limits/api/peek", "", nil, 400, "invalid_key", "empty"},
		{"PeekMalformed", get, "/v1/limits/api/peek?key=other", "", nil, 409, "malformed_bucket", ""},
		{"UndoNothing", post, "/v1/limits/api/undo", `{"key":"checkout","undo":"x"}`, nil,
			400, "bad_request", "is not from the answer to a take"},
		{"UndoHuge", post, "/v1/limits/mail/undo", `{"key":"checkout","undo":"9000000000000000000-1"}`, nil,
			400, "invalid_amount", "want 1 to 500"},
		{"UndoPlaces", post, "/v1/limits/calls/undo", `{"key":"checkout","undo":"1-0"}`, nil,
			400, "bad_request", "can't be undone"},
		{"NoSchedule", post, "/v1/limits/api/cancel", `{"key":"checkout","id":"a"}`, nil,
			400, "bad_request", "api is not a schedule"},
		{"NoInstant", post, "/v1/limits/mail/reserve", `{"key":"checkout","id":"a","at":"noon"}`, nil,
			400, "bad_request", "noon"},
		{"Past", post, "/v1/limits/mail/reserve", `{"key":"checkout","id":"p","at":"2020-01-01T00:00:00Z"}`, nil,
			422, "past", "2020"},
		{"TooFar", post, "/v1/limits/mail/reserve", `{"key":"checkout","id":"f","at":"2999-01-01T00:00:00Z"}`, nil,
			422, "beyond_horizon", ""},
	}
	at := time.Now().Add(time.Hour).Format(time.RFC3339)
	for path, body := range map[string]string{
		"take": `{"key":"KEY"}`, "undo": `{"key":"KEY","undo":"1-0"}`, "reserve": `{"key":"KEY","id":"a","at":"` + at + `"}`,
		"cancel": `{"key":"KEY","id":"b"}`,
	} {
		of := func(key string) string { return strings.Replace(body, "KEY", key, 1) }
		at := real("/v1/limits/{limit}/" + path)
		cases = append(cases,
			badRequest{path + " of no limit", post, "/v1/limits/none/" + path, of("a"), nil, 404, "unknown_limit", ""},
			badRequest{path + " of another key", post, at, of("other"), nil, 409, "malformed_bucket", ""},
			badRequest{path + " of a huge key", post, at, of(huge), nil, 413, "too_large", ""},
			badRequest{path + " of a form", post, at, of("a"), form, 415, "wrong_media_type", ""},
			badRequest{path + " of no key", post, at, of(""), nil, 400, "invalid_key", ""},
			badRequest{path + " of half a letter", post, at, of(`a\ud800`), nil, 400, "bad_request", "half of a surrogate pair"})
	}
	cases = append(cases,
		badRequest{"CheckUnknownLimit", get, "/v1/check?limit=none&key=a", "", nil, 404, "unknown_limit", "none"},
		badRequest{"CheckWithoutKey", get, "/v1/check?limit=api", "", nil, 400, "bad_request", "want either key or by"},
		badRequest{"CheckExceeds", get, "/v1/check?limit=api&key=a&tokens=4", "", nil, 422, "exceeds_capacity", "1 to 3"})
	// A limit of buckets needs a key. Without one, it must not use the bucket that its prefix names.
	cases = append(cases,
		badRequest{"NoKeyAfterPrefix", post, "/v1/limits/pool/take", `{}`, nil, 400, "invalid_key", "empty"},
		badRequest{"UndoNoKeyAfterPrefix", post, "/v1/limits/pool/undo", `{"undo":"1-0"}`, nil, 400, "invalid_key", "empty"},
		badRequest{"PeekNoKeyAfterPrefix", get, "/v1/limits/pool/peek", "", nil, 400, "invalid_key", "empty"})
	return cases
}

func TestBadCallsOfLimitsAreRefusedAndSayWhy(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
	require.NoError(t, b.rdb.MSet(t.Context(), "{other}:lazy:api", "no number", "{other}:sched:mail", "no set").Err())
	b.bucket("team:", 3)
	before := b.rdb.DBSize(t.Context()).Val()
	for _, c := range badCallsOfLimits() {
		r := b.do(c.method, c.path, c.body, c.header...)
		require.Equal(t, c.status, r.status, "%s: %s", c.name, r.body)
		require.Equal(t, c.code, r.json(t)["code"], c.name)
		require.Contains(t, r.json(t)["message"], c.says, c.name)
	}
	require.Equal(t, before, b.rdb.DBSize(t.Context()).Val(), "no key is created")
	require.EqualValues(t, 3, b.tokens("team:"), "no tokens are taken")
}

// This test uses every kind of limit over HTTP and over gRPC, as a program in another language does.
func TestLimitsByName(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*bench) limitDoor{"HTTP": openHTTP, "gRPC": openGRPC} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
			door := open(b)
			t.Run("taken, denied, given back", func(t *testing.T) { takeAndGiveBack(t, b, door) })
			t.Run("places in a queue", func(t *testing.T) { queueUp(t, door) })
			t.Run("instants of a schedule", func(t *testing.T) { reserveInstants(t, door) })
		})
	}
}

func takeAndGiveBack(t *testing.T, b *bench, door limitDoor) {
	b.bucket("team:red", 3)
	for _, name := range []string{"api", "hourly", "monthly", "smooth", "plan", "pool", "mail"} {
		key := "red"
		n := int64(2)
		if name == "mail" {
			n = 1
		}
		first := door.take(name, key, n)
		require.Equal(t, codes.OK, first.failed, name)
		require.True(t, first.OK, name)
		require.Equal(t, name, first.Name)
		require.Equal(t, n, first.Taken, name)
		second := door.take(name, key, n)
		require.Equal(t, codes.OK, second.failed, "%s: a denial is no error", name)
		require.False(t, second.OK, name)
		require.Positive(t, second.RetryAfterMS, name)
		if name == "plan" {
			require.Equal(t, []string{"plan.burst"}, second.DeniedBy)
		}
		require.Empty(t, second.Undo, name)
		require.Equal(t, codes.OK, door.undo(name, key, first.Undo).failed, name)
		left := door.peek(name, key)
		require.Equal(t, left.Limit, left.Remaining, "%s: all tokens were returned", name)
		require.True(t, door.take(name, key, n).OK, name)
	}
	require.Equal(t, codes.NotFound, door.take("pool", "blue", 1).failed, "the limit exists, but not its bucket")
	require.Equal(t, codes.NotFound, door.take("none", "u", 1).failed)
}

func queueUp(t *testing.T, door limitDoor) {
	for i, want := range []float64{0, 60_000, 120_000} {
		r := door.take("calls", "u", 1)
		require.True(t, r.OK)
		require.InDelta(t, want, r.WaitMS, 5000, "place %d", i)
	}
	require.False(t, door.take("calls", "u", 1).OK)
}

func reserveInstants(t *testing.T, door limitDoor) {
	tomorrow := time.Now().Add(26 * time.Hour).UTC()
	later := tomorrow.Add(30 * time.Second)
	require.True(t, door.reserve("mail", "news", "a", tomorrow).OK)
	require.True(t, door.reserve("mail", "news", "a", tomorrow).Repeated)
	denied := door.reserve("mail", "news", "b", later)
	require.False(t, denied.OK)
	require.Equal(t, []string{"1 per 1m0s"}, denied.DeniedBy)
	require.WithinDuration(t, tomorrow.Add(time.Minute), denied.Next, time.Microsecond)
	for _, there := range []bool{true, false} {
		require.Equal(t, there, door.cancel("mail", "news", "a").Cancelled)
	}
	require.True(t, door.reserve("mail", "news", "b", later).OK)
	require.Equal(t, codes.AlreadyExists, door.reserve("mail", "news", "b", tomorrow).failed)
}

func TestABadGRPCCallOfALimitHasItsCodeAndDoesNothing(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
	require.NoError(t, b.rdb.Set(t.Context(), "{other}:lazy:api", "no number", 0).Err())
	door := openGRPC(b)
	tomorrow := time.Now().Add(24 * time.Hour)
	for what, c := range map[string]struct {
		got  limitReply
		want codes.Code
	}{
		"no tokens":                 {door.take("api", "u", 0), codes.InvalidArgument},
		"too many tokens":           {door.take("api", "u", 4), codes.OutOfRange},
		"no key":                    {door.take("api", "", 1), codes.InvalidArgument},
		"no key of a pool":          {door.take("pool", "", 1), codes.InvalidArgument},
		"a foreign key":             {door.take("api", "other", 1), codes.FailedPrecondition},
		"no name":                   {door.peek("", "u"), codes.NotFound},
		"peek of no limit":          {door.peek("none", "u"), codes.NotFound},
		"undo without an id":        {door.undo("api", "u", ""), codes.InvalidArgument},
		"undo of a place":           {door.undo("calls", "u", "1-0"), codes.InvalidArgument},
		"no schedule":               {door.reserve("api", "u", "a", tomorrow), codes.InvalidArgument},
		"cancel without a schedule": {door.cancel("api", "u", "a"), codes.InvalidArgument},
		"no instant":                {door.reserve("mail", "u", "a", time.Time{}), codes.InvalidArgument},
		"no id":                     {door.reserve("mail", "u", "", tomorrow), codes.InvalidArgument},
		"the past":                  {door.reserve("mail", "u", "a", time.Unix(1e9, 0)), codes.OutOfRange},
		"too far ahead":             {door.reserve("mail", "u", "a", tomorrow.AddDate(9, 0, 0)), codes.OutOfRange},
	} {
		require.Equal(t, c.want, c.got.failed, what)
	}
	require.EqualValues(t, 1, b.rdb.DBSize(t.Context()).Val(), "no key is created")
	b.redis.Kill()
	require.Equal(t, codes.Unavailable, door.take("api", "u", 1).failed)
}

// A proxy asks the sidecar about each request. The reply is 200 or 429 with headers. It depends on the client's address
// or on a header.
func TestAProxyChecksRequests(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
	b.bucket("team:red", 2)
	check := func(query string, header ...string) reply {
		return b.do(http.MethodGet, "/v1/check?"+query, "", header...)
	}
	for i, want := range []int{200, 200, 200, 429} {
		r := check("limit=hourly&by=ip", "X-Forwarded-For", "6.6.6.6, 10.0.0."+string(rune('1'+i))+", 192.0.2.7")
		require.Equal(t, want, r.status, "only the address from the proxy counts")
		require.Equal(t, `"hourly";q=3;w=3600`, r.header.Get("RateLimit-Policy"))
		require.Equal(t, "3", r.header.Get("X-RateLimit-Limit"))
		require.Equal(t, want == 429, r.header.Get("Retry-After") != "")
	}
	require.Equal(t, 200, check("limit=hourly&by=ip", "X-Forwarded-For", "192.0.2.8").status)
	require.Equal(t, 403, check("limit=hourly&by=ip&deny=403", "X-Forwarded-For", "192.0.2.7").status)
	require.Equal(t, 429, check("limit=hourly&by=ip&trusted=10.0.0.0/8", "X-Forwarded-For", "192.0.2.7, 10.1.1.1").status)
	require.Equal(t, 400, check("limit=hourly&by=ip").status, "a request without an address is refused")
	require.Contains(t, check("limit=hourly&by=ip").json(t)["message"], "by: ")
	require.Equal(t, 200, check("limit=api&by=header:X-User&tokens=2", "X-User", "7").status)
	require.Equal(t, 429, check("limit=api&by=header:X-User,ip&tokens=2", "X-User", "7").status)
	require.Equal(t, 400, check("limit=api&by=header:X-User").status)
	require.Equal(t, 200, check("limit=api&by=header:X-User&missing=allow").status)
	require.Equal(t, 429, check("limit=api&by=header:X-User&missing=deny").status)
	require.Equal(t, 403, check("limit=api&by=header:X-User&missing=deny&deny=403").status)
	require.Equal(t, 200, check("limit=api&by=header:X-User&missing=deny", "X-User", "8").status,
		"a request with its key is admitted")
	require.Equal(t, 200, check("limit=pool&key=red").status)
	require.EqualValues(t, 1, b.tokens("team:red"))
	b.bucket("team:", 2)
	require.Equal(t, 400, check("limit=pool&key=").status)
	require.EqualValues(t, 2, b.tokens("team:"), "the prefix alone is no key")
	require.Equal(t, 200, check("limit=plan&key=x").status)
	for _, query := range []string{
		"limit=hourly", "limit=hourly&by=ip&key=x", "limit=hourly&by=host", "limit=hourly&by=ip&toknes=3",
		"limit=hourly&by=ip&tokens=0", "limit=hourly&limit=api&by=ip", "limit=hourly&by=ip&deny=200",
		"limit=hourly&by=ip&open=1x", "limit=hourly&by=ip&missing=no",
		"limit=hourly&by=ip&trusted=me", "%zz",
		"limit=hourly&by=ip&trusted=::ffff:10.0.0.0/104",
	} {
		refused := check(query, "X-Forwarded-For", "192.0.2.9")
		require.Equal(t, 400, refused.status, query)
		require.Equal(t, "bad_request", refused.json(t)["code"], query)
	}
	require.Equal(t, 404, check("limit=none&by=ip", "X-Forwarded-For", "192.0.2.9").status)
	require.Equal(t, 405, b.post("/v1/check?limit=hourly&by=ip", "{}").status)
	require.Equal(t, 503, check("limit=pool&key=unknown").status)
	require.Equal(t, 200, check("limit=pool&key=unknown&open=true").status, "no bucket, no decision")
	b.redis.Kill()
	unavailable := check("limit=hourly&key=x")
	require.Equal(t, 503, unavailable.status)
	require.Equal(t, "unavailable", unavailable.json(t)["code"])
	require.Equal(t, 200, check("limit=hourly&key=x&open=true").status)
}

// A web page can make a browser send requests, also to the loopback addresses of the browser's machine.
func TestAWebPageTakesNoTokens(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/http.sock"
	b := start(t, func(o *Options, b *bench) {
		o.Named, o.Deadline = b.named(namedLimits), patience
		o.HTTP = append(o.HTTP, "unix:"+path)
	})
	for _, tc := range []struct {
		site, host string
		status     int
	}{
		{"cross-site", "127.0.0.1:8080", 403}, {"same-site", "127.0.0.1:8080", 403}, {"same-origin", "127.0.0.1", 200},
		{"none", "localhost:8080", 200}, {"", "evil.example:8080", 403}, {"", "127.0.0.1.evil.example", 403},
		{"", "192.0.2.1:8080", 403}, {"", "[::1]:8080", 200}, {"", "127.8.8.8", 200}, {"", "api.localhost", 200},
		{"", "LOCALHOST.", 200}, {"", "localhost.evil.example", 403},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url("/v1/check?limit=plan&key="+tc.host), nil)
		require.NoError(t, err)
		req.Host = tc.host
		if tc.site != "" {
			req.Header.Set("Sec-Fetch-Site", tc.site)
		}
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		require.Equal(t, tc.status, res.StatusCode, "%+v", tc)
	}
	r := send(t, unixClient(t, path), http.MethodGet, "http://sidecar/v1/check?limit=plan&key=unix", "")
	require.Equal(t, 200, r.status, "no browser reaches a Unix socket")
}

// Names that need escaping in a path reach their limits. Other paths don't.
func TestNamesOfLimitsInPathsArePercentEncoded(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		o.Deadline = patience
		o.Named = b.named(`
limits:
  - {name: a, lazy: {capacity: 3, rate: 1/h}}
  - {name: "GET:/v1/orders", lazy: {capacity: 3, rate: 1/h}}
  - {name: a//b/, window: {limit: 3, length: 1h}}
  - {name: .., window: {limit: 3, per: day, zone: Europe/Berlin}}
`)
	})
	for i, path := range []string{"GET:%2Fv1%2Forders", "GET%3A%2fv1%2forders", "a%2F%2Fb%2F", "%2E%2E"} {
		r := b.post("/v1/limits/"+path+"/take", `{"key":"k","tokens":1}`)
		require.Equal(t, http.StatusOK, r.status, "%s: %s", path, r.body)
		name := []string{"GET:/v1/orders", "GET:/v1/orders", "a//b/", ".."}[i]
		require.Equal(t, name, r.json(t)["name"])
		require.EqualValues(t, []int{2, 1, 2, 2}[i], r.json(t)["remaining"])
		undo := r.json(t)["undo"].(string)
		require.Equal(t, http.StatusOK, b.post("/v1/limits/"+path+"/undo", `{"key":"u","undo":"`+undo+`"}`).status)
		r = b.do(http.MethodGet, "/v1/limits/"+path+"/peek?key=k", "")
		require.Equal(t, name, r.json(t)["name"])
	}
	for _, path := range []string{"GET:/v1/orders", "a%2Fb", "a//b/", "a/../a", "/a", "./a", "a/", "a%2F"} {
		r := b.post("/v1/limits/"+path+"/take", `{"key":"k"}`)
		require.Equal(t, http.StatusNotFound, r.status, "%s: %s", path, r.body)
	}
	require.EqualValues(t, 3, b.rdb.DBSize(t.Context()).Val(), "other paths take no tokens")
}

// The reply to an admitted take of a lazy bucket has the time until there is a token again.
func TestALazyTakeReturnsWhenToComeAgain(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(*bench) limitDoor{"HTTP": openHTTP, "gRPC": openGRPC} {
		door := open(start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience }))
		for _, want := range []float64{0, 3_600_000} {
			r := door.take("api", "u", []int64{2, 1}[min(1, int(want))])
			require.True(t, r.OK, name)
			require.NotNil(t, r.NextMS, name)
			require.InDelta(t, want, *r.NextMS, 60_000, name)
		}
		require.InDelta(t, 3_600_000, *door.peek("api", "u").NextMS, 60_000, name)
		require.Nil(t, door.take("hourly", "u", 1).NextMS, "%s: a window has no time of a next token", name)
	}
}

func TestBadNamesAndWindowsOfAFileAreRefused(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		`name: "tö", bucket: {}`:                               "limits[0]: name: \"tö\" may have letters",
		`name: a, bucket: {prefix: "u}:"}`:                     "limits[0].bucket.prefix: refiller: invalid key",
		`name: a, window: {limit: 0, length: 1h}`:              "to have no limit, use no limiter",
		`name: a, window: {limit: 5, per: fortnight}`:          "window.per: calendar: \"fortnight\" is not one of minute",
		`name: a, window: {limit: 5, per: day, length: 1h}`:    "window: it excludes per, day",
		`name: a, window: {limit: 5, length: 1h, zone: UTC}`:   "window.zone: it needs the field per",
		`name: a, window: {limit: 5, per: day, zone: Here}`:    "\"Here\" is not a time zone",
		`name: a, window: {limit: 5, per: day, sliding: true}`: "per: a sliding window follows no calendar",
		`name: a.b, lazy: {capacity: 1, rate: 1/s}}, {name: a, all: [` + // of one name they would share their counts
			`{name: b, lazy: {capacity: 1, rate: 1/s}}]`: "limits[1].all[0].lazy: another limit already has the name \"a.b\"",

		`name: a, lazy: {capacity: 10.9, rate: 1/s}`:                  "lazy.capacity: line 1: 10.9 is not a whole",
		`name: a, window: {limit: 1e3, length: 1h}`:                   "window.limit: line 1: 1e3 is not a",
		`name: a, window: {limit: 0x10, length: 1h}`:                  "window.limit: line 1: 0x10 is not a",
		`name: a, window: {limit: "9", length: 1h}`:                   "below 2^63 in decimal digits, without quotes",
		`name: a, schedule: {windows: [{limit: 2.5, length: 1m}]}`:    "limits[0].schedule.windows[0].limit: line 1: 2.5 is",
		`name: a, all: [{name: b, window: {limit: [1], length: 1h}}]`: "limits[0].all[0].window.limit: line 1: a list is",
	} {
		_, err := limits.Parse("limits.yaml", []byte("limits: [{"+text+"}]"), nil, nil)
		require.ErrorIs(t, err, limits.ErrFile)
		require.ErrorContains(t, err, says)
		require.NotContains(t, err.Error(), "\n", "one mistake is one problem: %s", text)
	}
}

// The text for an undo that one limit returned can't be used for another limit.
func TestAnUndoOfAnotherLimitIsRefused(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
	door := openGRPC(b)
	one, both := door.take("api", "u", 2), door.take("plan", "u", 2)
	require.Equal(t, codes.InvalidArgument, door.undo("plan", "u", one.Undo).failed)
	require.Equal(t, codes.InvalidArgument, door.undo("api", "u", both.Undo).failed)
	require.EqualValues(t, 1, door.peek("api", "u").Remaining)
	require.EqualValues(t, 1, door.peek("plan", "u").Remaining)
}

// The tokens that a bucket in shadow mode admitted beyond its own can't be undone. The text for an undo doesn't include
// them.
func TestAShadowTakeByNameHasNothingToUndo(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named, o.Deadline = b.named(namedLimits), patience })
	p := hourly(3)
	p.Shadow = true
	createBucket(t, b.rdb, "team:try", p)
	for name, door := range map[string]limitDoor{"HTTP": openHTTP(b), "gRPC": openGRPC(b)} {
		require.NotEmpty(t, door.take("pool", "try", 1).Undo, name)
		r := door.take("pool", "try", 3)
		require.True(t, r.OK, name)
		require.Empty(t, r.Undo, name)
	}
}

// A check of a limit of pacing waits for its place. It may last longer than a call that doesn't wait.
func TestACheckWaitsForItsPlace(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		o.Limits.Patience = 500 * time.Millisecond
		o.Deadline = patience
		o.Named = b.named(`
limits:
  - {name: queue, pacing: {rate: 30/m, max_wait: 2s}}
  - {name: both, all: [{name: queue, pacing: {rate: 30/m, max_wait: 2s}}, {name: day, window: {limit: 9, per: day}}]}
`)
	})
	for _, name := range []string{"queue", "both"} {
		for i := range 2 {
			r := b.do(http.MethodGet, "/v1/check?limit="+name+"&key=k", "")
			require.Equal(t, http.StatusOK, r.status, "%s, place %d: %s", name, i, r.body)
		}
	}
}

// While Redis doesn't reply, a bucket's own degraded mode decides, whatever the door.
func TestTokensThatNoBucketGaveAreNotReturned(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		var err error
		o.Client, err = fetch.New(b.rdb, fetch.WithTimeout(100*time.Millisecond))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Client.Close(context.Background())) })
		b.client = o.Client
	})
	p := hourly(1000)
	p.Degraded = policy.DegradedOpen
	createBucket(t, b.rdb, "checkout", p)
	buckets := refillerv1.NewBucketsClient(b.dial())
	eventually(t, func() bool {
		return b.post("/v1/wait", `{"key":"checkout"}`).json(t)["source"] == "shared"
	}, "the policy is known")
	b.redis.Pause()
	r := b.post("/v1/wait", `{"key":"checkout","tokens":5}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	source, _ := r.json(t)["source"].(string)
	require.Contains(t, source, "fallback")
	res, err := buckets.Wait(t.Context(), &refillerv1.WaitRequest{Key: "checkout"})
	require.NoError(t, err)
	require.Contains(t, res.GetSource(), "fallback")
	b.redis.Resume()
	r = b.post("/v1/return", `{"key":"checkout","tokens":5,"source":"`+source+`"}`)
	require.Equal(t, http.StatusBadRequest, r.status)
	require.Contains(t, string(r.body), "came from no bucket")
	_, err = buckets.Return(t.Context(), &refillerv1.ReturnRequest{Key: "checkout", Source: res.GetSource()})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
}

func TestTokensThatABucketInShadowModeLackedAreNotReturned(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	p := hourly(3)
	p.Shadow = true
	createBucket(t, b.rdb, "trial", p)
	require.Equal(t, "shared", b.post("/v1/take", `{"key":"trial","tokens":3}`).json(t)["source"])
	for path, body := range map[string]string{
		"/v1/take": `{"key":"trial","tokens":3}`, "/v1/wait": `{"key":"trial","tokens":3,"timeout_ms":5000}`,
	} {
		r := b.post(path, body).json(t)
		require.Equal(t, true, r["shadow"], path)
		refused := b.post("/v1/return", fmt.Sprintf(`{"key":"trial","tokens":%v,"source":%q}`, r["taken"], r["source"]))
		require.Equal(t, http.StatusBadRequest, refused.status, path)
	}
	buckets := refillerv1.NewBucketsClient(b.dial())
	res, err := buckets.Take(t.Context(), &refillerv1.TakeRequest{Key: "trial"})
	require.NoError(t, err)
	require.True(t, res.GetShadow())
	_, err = buckets.Return(t.Context(), &refillerv1.ReturnRequest{Key: "trial", Source: res.GetSource()})
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.Zero(t, b.tokens("trial"))
}

func TestANamedBucketIsAnsweredAsItsDegradedModeSays(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		o.Deadline = 100 * time.Millisecond
		var err error
		o.Client, err = fetch.New(b.rdb, fetch.WithTimeout(o.Deadline))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Client.Close(context.Background())) })
		b.client = o.Client
		o.Named = b.named(namedLimits)
	})
	p := hourly(1000)
	p.Degraded = policy.DegradedOpen
	createBucket(t, b.rdb, "team:red", p)
	for known := false; !known; { // until the client knows the policy
		known = b.post("/v1/limits/pool/take", `{"key":"red"}`).json(t)["source"] == "shared"
	}
	b.redis.Pause()
	defer b.redis.Resume()
	r := b.post("/v1/limits/pool/take", `{"key":"red"}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Contains(t, r.json(t)["source"], "fallback")
	grpc := openGRPC(b).take("pool", "red", 1)
	require.Equal(t, codes.OK, grpc.failed)
	require.True(t, grpc.OK)
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/v1/check?limit=pool&key=red", "").status)
}

// Numbers are decimal, as in the refiller's files, and may follow an anchor.
func TestNumbersOfAFileAreDecimal(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		o.Deadline = patience
		o.Named = b.named(`
limits:
  - {name: zeros, window: {limit: &n 0100, length: 1h}}
  - {name: again, window: {limit: *n, length: 1h}}
`)
	})
	for _, name := range []string{"zeros", "again"} {
		require.EqualValues(t, 100, b.do(http.MethodGet, "/v1/limits/"+name+"/peek?key=a", "").json(t)["limit"], name)
	}
}
