package sidecar

import (
	"context"
	"encoding/json"
	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/testing/openapi"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
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
	require.Equal(t, http.StatusOK, r.status, "a denial is no error")
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

func TestTakeOfAllIsAllOrNothing(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("user", 3)
	b.bucket("tenant", 5)
	const body = `{"requests":[{"key":"user","tokens":2},{"key":"tenant"}]}`

	r := b.post("/v1/take-all", body)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, map[string]any{"ok": true, "denied": nil, "retry_after_ms": 0.0, "results": []any{
		map[string]any{"key": "user", "ok": true, "taken": 2.0, "remaining": 1.0, "limit": 3.0, "retry_after_ms": 0.0,
			"reset_after_ms": 7_200_000.0, "source": "shared"},
		map[string]any{"key": "tenant", "ok": true, "taken": 1.0, "remaining": 4.0, "limit": 5.0, "retry_after_ms": 0.0,
			"reset_after_ms": 3_600_000.0, "source": "shared"},
	}}, r.json(t))

	r = b.post("/v1/take-all", body)
	require.Equal(t, http.StatusOK, r.status, "a denial is no error")
	require.Equal(t, false, r.json(t)["ok"])
	require.Equal(t, "user", r.json(t)["denied"])
	require.InDelta(t, 3_600_000, r.json(t)["retry_after_ms"], 60_000)
	require.EqualValues(t, 1, b.tokens("user"))
	require.EqualValues(t, 4, b.tokens("tenant"), "no bucket is charged")
}

func TestAReservationIsHeldUntilItIsSettledOrCancelled(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("llm", 100)

	r := b.post("/v1/reserve", `{"key":"llm","tokens":40,"ttl_ms":3600000}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, true, r.json(t)["ok"])
	require.Equal(t, 40.0, r.json(t)["taken"])
	require.Equal(t, 60.0, r.json(t)["remaining"])
	until, err := time.Parse(time.RFC3339Nano, r.json(t)["until"].(string))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(time.Hour), until, time.Minute)
	id := r.json(t)["id"].(string)
	require.Equal(t, 40.0, b.do(http.MethodGet, "/v1/peek?key=llm", "").json(t)["outstanding"])

	settle := `{"key":"llm","id":"` + id + `","used":25}`
	want := map[string]any{"key": "llm", "id": id, "returned": 15.0, "clamped": 0.0, "void": 0.0, "charged": 0.0,
		"owed":     0.0,
		"forgiven": 0.0, "remaining": 75.0, "again": false}
	require.Equal(t, want, b.post("/v1/settle", settle).json(t))
	want["again"] = true
	require.Equal(t, want, b.post("/v1/settle", settle).json(t), "a repeated settlement changes nothing")
	require.EqualValues(t, 75, b.tokens("llm"))
	r = b.post("/v1/reserve", `{"key":"llm","ttl_ms":1000,"id":"`+id+`"}`)
	require.Equal(t, http.StatusConflict, r.status, "the reservation has ended")
	require.Equal(t, "id_in_use", r.json(t)["code"])

	// If the client chooses the id, it may repeat the request: the tokens are taken only once.
	const own = `{"key":"llm","tokens":70,"ttl_ms":3600000,"id":"job 7","overrun":"debt"}`
	for range 2 {
		require.Equal(t, "job 7", b.post("/v1/reserve", own).json(t)["id"])
	}
	require.EqualValues(t, 5, b.tokens("llm"))
	r = b.post("/v1/reserve", `{"key":"llm","tokens":6,"ttl_ms":1000}`)
	require.Equal(t, false, r.json(t)["ok"])
	require.Contains(t, r.json(t), "id")
	require.Nil(t, r.json(t)["id"], "a denied reservation holds no tokens")
	require.Nil(t, r.json(t)["until"])
	require.Equal(t, 70.0, b.post("/v1/cancel", `{"key":"llm","id":"job 7"}`).json(t)["returned"])

	require.Equal(t, true, b.post("/v1/reserve",
		`{"key":"llm","ttl_ms":3600000,"id":"debt","overrun":"debt"}`).json(t)["ok"])
	r = b.post("/v1/settle", `{"key":"llm","id":"debt","used":80}`)
	require.Equal(t, 74.0, r.json(t)["charged"])
	require.Equal(t, 5.0, r.json(t)["owed"])
	require.EqualValues(t, 0, b.tokens("llm"))
}

// A reservation whose tokens no bucket holds can't be settled, so it has no id.
func TestAReservationOfABucketInShadowModeHasNoID(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	p := hourly(3)
	p.Shadow = true
	createBucket(t, b.rdb, "tried", p)
	require.Equal(t, true, b.post("/v1/take", `{"key":"tried","tokens":3}`).json(t)["ok"])
	r := b.post("/v1/reserve", `{"key":"tried","ttl_ms":1000}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, true, r.json(t)["ok"])
	require.Equal(t, "shadow", r.json(t)["source"])
	require.Equal(t, true, r.json(t)["shadow"])
	require.Nil(t, r.json(t)["id"])
}

func TestAnAnswerReportsThatItsRegionIsOnItsFloor(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	terms := policy.Terms{
		Fence: policy.Fence{Epoch: 1, Seq: 1}, Capacity: 100, Tokens: 1, Per: time.Hour.Microseconds(), Interval: 100_000,
		MaxElapsed: 2_000_000, Initial: 50, Pool: true, // the grant is over
	}
	_, err := lua.Refill(t.Context(), b.rdb, "payments", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	b.bucket("checkout", 3)
	require.Equal(t, true, b.post("/v1/take", `{"key":"payments"}`).json(t)["on_floor"])
	require.NotContains(t, b.post("/v1/take", `{"key":"checkout"}`).json(t), "on_floor")
	c := refillerv1.NewBucketsClient(b.dial())
	for key, want := range map[string]bool{"payments": true, "checkout": false} {
		r, err := c.Peek(t.Context(), &refillerv1.PeekRequest{Key: key})
		require.NoError(t, err)
		require.Equal(t, want, r.GetOnFloor(), key)
	}
}

// On a Cluster the buckets of one call are in different slots.
func TestTheSidecarServesBucketsOfACluster(t *testing.T) {
	t.Parallel()
	cluster := testenv.Cluster(t)
	rdb := cluster.Client()
	client, err := fetch.New(rdb, fetch.WithTimeout(patience))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close(context.Background())) })
	b := start(t, func(o *Options, _ *bench) { o.Client = client })
	left := func(key string) int64 {
		n, err := rdb.Get(t.Context(), key).Int64()
		require.NoError(t, err)
		return n
	}
	keys := []string{"user", "tenant", "world"}
	owners := make(map[string]bool)
	for _, key := range keys {
		createBucket(t, rdb, key, hourly(100))
		owners[cluster.Owner(cluster.Slot(key)).Addr()] = true
	}
	require.Greater(t, len(owners), 1, "the buckets are on several servers")

	const body = `{"requests":[{"key":"user","tokens":60},{"key":"tenant","tokens":50},{"key":"world","tokens":40}]}`
	require.Equal(t, true, b.post("/v1/take-all", body).json(t)["ok"])
	r := b.post("/v1/take-all", body)
	require.Equal(t, false, r.json(t)["ok"])
	require.Equal(t, "user", r.json(t)["denied"])
	for key, want := range map[string]int64{"user": 40, "tenant": 50, "world": 60} {
		require.Equal(t, want, left(key), "all or nothing: %s", key)
	}
	require.Equal(t, true, b.post("/v1/reserve", `{"key":"world","tokens":60,"ttl_ms":60000,"id":"job"}`).json(t)["ok"])
	require.Equal(t, 35.0, b.post("/v1/settle", `{"key":"world","id":"job","used":25}`).json(t)["returned"])

	// Each token of a bucket is taken only once, whatever the protocol.
	var taken atomic.Int64
	var wg sync.WaitGroup
	conn := refillerv1.NewBucketsClient(b.dial())
	for i := range 2 * 20 {
		wg.Go(func() {
			if i%2 == 0 {
				r, err := conn.Take(t.Context(), &refillerv1.TakeRequest{Key: "user", Tokens: proto.Int64(2)})
				if err != nil {
					t.Error(err)
				}
				taken.Add(r.GetTaken())
				return
			}
			res, err := http.Post(b.url("/v1/take"), "application/json", strings.NewReader(`{"key":"user","tokens":2}`))
			if err != nil {
				t.Error(err)
				return
			}
			defer res.Body.Close()
			var answer struct{ Taken int64 }
			if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
				t.Error(err)
			}
			taken.Add(answer.Taken)
		})
	}
	wg.Wait()
	require.EqualValues(t, 40, taken.Load())
	require.EqualValues(t, 0, left("user"))
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
	// The wait lasts longer than Patience, because a client that waits is not slow.
	b := start(t, func(o *Options, _ *bench) { o.Limits.Patience = 500 * time.Millisecond })
	b.bucket("checkout", 3)
	_, err := lua.Reset(t.Context(), b.rdb, "checkout", 0)
	require.NoError(t, err)

	r := b.post("/v1/wait", `{"key":"checkout","tokens":2,"timeout_ms":50}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, false, r.json(t)["ok"])
	require.Equal(t, 0.0, r.json(t)["taken"])

	// A wait for tokens that are due later than the longest wait would end at once. Two seconds after the first try the
	// client tries again, and finds tokens that were granted meanwhile.
	b.empty("mail", 25*time.Second)
	answers := make(chan reply, 1)
	tries := b.tries()
	go func() {
		defer close(answers) // also if the request fails
		answers <- b.post("/v1/wait", `{"key":"mail"}`)
	}()
	eventually(t, func() bool { return b.tries() != tries }, "the wait's first try, which is denied")
	_, err = lua.Grant(t.Context(), b.rdb, "mail", 1)
	require.NoError(t, err)
	r = <-answers
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.Equal(t, true, r.json(t)["ok"])
	require.Equal(t, 1.0, r.json(t)["taken"])
	require.Greater(t, r.json(t)["waited_ms"], 1900.0)
}

func TestAClientThatLeavesAWaitEndsIt(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.empty("checkout", 30*time.Second)
	ctx, leave := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url("/v1/wait"),
		strings.NewReader(`{"key":"checkout"}`))
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

// Clients that only probe and scrape must not reach the buckets.
func TestTheAdminAddressHasNoBuckets(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, _ *bench) {
		o.Admin = []string{"127.0.0.1:0"}
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("numbers")) })
		o.Limits.Calls, o.Limits.ClientCalls = 1, 1
	})
	b.bucket("checkout", 3)
	url := "http://" + b.server.AdminAddrs()[0].String()
	leave := b.occupy()
	for path, want := range map[string]string{"/livez": "ok\n", "/readyz": "ok\n", "/metrics": "numbers"} {
		r := send(t, http.DefaultClient, http.MethodGet, url+path, "")
		require.Equal(t, http.StatusOK, r.status, path)
		require.Equal(t, want, string(r.body), path)
	}
	for _, path := range []string{"/v1/take", "/v1/return", "/"} {
		r := send(t, http.DefaultClient, http.MethodPost, url+path, `{"key":"checkout"}`)
		require.Equal(t, http.StatusNotFound, r.status, path)
	}
	require.EqualValues(t, 3, b.tokens("checkout"))

	// While the server drains, its replies announce the end.
	b.server.startDrain()
	require.Equal(t, http.StatusServiceUnavailable, send(t, http.DefaultClient, http.MethodGet, url+"/readyz", "").status)
	leave()
}

// badRequest is a request that changes nothing, with the refusal that it must get.
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
		{"UnknownField", post, "/v1/take", `{"key":"checkout","n":1}`, nil, 400, "bad_request",
			`"n": unknown field; want one of flow, key, leave, request_id, tokens`},
		{"OtherCase", post, "/v1/take", `{"Key":"checkout"}`, nil, 400, "bad_request", `"Key": unknown field`},
		{"FieldTwice", post, "/v1/take", `{"key":"checkout","key":"mail"}`, nil, 400, "bad_request", "key: given twice"},
		{"NullKey", post, "/v1/take", `{"key":null}`, nil, 400, "bad_request", "key: want a string"},
		{"NullTokens", post, "/v1/take", `{"key":"checkout","tokens":null}`, nil, 400, "bad_request",
			"tokens: want a whole number"},
		{"NumberAsKey", post, "/v1/take", `{"key":7}`, nil, 400, "bad_request", "key: want a string"},
		{"TextAsTokens", post, "/v1/take", `{"key":"checkout","tokens":"1"}`, nil, 400, "bad_request",
			"tokens: want a whole number"},
		{"Fraction", post, "/v1/take", `{"key":"checkout","tokens":1.5}`, nil, 400, "bad_request",
			"tokens: want a whole number"},
		{"HugeNumber", post, "/v1/take", `{"key":"checkout","tokens":1e300}`, nil, 400, "bad_request",
			"tokens: want a whole number"},
		{"PastInt64", post, "/v1/take", `{"key":"checkout","tokens":9223372036854775808}`, nil, 400, "bad_request",
			"tokens: want a whole number"},
		{"DeepNesting", post, "/v1/take", strings.Repeat(`{"key":`, 9000), nil, 400, "bad_request", ""},
		{"NoTokens", post, "/v1/take", `{"key":"checkout","tokens":0}`, nil, 400, "invalid_amount",
			"want 1 to 1125899906842624"},
		{"NegativeTokens", post, "/v1/take", `{"key":"checkout","tokens":-1}`, nil, 400, "invalid_amount", "want 1 to"},
		{"TooManyTokens", post, "/v1/take", `{"key":"checkout","tokens":1125899906842625}`, nil, 400, "invalid_amount",
			"want 1 to"},
		{"NoKey", post, "/v1/take", `{}`, nil, 400, "invalid_key", "it is empty"},
		{"HugeKey", post, "/v1/take", `{"key":"` + long + `"}`, nil, 400, "invalid_key", "513 bytes"},
		{"ClosingBrace", post, "/v1/take", `{"key":"check}out"}`, nil, 400, "invalid_key", "closing brace"},
		{"NoFlow", post, "/v1/take", `{"key":"checkout","flow":""}`, nil, 400, "bad_request",
			"flow: it is empty; want 1 to 256 bytes"},
		{"NullFlow", post, "/v1/take", `{"key":"checkout","flow":null}`, nil, 400, "bad_request", "flow: want a string"},
		{"HugeFlow", post, "/v1/take", `{"key":"checkout","flow":"` + long + `"}`, nil, 400, "bad_request",
			"it has 513 bytes; want 1 to 256"},
		{"EmptyTeam", post, "/v1/wait", `{"key":"checkout","flow":"/7"}`, nil, 400, "bad_request",
			"one of its levels is empty; want 1 to 3"},
		{"EmptyRequestID", post, "/v1/take", `{"key":"checkout","request_id":""}`, nil, 400, "bad_request",
			"request_id: refiller: invalid request id: it has 0 bytes; want 1 to 128"},
		{"RequestIDOfAWait", post, "/v1/wait", `{"key":"checkout","request_id":"a"}`, nil, 400, "bad_request",
			`"request_id": unknown field`},
		{"FlowsOfOneBucket", post, "/v1/take-all",
			`{"requests":[{"key":"checkout","flow":"a"},{"key":"checkout","flow":"b"}]}`, nil, 400, "invalid_option",
			`requests of bucket "checkout" for the flows "a" and "b"; want one`},
		{"AllHugeRequestID", post, "/v1/take-all", `{"requests":[{"key":"checkout"}],"request_id":"` + long + `"}`, nil, 400,
			"bad_request", "request_id: refiller: invalid request id: it has 513 bytes"},
		{"FlowOfAReservation", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"flow":"a/"}`, nil, 400, "bad_request",
			"one of its levels is empty; want 1 to 3"},
		{"FlowsOfOneBucket", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"checkout","flow":"a"}]}`, nil,
			400, "invalid_option", "want one"},
		{"UnknownBucket", post, "/v1/take", `{"key":"typo"}`, nil, 404, "unknown_bucket", "typo"},
		{"MalformedBucket", post, "/v1/take", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"ExceedsCapacity", post, "/v1/take", `{"key":"checkout","tokens":4}`, nil, 422, "exceeds_capacity", "at most 3"},
		{"HugeBody", post, "/v1/take", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", "65536"},
		{"Form", post, "/v1/take", `{"key":"checkout"}`, []string{"Content-Type", "application/x-www-form-urlencoded"}, 415,
			"wrong_media_type", "application/json"},
		{"NoMediaType", post, "/v1/take", `{"key":"checkout"}`, []string{"Content-Type", ""}, 415, "wrong_media_type", ""},
		{"ReturnUnknownBucket", post, "/v1/return", `{"key":"typo"}`, nil, 404, "unknown_bucket", "typo"},
		{"ReturnMalformedBucket", post, "/v1/return", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"ReturnNothing", post, "/v1/return", `{"key":"checkout","tokens":0}`, nil, 400, "invalid_amount", ""},
		{"ReturnHuge", post, "/v1/return", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"ReturnForm", post, "/v1/return", `{"key":"checkout"}`, []string{"Content-Type", "text/plain"}, 415,
			"wrong_media_type", ""},
		{"WaitUnknownBucket", post, "/v1/wait", `{"key":"typo"}`, nil, 404, "unknown_bucket", ""},
		{"WaitMalformedBucket", post, "/v1/wait", `{"key":"other"}`, nil, 409, "malformed_bucket", ""},
		{"WaitExceedsCapacity", post, "/v1/wait", `{"key":"checkout","tokens":4}`, nil, 422, "exceeds_capacity", ""},
		{"WaitNoTime", post, "/v1/wait", `{"key":"checkout","timeout_ms":0}`, nil, 400, "bad_request",
			"timeout_ms: 0 is not from 1 to 60000"},
		{"WaitTooLong", post, "/v1/wait", `{"key":"checkout","timeout_ms":60001}`, nil, 400, "bad_request",
			"60001 is not from 1 to 60000"},
		{"WaitForever", post, "/v1/wait", `{"key":"checkout","timeout_ms":9223372036854775807}`, nil, 400, "bad_request",
			"timeout_ms"},
		{"WaitHuge", post, "/v1/wait", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"WaitForm", post, "/v1/wait", `{"key":"checkout"}`, []string{"Content-Type", "text/plain"}, 415, "wrong_media_type",
			""},
		{"TimeoutOfATake", post, "/v1/take", `{"key":"checkout","timeout_ms":1}`, nil, 400, "bad_request", "unknown field"},
		{"AllNotAnArray", post, "/v1/take-all", `{"requests":{"key":"checkout"}}`, nil, 400, "bad_request",
			"requests: want an array of objects"},
		{"AllNull", post, "/v1/take-all", `{"requests":null}`, nil, 400, "bad_request", "requests: want an array of objects"},
		{"AllOfText", post, "/v1/take-all", `{"requests":["checkout"]}`, nil, 400, "bad_request",
			"requests[0] is not a JSON object"},
		{"AllWithNull", post, "/v1/take-all", `{"requests":[{"key":"checkout"},null]}`, nil, 400, "bad_request",
			"requests[1] is not a JSON object"},
		{"AllUnknownField", post, "/v1/take-all", `{"requests":[{"key":"checkout","n":1}]}`, nil, 400, "bad_request",
			`"requests[0].n": unknown field; want one of flow, key, tokens`},
		{"AllFraction", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"checkout","tokens":1.5}]}`, nil, 400,
			"bad_request", "requests[1].tokens: want a whole number"},
		{"AllFieldTwice", post, "/v1/take-all", `{"requests":[{"key":"checkout","key":"mail"}]}`, nil, 400, "bad_request",
			"requests[0].key: given twice"},
		{"AllOfNone", post, "/v1/take-all", `{"requests":[]}`, nil, 400, "invalid_amount", "0 requests; want 1 to 64"},
		{"AllWithout", post, "/v1/take-all", `{}`, nil, 400, "invalid_amount", "0 requests"},
		{"AllOfTooMany", post, "/v1/take-all", `{"requests":[{}` + strings.Repeat(`,{"key":"checkout"}`, 64) + `]}`, nil, 400,
			"invalid_amount", "65 requests; want 1 to 64"},
		{"AllNoTokens", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"checkout","tokens":0}]}`, nil, 400,
			"invalid_amount", "want 1 to"},
		{"AllTooManyTokens", post, "/v1/take-all",
			`{"requests":[{"key":"checkout"},{"key":"checkout","tokens":1125899906842624}]}`, nil, 400, "invalid_amount",
			"more than"},
		{"AllNoKey", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{}]}`, nil, 400, "invalid_key", "it is empty"},
		{"AllHugeKey", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"` + long + `"}]}`, nil, 400,
			"invalid_key", "513 bytes"},
		{"AllUnknownBucket", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"typo"}]}`, nil, 404,
			"unknown_bucket", "typo"},
		{"AllMalformedBucket", post, "/v1/take-all", `{"requests":[{"key":"checkout"},{"key":"other"}]}`, nil, 409,
			"malformed_bucket", ""},
		{"AllExceedsCapacity", post, "/v1/take-all",
			`{"requests":[{"key":"checkout","tokens":2},{"key":"checkout","tokens":2}]}`, nil, 422, "exceeds_capacity", ""},
		{"AllHuge", post, "/v1/take-all", `{"requests":[` + strings.Repeat(`{},`, 30_000) + `{}]}`, nil, 413, "too_large",
			""},
		{"AllForm", post, "/v1/take-all", `{"requests":[{"key":"checkout"}]}`, []string{"Content-Type", "text/plain"}, 415,
			"wrong_media_type", ""},
		{"ReserveWithoutTime", post, "/v1/reserve", `{"key":"checkout"}`, nil, 400, "invalid_ttl",
			"ttl_ms: 0 is not from 1 to 86400000"},
		{"ReserveTooLong", post, "/v1/reserve", `{"key":"checkout","ttl_ms":86400001}`, nil, 400, "invalid_ttl",
			"ttl_ms: 86400001 is not"},
		{"ReserveForever", post, "/v1/reserve", `{"key":"checkout","ttl_ms":9223372036854775807}`, nil, 400, "invalid_ttl",
			"ttl_ms"},
		{"ReserveBackwards", post, "/v1/reserve", `{"key":"checkout","ttl_ms":-1}`, nil, 400, "invalid_ttl", "ttl_ms"},
		{"ReserveNoTokens", post, "/v1/reserve", `{"key":"checkout","tokens":0,"ttl_ms":1000}`, nil, 400, "invalid_amount",
			""},
		{"ReserveEmptyID", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"id":""}`, nil, 400, "invalid_id",
			"0 bytes"},
		{"ReserveHugeID", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"id":"` + long + `"}`, nil, 400, "invalid_id",
			"513 bytes"},
		{"ReserveNullID", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"id":null}`, nil, 400, "bad_request",
			"id: want a string"},
		{"ReserveNumberAsID", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"id":7}`, nil, 400, "bad_request",
			"id: want a string"},
		{"ReserveOtherOverrun", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000,"overrun":"forgive"}`, nil, 400,
			"bad_request", `overrun: "forgive" is neither clamp nor debt`},
		{"ReserveUnknownBucket", post, "/v1/reserve", `{"key":"typo","ttl_ms":1000}`, nil, 404, "unknown_bucket", "typo"},
		{"ReserveMalformedBucket", post, "/v1/reserve", `{"key":"other","ttl_ms":1000}`, nil, 409, "malformed_bucket", ""},
		{"ReserveExceedsCapacity", post, "/v1/reserve", `{"key":"checkout","tokens":4,"ttl_ms":1000}`, nil, 422,
			"exceeds_capacity", ""},
		{"ReserveHuge", post, "/v1/reserve", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"ReserveForm", post, "/v1/reserve", `{"key":"checkout","ttl_ms":1000}`, []string{"Content-Type", "text/plain"}, 415,
			"wrong_media_type", ""},
		{"SettleWithoutID", post, "/v1/settle", `{"key":"checkout","used":1}`, nil, 400, "invalid_id", "0 bytes"},
		{"SettleHugeID", post, "/v1/settle", `{"key":"checkout","id":"` + long + `","used":1}`, nil, 400, "invalid_id",
			"513 bytes"},
		{"SettleHugeKey", post, "/v1/settle", `{"key":"` + long + `","id":"job","used":1}`, nil, 400, "invalid_key",
			"513 bytes"},
		{"SettleNotHeld", post, "/v1/settle", `{"key":"checkout","id":"job","used":1}`, nil, 404, "not_held", ""},
		{"SettleUnknownBucket", post, "/v1/settle", `{"key":"typo","id":"job","used":1}`, nil, 404, "unknown_bucket", "typo"},
		{"SettleMalformedBucket", post, "/v1/settle", `{"key":"other","id":"job","used":1}`, nil, 409, "malformed_bucket",
			""},
		{"SettleHuge", post, "/v1/settle", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"SettleForm", post, "/v1/settle", `{"key":"checkout","id":"job","used":1}`, []string{"Content-Type", "text/plain"},
			415, "wrong_media_type", ""},
		{"CancelWithoutID", post, "/v1/cancel", `{"key":"checkout"}`, nil, 400, "invalid_id", "0 bytes"},
		{"CancelHugeID", post, "/v1/cancel", `{"key":"checkout","id":"` + long + `"}`, nil, 400, "invalid_id", "513 bytes"},
		{"CancelHugeKey", post, "/v1/cancel", `{"key":"` + long + `","id":"job"}`, nil, 400, "invalid_key", "513 bytes"},
		{"CancelNotHeld", post, "/v1/cancel", `{"key":"checkout","id":"job"}`, nil, 404, "not_held", ""},
		{"CancelUnknownBucket", post, "/v1/cancel", `{"key":"typo","id":"job"}`, nil, 404, "unknown_bucket", "typo"},
		{"CancelMalformedBucket", post, "/v1/cancel", `{"key":"other","id":"job"}`, nil, 409, "malformed_bucket", ""},
		{"CancelHuge", post, "/v1/cancel", `{"key":"` + strings.Repeat("k", 70_000) + `"}`, nil, 413, "too_large", ""},
		{"CancelForm", post, "/v1/cancel", `{"key":"checkout","id":"job"}`, []string{"Content-Type", "text/plain"}, 415,
			"wrong_media_type", ""},
		{"SettleWithoutUsed", post, "/v1/settle", `{"key":"checkout","id":"job"}`, nil, 400, "bad_request",
			"used: it is missing"},
		{"SettleNegative", post, "/v1/settle", `{"key":"checkout","id":"job","used":-1}`, nil, 400, "invalid_amount",
			"want 0 to"},
		{"SettleTooMuch", post, "/v1/settle", `{"key":"checkout","id":"job","used":1125899906842625}`, nil, 400,
			"invalid_amount", "want 0 to"},
		{"CancelWithUsed", post, "/v1/cancel", `{"key":"checkout","id":"job","used":0}`, nil, 400, "bad_request",
			`"used": unknown field; want one of id, key`},
		{"PeekNoKey", get, "/v1/peek", "", nil, 400, "invalid_key", "empty"},
		{"PeekTwoKeys", get, "/v1/peek?key=checkout&key=mail", "", nil, 400, "bad_request", "want the parameter key once"},
		{"PeekOtherParameter", get, "/v1/peek?key=checkout&n=1", "", nil, 400, "bad_request", "want the parameter key once"},
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

// dump returns the whole content of the database.
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

func TestAnUnavailableRedisIs503(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Named = b.named(namedLimits) })
	b.bucket("checkout", 3)
	b.redis.Kill()
	for path := range openapi.Read(t, httpapi.OpenAPI).Paths {
		r := onPath(b, path)
		require.Equal(t, http.StatusServiceUnavailable, r.status, path)
		require.Equal(t, "unavailable", r.json(t)["code"])
		require.Equal(t, "1", r.header.Get("Retry-After"))
	}
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/livez", "").status)
	require.Equal(t, http.StatusOK, b.do(http.MethodGet, "/readyz", "").status,
		"a new sidecar would find the same Redis")
}

func TestAUnixSocketServesAndIsTakenOverFromADeadProcess(t *testing.T) {
	t.Parallel()
	path := t.TempDir() + "/http.sock"
	first, err := listen("unix:"+path, newClients(1), uncounted())
	require.NoError(t, err)
	_, err = listen("unix:"+path, newClients(1), uncounted())
	require.Error(t, err, "the socket is in use")
	leaveSocket(t, first)
	_, err = os.Lstat(path)
	require.NoError(t, err)

	b := start(t, func(o *Options, _ *bench) { o.HTTP = append(o.HTTP, "unix:"+path) })
	b.bucket("checkout", 3)
	r := send(t, unixClient(t, path), http.MethodPost, "http://sidecar/v1/take", `{"key":"checkout"}`)
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	require.NoError(t, b.stop())
	_, err = os.Lstat(path)
	require.ErrorIs(t, err, os.ErrNotExist, "no socket is left at the end")

	require.NoError(t, os.WriteFile(path, []byte("precious"), 0o600))
	_, err = listen("unix:"+path, newClients(1), uncounted())
	require.Error(t, err, "a file is no stale socket")
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, "precious", string(data))
}
