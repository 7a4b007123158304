package sidecar

import (
	"context"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
)

func TestTakeReturnAndPeek(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("checkout", 3)

	r := b.post("/v1/take", `{"key":"checkout","tokens":2}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	require.Equal(t, map[string]any{"key": "checkout", "ok": true, "taken": 2.0, "remaining": 1.0, "limit": 3.0,
		"retry_after_ms": 0.0, "reset_after_ms": 7_200_000.0, "source": "shared"}, r.json(t))

	r = b.post("/v1/take", `{"key":"checkout","tokens":2}`)
	require.Equal(t, http.StatusOK, r.status, "a denial is an answer")
	require.Equal(t, false, r.json(t)["ok"])
	require.InDelta(t, 3_600_000, r.json(t)["retry_after_ms"], 60_000)
	require.EqualValues(t, 1, b.tokens("checkout"))

	r = b.post("/v1/take", `{"key":"checkout"}`)
	require.Equal(t, 1.0, r.json(t)["taken"], "one token unless the request says so")

	r = b.post("/v1/return", `{"key":"checkout","tokens":2}`)
	require.Equal(t, map[string]any{"key": "checkout", "tokens": 2.0}, r.json(t))
	require.EqualValues(t, 2, b.tokens("checkout"))

	r = b.do(http.MethodGet, "/v1/peek?key=checkout", "")
	require.Equal(t, http.StatusOK, r.status)
	require.Equal(t, 2.0, r.json(t)["remaining"])
	require.EqualValues(t, 2, b.tokens("checkout"))
}

func TestATimeThatIsNotKnownIsNull(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	_, err := lua.Add(t.Context(), b.rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	answer := b.do(http.MethodGet, "/v1/peek?key=foreign", "").json(t)
	require.Contains(t, answer, "reset_after_ms")
	require.Nil(t, answer["reset_after_ms"])
}

func TestWaitTakesWhenTheTokensCome(t *testing.T) {
	t.Parallel()
	// The wait outlasts the client's time to send, since a client that waits is not slow.
	b := start(t, func(o *Options, _ *bench) { o.Limits.Patience = 200 * time.Millisecond })
	b.bucket("checkout", 3)
	_, err := lua.Reset(t.Context(), b.rdb, "checkout", 0)
	require.NoError(t, err)

	r := b.post("/v1/wait", `{"key":"checkout","tokens":2,"timeout_ms":50}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, false, r.json(t)["ok"])
	require.Equal(t, 0.0, r.json(t)["taken"])

	// Tokens that are due later than the longest wait would be refused at once.
	b.empty("mail", 1500*time.Millisecond)
	answers := make(chan reply, 1)
	go func() {
		defer close(answers) // also if the request fails
		answers <- b.post("/v1/wait", `{"key":"mail"}`)
	}()
	b.underWay(1)
	_, err = lua.Grant(t.Context(), b.rdb, "mail", 1)
	require.NoError(t, err)
	r = <-answers
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, true, r.json(t)["ok"])
	require.Equal(t, 1.0, r.json(t)["taken"])
	require.Greater(t, r.json(t)["waited_ms"], 1000.0)
}

func TestAClientThatLeavesAWaitEndsIt(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.empty("checkout", 30*time.Second)
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url("/v1/wait"), strings.NewReader(`{"key":"checkout"}`))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	gone := make(chan error, 1)
	go func() {
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = res.Body.Close()
		}
		gone <- err
	}()
	b.underWay(1)
	leave()
	require.ErrorIs(t, <-gone, context.Canceled)
	b.underWay(0)
}

// badRequest is a request that changes nothing, and how it is refused.
type badRequest struct {
	name, method, path, body string
	header                   []string
	status                   int
	code, says               string
}

func badRequests() []badRequest {
	const post, get = http.MethodPost, http.MethodGet
	long := strings.Repeat("k", 513)
	cases := []badRequest{
		{"NoBody", post, "/v1/take", "", nil, 400, "bad_request", "not a JSON object"},
		{"NotJSON", post, "/v1/take", "key=checkout", nil, 400, "bad_request", "not a JSON object"},
		{"Array", post, "/v1/take", `[{"key":"checkout"}]`, nil, 400, "bad_request", "not a JSON object"},
		{"CutShort", post, "/v1/take", `{"key":"checkout"`, nil, 400, "bad_request", "not JSON"},
		{"SecondObject", post, "/v1/take", `{"key":"checkout"}{}`, nil, 400, "bad_request", "more than one"},
		{"NotUTF8", post, "/v1/take", "{\"key\":\"\xff\"}", nil, 400, "bad_request", "UTF-8"},
		{"UnknownField", post, "/v1/take", `{"key":"checkout","n":1}`, nil, 400, "bad_request", `"n": no such field; want key, tokens`},
		{"OtherCase", post, "/v1/take", `{"Key":"checkout"}`, nil, 400, "bad_request", `"Key": no such field`},
		{"FieldTwice", post, "/v1/take", `{"key":"checkout","key":"mail"}`, nil, 400, "bad_request", "key: given twice"},
		{"NullKey", post, "/v1/take", `{"key":null}`, nil, 400, "bad_request", "key: want a string"},
		{"NullTokens", post, "/v1/take", `{"key":"checkout","tokens":null}`, nil, 400, "bad_request", "tokens: want a whole number"},
		{"NumberAsKey", post, "/v1/take", `{"key":7}`, nil, 400, "bad_request", "key: want a string"},
		{"TextAsTokens", post, "/v1/take", `{"key":"checkout","tokens":"1"}`, nil, 400, "bad_request", "tokens: want a whole number"},
		{"Fraction", post, "/v1/take", `{"key":"checkout","tokens":1.5}`, nil, 400, "bad_request", "tokens: want a whole number"},
		{"HugeNumber", post, "/v1/take", `{"key":"checkout","tokens":1e300}`, nil, 400, "bad_request", "tokens: want a whole number"},
		{"PastInt64", post, "/v1/take", `{"key":"checkout","tokens":9223372036854775808}`, nil, 400, "bad_request", "tokens: want a whole number"},
		{"DeepNesting", post, "/v1/take", strings.Repeat(`{"key":`, 9000), nil, 400, "bad_request", ""},
		{"NoTokens", post, "/v1/take", `{"key":"checkout","tokens":0}`, nil, 400, "invalid_amount", "want 1 to 1125899906842624"},
		{"NegativeTokens", post, "/v1/take", `{"key":"checkout","tokens":-1}`, nil, 400, "invalid_amount", "want 1 to"},
		{"TooManyTokens", post, "/v1/take", `{"key":"checkout","tokens":1125899906842625}`, nil, 400, "invalid_amount", "want 1 to"},
		{"NoKey", post, "/v1/take", `{}`, nil, 400, "invalid_key", "it is empty"},
		{"HugeKey", post, "/v1/take", `{"key":"` + long + `"}`, nil, 400, "invalid_key", "513 bytes"},
		{"ClosingBrace", post, "/v1/take", `{"key":"check}out"}`, nil, 400, "invalid_key", "closing brace"},
		{"UnknownBucket", post, "/v1/take", `{"key":"typo"}`, nil, 404, "unknown_bucket", "typo"},
		{"MalformedBucket", post, "/v1/take", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"ExceedsCapacity", post, "/v1/take", `{"key":"checkout","tokens":4}`, nil, 422, "exceeds_capacity", "at most 3"},
		{"HugeBody", post, "/v1/take", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", "65536"},
		{"Form", post, "/v1/take", `{"key":"checkout"}`, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415, "wrong_media_type", "application/json"},
		{"NoMediaType", post, "/v1/take", `{"key":"checkout"}`, []string{"Content-Type", ""}, 415, "wrong_media_type", ""},
		{"ReturnUnknownBucket", post, "/v1/return", `{"key":"typo"}`, nil, 404, "unknown_bucket", "typo"},
		{"ReturnMalformedBucket", post, "/v1/return", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"ReturnNothing", post, "/v1/return", `{"key":"checkout","tokens":0}`, nil, 400, "invalid_amount", ""},
		{"ReturnHuge", post, "/v1/return", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"ReturnForm", post, "/v1/return", `{"key":"checkout"}`, []string{"Content-Type", "text/plain"}, 415, "wrong_media_type", ""},
		{"WaitUnknownBucket", post, "/v1/wait", `{"key":"typo"}`, nil, 404, "unknown_bucket", ""},
		{"WaitMalformedBucket", post, "/v1/wait", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"WaitExceedsCapacity", post, "/v1/wait", `{"key":"checkout","tokens":4}`, nil, 422, "exceeds_capacity", ""},
		{"WaitNoTime", post, "/v1/wait", `{"key":"checkout","timeout_ms":0}`, nil, 400, "bad_request", "timeout_ms: 0 is not from 1 to 60000"},
		{"WaitTooLong", post, "/v1/wait", `{"key":"checkout","timeout_ms":60001}`, nil, 400, "bad_request", "60001 is not from 1 to 60000"},
		{"WaitForever", post, "/v1/wait", `{"key":"checkout","timeout_ms":9223372036854775807}`, nil, 400, "bad_request", "timeout_ms"},
		{"WaitHuge", post, "/v1/wait", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"WaitForm", post, "/v1/wait", `{"key":"checkout"}`, []string{"Content-Type", "text/plain"}, 415, "wrong_media_type", ""},
		{"TimeoutOfATake", post, "/v1/take", `{"key":"checkout","timeout_ms":1}`, nil, 400, "bad_request", "no such field"},
		{"PeekNoKey", get, "/v1/peek", "", nil, 400, "invalid_key", "empty"},
		{"PeekTwoKeys", get, "/v1/peek?key=checkout&key=mail", "", nil, 400, "bad_request", "want key once"},
		{"PeekOtherParameter", get, "/v1/peek?key=checkout&n=1", "", nil, 400, "bad_request", "want key once"},
		{"PeekBadEscape", get, "/v1/peek?key=%zz", "", nil, 400, "bad_request", "query"},
		{"PeekNotUTF8", get, "/v1/peek?key=%ff", "", nil, 400, "bad_request", "UTF-8"},
		{"PeekHugeKey", get, "/v1/peek?key=" + long, "", nil, 400, "invalid_key", "513 bytes"},
		{"PeekUnknownBucket", get, "/v1/peek?key=typo", "", nil, 404, "unknown_bucket", ""},
		{"PeekMalformedBucket", get, "/v1/peek?key=other", "", nil, 409, "malformed_bucket", ""},
		{"TakeByGet", get, "/v1/take?key=checkout", "", nil, 405, "wrong_method", "POST"},
		{"PeekByPost", post, "/v1/peek?key=checkout", "{}", nil, 405, "wrong_method", "GET"},
		{"ProbeByPost", post, "/readyz", "", nil, 405, "wrong_method", "GET"},
		{"OtherPath", post, "/v1/takeall", `{"key":"checkout"}`, nil, 404, "no_such_path", ""},
		{"PathWithin", post, "/v1/take/checkout", `{}`, nil, 404, "no_such_path", ""},
		{"Root", get, "/", "", nil, 404, "no_such_path", ""},
	}
	return cases
}

func TestABadRequestIsRefusedAndDoesNothing(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("checkout", 3)
	require.NoError(t, b.rdb.MSet(t.Context(), "other", "no number", "{other}:ctl", "no hash").Err())
	require.EqualValues(t, 1, b.post("/v1/take", `{"key":"checkout"}`).json(t)["taken"])
	before := dump(t, b)
	for _, c := range badRequests() {
		r := b.do(c.method, c.path, c.body, c.header...)
		require.Equal(t, c.status, r.status, "%s: %s", c.name, r.body)
		require.Equal(t, c.code, r.json(t)["code"], c.name)
		require.Contains(t, r.json(t)["message"], c.says, c.name)
	}
	require.Equal(t, before, dump(t, b), "no request took, returned or created anything")
}

// dump is all that the database holds.
func dump(t testing.TB, b *bench) map[string]string {
	t.Helper()
	keys, err := b.rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	all := make(map[string]string)
	for _, k := range keys {
		all[k], err = b.rdb.Dump(t.Context(), k).Result()
		require.NoError(t, err)
	}
	return all
}

func TestARedisThatIsAwayIs503(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("checkout", 3)
	b.redis.Kill()
	for path, body := range map[string]string{"/v1/take": `{"key":"checkout"}`, "/v1/return": `{"key":"checkout"}`, "/v1/wait": `{"key":"checkout"}`} {
		r := b.post(path, body)
		require.Equal(t, http.StatusServiceUnavailable, r.status, path)
		require.Equal(t, "unavailable", r.json(t)["code"])
		require.Equal(t, "1", r.header.Get("Retry-After"))
	}
	require.Equal(t, http.StatusServiceUnavailable, b.do(http.MethodGet, "/v1/peek?key=checkout", "").status)
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/livez", "").status)
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/readyz", "").status,
		"a replacement would find the same Redis")
}

func TestAUnixSocketServesAndIsTakenOverFromADeadProcess(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/http.sock"
	first, err := listen("unix:"+path, newClients(1))
	require.NoError(t, err)
	_, err = listen("unix:"+path, newClients(1))
	require.Error(t, err, "it is in use")
	leaveSocket(t, first)
	_, err = os.Lstat(path)
	require.NoError(t, err)

	b := start(t, func(o *Options, _ *bench) { o.HTTP = append(o.HTTP, "unix:"+path) })
	b.bucket("checkout", 3)
	r := send(t, unixClient(t, path), http.MethodPost, "http://sidecar/v1/take", `{"key":"checkout"}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.NoError(t, b.stop())
	_, err = os.Lstat(path)
	require.ErrorIs(t, err, os.ErrNotExist, "the end leaves no socket behind")

	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err = listen("unix:"+path, newClients(1))
	require.Error(t, err, "a file is no stale socket")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "precious", string(data))
}
