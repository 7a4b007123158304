package sidecar

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// divided creates a bucket of 100 tokens with a plan that lasts for the test. A flow without a right must leave 40
// tokens in the bucket. Listed flows have a right to no tokens. An unlisted flow may take up to three.
func (b *bench) divided(key string, listed ...string) {
	b.t.Helper()
	p := hourly(100)
	p.Flows = &policy.Flows{Headroom: policy.DefaultHeadroom, Most: policy.DefaultFlows}
	createBucket(b.t, b.rdb, key, p)
	plan := policy.Plan{
		Version: policy.Version{Era: 1, Index: 1}, Whole: true, Floor: 40, Unlisted: 3, Most: 1000, Span: 1_000_000,
		Lasts: time.Hour.Microseconds(), Teams: []policy.PlannedTeam{{Name: policy.RootTeam, Price: 1e9}},
	}
	for _, name := range listed {
		plan.Listed = append(plan.Listed, policy.PlannedFlow{Name: name, Weight: 1, Took: 5})
	}
	r := lua.PlanBatch(b.t.Context(), b.rdb, []lua.PlanCall{{Key: key, Plan: plan}})[0]
	require.NoError(b.t, r.Err)
	require.False(b.t, r.Stale)
}

// asked returns the tokens that each flow of a bucket has asked for.
func (b *bench) asked(key string) map[string]string {
	b.t.Helper()
	use, err := b.rdb.HGetAll(b.t.Context(), lua.UseKey(key)).Result()
	require.NoError(b.t, err)
	for name := range use {
		if strings.HasPrefix(name, "/") {
			delete(use, name)
		}
	}
	return use
}

// flowDoors take n tokens of the bucket acme for a flow, each through one of the doors.
var flowDoors = map[string]func(b *bench, n int64, flow string) bool{
	"HTTP take": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/take", `{"key":"acme","tokens":%d,"flow":%q}`, n, flow)
	},
	"HTTP wait": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/wait", `{"key":"acme","tokens":%d,"flow":%q,"timeout_ms":2000}`, n, flow)
	},
	"HTTP limit": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/limits/any/take", `{"key":"acme","tokens":%d,"flow":%q}`, n, flow)
	},
	"HTTP limit of keys": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/limits/acme/take", `{"tokens":%d,"key":%q}`, n, flow)
	},
	"proxy": func(b *bench, n int64, flow string) bool {
		query := fmt.Sprintf("/v1/check?limit=any&key=acme&flow_by=header:X-User,ip&tokens=%d", n)
		return b.do(http.MethodGet, query, "", "X-User", flow).status == http.StatusOK
	},
	"proxy of keys": func(b *bench, n int64, flow string) bool {
		return b.do(http.MethodGet, fmt.Sprintf("/v1/check?limit=acme&key=%s&tokens=%d", flow, n), "").status == http.StatusOK
	},
	"HTTP take of several": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/take-all", `{"requests":[{"key":"acme","tokens":%d,"flow":%q}]}`, n, flow)
	},
	"HTTP reservation": func(b *bench, n int64, flow string) bool {
		return b.granted("/v1/reserve", `{"key":"acme","tokens":%d,"flow":%q,"ttl_ms":60000}`, n, flow)
	},
	"gRPC take of several": func(b *bench, n int64, flow string) bool {
		c := refillerv1.NewBucketsClient(b.dial())
		r, err := c.TakeAll(b.t.Context(), &refillerv1.TakeAllRequest{Requests: []*refillerv1.Amount{
			{Key: "acme", Tokens: &n, Flow: &flow},
		}})
		require.NoError(b.t, err)
		return r.GetOk()
	},
	"gRPC reservation": func(b *bench, n int64, flow string) bool {
		c := refillerv1.NewBucketsClient(b.dial())
		r, err := c.Reserve(b.t.Context(), &refillerv1.ReserveRequest{
			Key: "acme", Tokens: &n, Flow: &flow, Ttl: durationpb.New(time.Minute),
		})
		require.NoError(b.t, err)
		return r.GetResult().GetOk()
	},
	"gRPC take": func(b *bench, n int64, flow string) bool {
		c := refillerv1.NewBucketsClient(b.dial())
		r, err := c.Take(b.t.Context(), &refillerv1.TakeRequest{Key: "acme", Tokens: &n, Flow: &flow})
		require.NoError(b.t, err)
		return r.GetOk()
	},
	"gRPC wait": func(b *bench, n int64, flow string) bool {
		c := refillerv1.NewBucketsClient(b.dial())
		r, err := c.Wait(b.t.Context(), &refillerv1.WaitRequest{
			Key: "acme", Tokens: &n, Flow: &flow, Timeout: durationpb.New(2 * time.Second),
		})
		require.NoError(b.t, err)
		return r.GetOk()
	},
	"gRPC limit": func(b *bench, n int64, flow string) bool {
		c := refillerv1.NewLimitsClient(b.dial())
		r, err := c.Take(b.t.Context(), &refillerv1.TakeLimitRequest{Name: "any", Key: "acme", Tokens: &n, Flow: &flow})
		require.NoError(b.t, err)
		return r.GetResult().GetOk()
	},
}

// granted posts a take and reports whether it got its tokens.
func (b *bench) granted(path, format string, args ...any) bool {
	b.t.Helper()
	r := b.post(path, fmt.Sprintf(format, args...))
	require.Equal(b.t, http.StatusOK, r.status, string(r.body))
	return r.json(b.t)["ok"].(bool)
}

const limitsOfFlows = `
limits:
  - {name: any, bucket: {}}
  - {name: acme, bucket: {key: acme, flow: "{key}"}}
  - {name: strangers, bucket: {key: acme, flow: "strangers/{key}"}}
  - {name: api, lazy: {capacity: 3, rate: 1/h}}
`

func flowBench(t *testing.T, file string) *bench {
	t.Helper()
	return start(t, func(o *Options, b *bench) {
		o.Named, o.Deadline = b.named(limitsOfFlows), patience
		if file == "" {
			return
		}
		limits, err := envoy.Parse(map[string][]byte{"edge.yaml": []byte(file)}, nil)
		require.NoError(t, err)
		o.Envoy = limits
	})
}

func TestEachDoorTakesForAFlow(t *testing.T) {
	t.Parallel()
	for name, take := range flowDoors {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := flowBench(t, "")
			b.divided("acme", "loud")
			require.False(t, take(b, 61, "loud"), "the loud flow leaves the floor to the other flows")
			require.True(t, take(b, 60, "loud"))
			require.True(t, take(b, 3, "quiet"), "a flow that asks for little takes from all of the bucket")
			asked := b.asked("acme")
			require.Equal(t, "3", asked["quiet"])
			require.Contains(t, asked, "loud")
			require.Len(t, asked, 2)
		})
	}
}

const edgeOfFlows = `
domain: edge
descriptors:
  - key: tenant
    rate_limit: {bucket: "{value}"}
    descriptors:
      - {key: user, rate_limit: {bucket: "{value:tenant}", flow: "{value}"}}
      - {key: call, rate_limit: {bucket: "{value:tenant}", flow: "{value}", up_to: true}}
      - key: stranger
        value: "*"
        share_threshold: true
        rate_limit: {bucket: "{value:tenant}", flow: "strangers/{value}"}
`

func TestEnvoyTakesForTheFlowsOfItsFile(t *testing.T) {
	t.Parallel()
	b := flowBench(t, edgeOfFlows)
	b.divided("acme", "loud")
	c := rls.NewRateLimitServiceClient(b.dial())
	ask := func(n uint32, key, user string) rls.RateLimitResponse_Code {
		return should(t, c, request(n, of("tenant", "acme", key, user))).GetOverallCode()
	}
	require.Equal(t, over, ask(61, "user", "loud"), "the loud flow leaves the floor to the other flows")
	require.Equal(t, codeOK, ask(60, "user", "loud"))
	require.Equal(t, codeOK, ask(3, "user", "quiet"))
	require.Equal(t, codeOK, ask(2, "stranger", "loud"), "this flow is not the listed flow")
	require.Equal(t, codeOK, ask(1, "stranger", "../quiet"), "a stranger can't choose a team")
	require.Equal(t, codeOK, ask(1, "stranger", ""), "a stranger can't leave its team")
	require.Equal(t, codeOK, ask(1, "user", strings.Repeat("x", 300)))
	require.Equal(t, over, ask(5, "call", "loud"))
	require.Equal(t, codeOK, ask(2, "call", "streams"))
	asked := b.asked("acme")
	require.Equal(t, "126", asked["loud"])
	require.Equal(t, "3", asked["quiet"])
	require.Equal(t, "2", asked["streams"])
	require.Equal(t, "2", asked["strangers/loud"])
	require.Equal(t, "1", asked["strangers/..%2Fquiet"])
	require.Equal(t, "1", asked["strangers/%"])
	require.Len(t, asked, 7)
}

func TestAKeyThatIsAFlowCantChooseATeam(t *testing.T) {
	t.Parallel()
	b := flowBench(t, "")
	b.divided("acme")
	for _, key := range []string{"7", "gold/7", strings.Repeat("x", 400)} {
		r := b.post("/v1/limits/strangers/take", `{"key":"`+key+`"}`)
		require.Equal(t, http.StatusOK, r.status, string(r.body))
		require.Equal(t, key, r.json(t)["key"])
	}
	r := b.do(http.MethodGet, "/v1/check?limit=any&key=acme&flow_by=header:X-Team&flow_by=header:X-User", "",
		"X-Team", "a/b", "X-User", "7")
	require.Equal(t, http.StatusOK, r.status, string(r.body))
	r = b.do(http.MethodGet, "/v1/check?limit=any&key=acme&flow_by=header:X-Team&flow_by=header:X-User", "", "X-User", "7")
	require.Equal(t, http.StatusOK, r.status, "the request is in the flow without a name")
	asked := b.asked("acme")
	for _, name := range []string{"strangers/7", "strangers/gold%2F7", "a%2Fb/7", ""} {
		require.Equal(t, "1", asked[name], "%q of %v", name, asked)
	}
	require.Len(t, asked, 5)
}

func TestABadFlowIsRefusedByEachDoor(t *testing.T) {
	t.Parallel()
	b := flowBench(t, "")
	b.divided("acme")
	buckets, named := refillerv1.NewBucketsClient(b.dial()), refillerv1.NewLimitsClient(b.dial())
	for name, says := range map[string]string{
		"":                       "flow: it is empty; want 1 to 256 bytes",
		strings.Repeat("x", 257): "it has 257 bytes; want 1 to 256",
		"a//b":                   "one of its levels is empty; want 1 to 3",
	} {
		_, err := buckets.Take(t.Context(), &refillerv1.TakeRequest{Key: "acme", Flow: proto.String(name)})
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%q", name)
		require.ErrorContains(t, err, says)
		_, err = buckets.Wait(t.Context(), &refillerv1.WaitRequest{Key: "acme", Flow: proto.String(name)})
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%q", name)
		require.ErrorContains(t, err, says)
		_, err = buckets.TakeAll(t.Context(), &refillerv1.TakeAllRequest{Requests: []*refillerv1.Amount{
			{Key: "acme", Flow: proto.String(name)},
		}})
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%q", name)
		require.ErrorContains(t, err, says)
		_, err = buckets.Reserve(t.Context(), &refillerv1.ReserveRequest{
			Key: "acme", Ttl: durationpb.New(time.Minute), Flow: proto.String(name),
		})
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%q", name)
		require.ErrorContains(t, err, says)
		_, err = named.Take(t.Context(), &refillerv1.TakeLimitRequest{Name: "any", Key: "acme", Flow: proto.String(name)})
		require.Equal(t, codes.InvalidArgument, status.Code(err), "%q", name)
		require.ErrorContains(t, err, says)
	}
	for _, c := range []struct{ path, body, says string }{
		{"/v1/limits/any/take", `{"key":"acme","flow":"a//b"}`, "flow: "},
		{"/v1/take-all", `{"requests":[{"key":"acme","flow":"a//b"}]}`, "flow: "},
		{"/v1/reserve", `{"key":"acme","flow":"a//b","ttl_ms":1000}`, "flow: "},
		{"/v1/limits/acme/take", `{"key":"a","flow":"b"}`, "flow: acme makes the flow from the key"},
		{"/v1/limits/api/take", `{"key":"a","flow":"b"}`, "flow: api does not use refilled buckets"},
	} {
		r := b.post(c.path, c.body)
		require.Equal(t, http.StatusBadRequest, r.status, c.path)
		require.Equal(t, "bad_request", r.json(t)["code"])
		require.Contains(t, r.json(t)["message"], c.says)
	}
	for query, says := range map[string]string{
		"limit=any&key=acme&flow_by=user":                               "flow_by: \"user\" is neither ip nor header:NAME",
		"limit=any&key=acme" + strings.Repeat("&flow_by=header:X", 4):   "flow_by: given 4 times; want at most 3",
		"limit=api&key=acme&flow_by=header:X":                           "api does not use refilled buckets",
		"limit=any&key=acme&flow_by=header:Twice":                       "flow_by: the request has 2 headers Twice",
		"limit=acme&key=seven&flow_by=header:Twice,header:X&flow_by=ip": "flow_by",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url("/v1/check?"+query), nil)
		require.NoError(t, err)
		req.Header["Twice"], req.Header["X"] = []string{"a", "b"}, []string{"x"}
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		require.Equal(t, http.StatusBadRequest, res.StatusCode, "%s: %s", query, body)
		var failed map[string]string
		require.NoError(t, json.Unmarshal(body, &failed))
		require.Contains(t, failed["message"], says, query)
	}
	require.Empty(t, b.asked("acme"))
	require.EqualValues(t, 100, b.tokens("acme"))
}

func TestBadFlowsOfFilesAreNamed(t *testing.T) {
	t.Parallel()
	for file, says := range map[string]string{
		`{name: a, bucket: {prefix: "x:", flow: "{key}"}}`: "limits[0].bucket.flow: it needs the field key",
		`{name: a, bucket: {key: b, prefix: "x:"}}`:        "limits[0].bucket: want either prefix or key",
		`{name: a, bucket: {key: "}", flow: "{key}"}}`:     "limits[0].bucket.key: ",
		`{name: a, bucket: {key: b, flow: "all"}}`:         "limits[0].bucket.flow: \"all\": want a text that contains {key}",
		`{name: a, bucket: {key: b, flow: "{key}/{x}"}}`: "bucket.flow: \"{key}/{x}\": want a text that contains {key}, " +
			"and no other",
		`{name: a, bucket: {key: b, flow: "a//{key}"}}`: "one of its levels is empty; want 1 to 3",
	} {
		_, err := limits.Parse("limits.yaml", []byte("limits: ["+file+"]"), nil, nil)
		require.ErrorContains(t, err, says, file)
	}
	for limit, says := range map[string]string{
		`{bucket: b, flow: "a/{value"}`: "rate_limit.flow: ",
		`{bucket: b, flow: "/{value}"}`: "one of its levels is empty; want 1 to 3",
		`{bucket: b, flow: "{value:none}"}`: "neither this descriptor nor a descriptor above it " +
			"has the key \"none\"",
		`{unit: hour, requests_per_unit: 1, flow: a}`: "rate_limit.flow: it needs a bucket",
	} {
		file := "domain: edge\ndescriptors: [{key: user, rate_limit: " + limit + "}]"
		_, err := envoy.Parse(map[string][]byte{"edge.yaml": []byte(file)}, nil)
		require.ErrorContains(t, err, says, limit)
	}
}
