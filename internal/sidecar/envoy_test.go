package sidecar

import (
	"context"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/policy"
)

// edgeLimits returns the limits of the file edge, on the bench's Redis.
func edgeLimits(t testing.TB, b *bench) *envoy.Limits {
	t.Helper()
	edge, err := os.ReadFile("envoy/testdata/edge.yaml")
	require.NoError(t, err)
	windows := envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions())
	limits, err := envoy.Parse(map[string][]byte{"edge.yaml": edge}, windows)
	require.NoError(t, err)
	return limits
}

// envoyBench serves the limits of the file edge, after change has modified them. The client is generated from Envoy's
// own interface.
func envoyBench(t *testing.T, change func(*envoy.Limits)) (*bench, rls.RateLimitServiceClient) {
	t.Helper()
	b := start(t, func(o *Options, b *bench) {
		o.Envoy = edgeLimits(t, b)
		if change != nil {
			change(o.Envoy)
		}
	})
	for _, k := range []string{"checkout", "edge:partner_acme", "trial", "special"} {
		b.bucket(k, 3)
	}
	return b, rls.NewRateLimitServiceClient(b.dial())
}

// of returns a descriptor. keyValues has keys and values in turn.
func of(keyValues ...string) *descriptorpb.RateLimitDescriptor {
	d := &descriptorpb.RateLimitDescriptor{}
	for i := 0; i+1 < len(keyValues); i += 2 {
		d.Entries = append(d.Entries, &descriptorpb.RateLimitDescriptor_Entry{Key: keyValues[i], Value: keyValues[i+1]})
	}
	return d
}

func hits(n uint64, d *descriptorpb.RateLimitDescriptor) *descriptorpb.RateLimitDescriptor {
	d.HitsAddend = wrapperspb.UInt64(n)
	return d
}

func request(addend uint32, ds ...*descriptorpb.RateLimitDescriptor) *rls.RateLimitRequest {
	return &rls.RateLimitRequest{Domain: "edge", HitsAddend: addend, Descriptors: ds}
}

const (
	codeOK = rls.RateLimitResponse_OK
	over   = rls.RateLimitResponse_OVER_LIMIT
)

func should(t *testing.T, c rls.RateLimitServiceClient, req *rls.RateLimitRequest) *rls.RateLimitResponse {
	t.Helper()
	res, err := c.ShouldRateLimit(t.Context(), req)
	require.NoError(t, err)
	require.Len(t, res.GetStatuses(), len(req.GetDescriptors()))
	return res
}

func TestEnvoyTakesFromABucket(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	res := should(t, c, request(0, of("partner", "acme")))
	require.Equal(t, codeOK, res.GetOverallCode())
	st := res.GetStatuses()[0]
	require.EqualValues(t, 2, st.GetLimitRemaining(), "a request without hits_addend is one hit")
	require.EqualValues(t, 3, st.GetCurrentLimit().GetRequestsPerUnit())
	require.Equal(t, rls.RateLimitResponse_RateLimit_UNKNOWN, st.GetCurrentLimit().GetUnit())
	require.Equal(t, time.Hour, st.GetDurationUntilReset().AsDuration().Round(time.Minute))
	require.Empty(t, res.GetResponseHeadersToAdd())

	res = should(t, c, request(3, of("partner", "acme")))
	require.Equal(t, over, res.GetOverallCode())
	st = res.GetStatuses()[0]
	require.Equal(t, over, st.GetCode())
	require.EqualValues(t, 2, st.GetLimitRemaining())
	require.Equal(t, time.Hour, st.GetDurationUntilReset().AsDuration().Round(time.Minute), "when the third token is due")
	require.EqualValues(t, 2, b.tokens("edge:partner_acme"))

	require.Equal(t, over, should(t, c, request(4, of("partner", "acme"))).GetOverallCode(),
		"the request exceeds the capacity")
	require.Equal(t, codeOK, should(t, c, request(2, of("partner", "acme"))).GetOverallCode())
	require.EqualValues(t, 0, b.tokens("edge:partner_acme"))
}

func TestEnvoyCountsInWindowsWithoutBuckets(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	for _, remaining := range []uint32{2, 1, 0} {
		st := should(t, c, request(0, of("remote_address", "10.0.0.2"))).GetStatuses()[0]
		require.Equal(t, codeOK, st.GetCode())
		require.Equal(t, remaining, st.GetLimitRemaining())
		require.EqualValues(t, 3, st.GetCurrentLimit().GetRequestsPerUnit())
		require.Equal(t, rls.RateLimitResponse_RateLimit_MINUTE, st.GetCurrentLimit().GetUnit())
		require.LessOrEqual(t, st.GetDurationUntilReset().AsDuration(), time.Minute)
	}
	require.Equal(t, over, should(t, c, request(0, of("remote_address", "10.0.0.2"))).GetOverallCode())
	require.Equal(t, codeOK, should(t, c, request(0, of("remote_address", "10.0.0.3"))).GetOverallCode(),
		"another value has its own window")
	require.Equal(t, over, should(t, c, request(0, of("remote_address", "192.168.1.1"))).GetOverallCode(),
		"requests_per_unit: 0")
	free := should(t, c, request(1000, of("remote_address", "10.0.0.1")))
	require.Equal(t, codeOK, free.GetOverallCode(), "unlimited")
	require.EqualValues(t, math.MaxUint32, free.GetStatuses()[0].GetLimitRemaining())
	ttl, err := b.rdb.PTTL(t.Context(), "{edge:remote_address=10.0.0.2}:win:minute").Result()
	require.NoError(t, err)
	require.Positive(t, ttl, "a window expires by itself")
}

func TestARefusedEnvoyRequestChargesNothing(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	require.Equal(t, codeOK, should(t, c, request(3, of("partner", "acme"))).GetOverallCode())
	res := should(t, c, request(0, of("generic_key", "checkout"), of("remote_address", "10.0.0.2"), of("partner", "acme"),
		of("override", "x")))
	require.Equal(t, over, res.GetOverallCode())
	var got []rls.RateLimitResponse_Code
	var remaining []uint32
	for _, st := range res.GetStatuses() {
		got, remaining = append(got, st.GetCode()), append(remaining, st.GetLimitRemaining())
	}
	require.Equal(t, []rls.RateLimitResponse_Code{codeOK, codeOK, over, codeOK}, got, "each descriptor has its own code")
	require.Equal(t, []uint32{0, 3, 0, 3}, remaining, "the last descriptor replaces the first")
	require.EqualValues(t, 3, b.tokens("checkout"))
	require.EqualValues(t, 3, b.tokens("special"))

	res = should(t, c, request(0, of("generic_key", "checkout"), of("partner", "acme")))
	require.Equal(t, over, res.GetOverallCode())
	require.EqualValues(t, 3, b.tokens("checkout"), "the tokens taken were returned")
	require.EqualValues(t, 3, res.GetStatuses()[0].GetLimitRemaining())
}

func TestReplacesLeavesTheNamedLimitOut(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	res := should(t, c, request(0, of("generic_key", "checkout"), of("override", "x")))
	require.Nil(t, res.GetStatuses()[0].GetCurrentLimit())
	require.EqualValues(t, 3, b.tokens("checkout"))
	require.EqualValues(t, 2, b.tokens("special"))
}

func TestEachDescriptorMayHaveItsOwnHits(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	res := should(t, c, request(1, hits(2, of("generic_key", "checkout")), of("partner", "acme"),
		hits(0, of("remote_address", "10.0.0.2"))))
	require.Equal(t, codeOK, res.GetOverallCode())
	require.EqualValues(t, 1, b.tokens("checkout"))
	require.EqualValues(t, 2, b.tokens("edge:partner_acme"))
	require.EqualValues(t, 3, res.GetStatuses()[2].GetLimitRemaining(), "a request of no hits only reads")

	back := hits(2, of("generic_key", "checkout"))
	back.IsNegativeHits = true
	res = should(t, c, request(1, back))
	require.Equal(t, codeOK, res.GetOverallCode())
	require.EqualValues(t, 3, res.GetStatuses()[0].GetLimitRemaining())
	require.EqualValues(t, 3, b.tokens("checkout"))

	// A request that is refused doesn't return hits either, whatever the order of its descriptors.
	require.Equal(t, codeOK, should(t, c, request(2, of("generic_key", "checkout"))).GetOverallCode())
	require.Equal(t, over, should(t, c, request(0, hits(4, of("partner", "acme")), back)).GetOverallCode())
	require.Equal(t, over, should(t, c, request(0, back, hits(4, of("partner", "acme")))).GetOverallCode())
	require.Equal(t, over, should(t, c, request(0, back, hits(9, of("budget", "x")))).GetOverallCode(),
		"its quota is exceeded")
	require.EqualValues(t, 1, b.tokens("checkout"))
	require.Equal(t, codeOK, should(t, c, request(0, back, of("partner", "acme"))).GetOverallCode())
	require.EqualValues(t, 3, b.tokens("checkout"))
}

// Otherwise each repetition of the request would return the hits again.
func TestARequestWithAnErrorReturnsNoHits(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	require.Equal(t, codeOK, should(t, c, request(3, of("generic_key", "checkout"))).GetOverallCode())
	back, failing := hits(1, of("generic_key", "checkout")), hits(1, of("partner", "unknown"))
	back.IsNegativeHits = true
	failing.IsNegativeHits = true
	window := hits(1, of("remote_address", "10.0.0.2"))
	require.EqualValues(t, 2, should(t, c, request(0, window)).GetStatuses()[0].GetLimitRemaining())
	window.IsNegativeHits = true
	for range 3 {
		_, err := c.ShouldRateLimit(t.Context(), request(0, back, window, failing))
		require.Equal(t, codes.NotFound, status.Code(err))
	}
	require.Zero(t, b.tokens("checkout"))
	window = hits(0, of("remote_address", "10.0.0.2"))
	require.EqualValues(t, 2, should(t, c, request(0, window)).GetStatuses()[0].GetLimitRemaining())
}

func TestTheQuestionBeforeAStreamDeniesNothingInShadowMode(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	p := hourly(3)
	for key, want := range map[string]rls.RateLimitResponse_Code{"enforced": over, "tried": codeOK} {
		p.Shadow = want == codeOK
		createBucket(t, b.rdb, "llm:"+key, p)
		question := request(1, hits(0, of("tokens", key)))
		require.Equal(t, codeOK, should(t, c, question).GetOverallCode(), key)
		require.Equal(t, want, should(t, c, request(1, hits(7, of("tokens", key)))).GetOverallCode(), key)
		require.Equal(t, want, should(t, c, question).GetOverallCode(), key)
		require.Zero(t, b.tokens("llm:"+key))
	}
}

// impatientBench serves the limits of the file edge with a client that waits for Redis for at most 500 ms.
func impatientBench(t *testing.T) (*bench, rls.RateLimitServiceClient) {
	t.Helper()
	b := start(t, func(o *Options, b *bench) {
		var err error
		o.Client, err = fetch.New(b.rdb, fetch.WithTimeout(500*time.Millisecond))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Client.Close(context.Background())) })
		o.Envoy = edgeLimits(t, b)
	})
	return b, rls.NewRateLimitServiceClient(b.dial())
}

// outage creates the buckets llm:a, edge:partner_a and edge:partner_b with a capacity of 1000 and the degraded mode
// local, and stops Redis. The client has a share of each bucket.
func outage(t *testing.T) rls.RateLimitServiceClient {
	t.Helper()
	b, c := impatientBench(t)
	p := hourly(1000)
	p.Degraded = policy.DegradedLocal
	for _, key := range []string{"llm:a", "edge:partner_a", "edge:partner_b"} {
		createBucket(t, b.rdb, key, p)
	}
	takes := func() bool {
		_, err := c.ShouldRateLimit(t.Context(), request(1, of("tokens", "a"), of("partner", "a"), of("partner", "b")))
		return err == nil
	}
	eventually(t, func() bool {
		if !takes() {
			return false
		}
		b.redis.Pause()
		if takes() { // the client has counted the consumers of each bucket
			return true
		}
		b.redis.Resume()
		return false
	}, "each bucket has a share")
	t.Cleanup(b.redis.Resume)
	return c
}

func TestTheQuestionBeforeAStreamTakesNothingFromAShare(t *testing.T) {
	t.Parallel()
	c := outage(t)
	for range 1100 {
		require.Equal(t, codeOK, should(t, c, request(1, hits(0, of("tokens", "a")))).GetOverallCode())
	}
}

// If one descriptor is over its limit, the tokens that the shares of other buckets gave go back to these shares.
func TestARefusedEnvoyRequestTakesNothingFromAShare(t *testing.T) {
	t.Parallel()
	c := outage(t)
	a, b := of("partner", "a"), of("partner", "b")
	left := should(t, c, request(1, b)).GetStatuses()[0].GetLimitRemaining()
	require.Equal(t, codeOK, should(t, c, request(left, b)).GetOverallCode())
	left = should(t, c, request(1, a)).GetStatuses()[0].GetLimitRemaining()
	for range 3 {
		res := should(t, c, request(1, hits(uint64(left), a), b))
		require.Equal(t, over, res.GetOverallCode())
		require.Equal(t, codeOK, res.GetStatuses()[0].GetCode())
		require.Equal(t, left, res.GetStatuses()[0].GetLimitRemaining())
	}
	require.Equal(t, codeOK, should(t, c, request(left, a)).GetOverallCode(), "nothing was taken from it")
}

// A request for more tokens than the bucket can hold is denied, as while Redis answers. With an error, Envoy would let
// it pass.
func TestARequestThatIsTooLargeIsDeniedInAnOutage(t *testing.T) {
	t.Parallel()
	c := outage(t)
	for range 3 {
		res := should(t, c, request(1001, of("partner", "a")))
		require.Equal(t, over, res.GetOverallCode())
		require.EqualValues(t, 1000, res.GetStatuses()[0].GetCurrentLimit().GetRequestsPerUnit())
	}
	left := should(t, c, request(1, of("partner", "a"))).GetStatuses()[0].GetLimitRemaining()
	require.Equal(t, codeOK, should(t, c, request(left, of("partner", "a"))).GetOverallCode(), "nothing was taken")
	require.Equal(t, over, should(t, c, request(1001, of("partner", "a"))).GetOverallCode(), "no token is left")
}

// A stream that used more tokens than the share has takes all of them, and gets OVER_LIMIT.
func TestAStreamThatUsedTooMuchIsOverItsLimitInAnOutage(t *testing.T) {
	t.Parallel()
	c := outage(t)
	res := should(t, c, request(1, hits(10, of("tokens", "a"))))
	require.Equal(t, codeOK, res.GetOverallCode())
	left := uint64(res.GetStatuses()[0].GetLimitRemaining())
	require.Equal(t, over, should(t, c, request(1, hits(left+1, of("tokens", "a")))).GetOverallCode())
	require.Equal(t, over, should(t, c, request(1, hits(1, of("tokens", "a")))).GetOverallCode(), "no token is left")
}

func TestTheQuestionBeforeAStreamFollowsTheDegradedMode(t *testing.T) {
	t.Parallel()
	b, c := impatientBench(t)
	modes := map[string]policy.Degraded{"open": policy.DegradedOpen, "closed": policy.DegradedClosed}
	for key, mode := range modes {
		p := hourly(1000)
		p.Degraded = mode
		createBucket(t, b.rdb, "llm:"+key, p)
		eventually(t, func() bool {
			_, err := c.ShouldRateLimit(t.Context(), request(1, hits(1, of("tokens", key))))
			return err == nil
		}, "the policy is known")
	}
	b.redis.Pause()
	defer b.redis.Resume()
	require.Equal(t, codeOK, should(t, c, request(1, hits(0, of("tokens", "open")))).GetOverallCode())
	for range 3 {
		require.Equal(t, codeOK, should(t, c, request(1, hits(1000, of("tokens", "open")))).GetOverallCode())
	}
	require.Equal(t, over, should(t, c, request(1, hits(1001, of("tokens", "open")))).GetOverallCode(),
		"the stream used more than a full bucket has")
	_, err := c.ShouldRateLimit(t.Context(), request(1, hits(0, of("tokens", "closed"))))
	require.Equal(t, codes.Unavailable, status.Code(err))
}

func TestShadowAndQuotaModesCountAndNeverDeny(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	for range 5 {
		res := should(t, c, request(0, of("try", "x"), of("generic_key", "mail")))
		require.Equal(t, codeOK, res.GetOverallCode())
		require.Equal(t, codeOK, res.GetStatuses()[0].GetCode())
		require.Nil(t, res.GetDynamicMetadata())
	}
	require.EqualValues(t, 0, b.tokens("trial"), "shadow mode counts the requests")
	for i := range 3 {
		res := should(t, c, request(0, of("generic_key", "mail"), of("budget", "x")))
		m := res.GetDynamicMetadata().AsMap()
		require.Equal(t, "edge", m["domain"])
		require.Equal(t, []any{map[string]any{"entries": []any{"generic_key=mail"}},
			map[string]any{"entries": []any{"budget=x"}}}, m["descriptors"])
		want := codeOK
		if i == 2 {
			want = over
		}
		require.Equal(t, want, res.GetOverallCode(), "the third request exceeds the only quota, which is 2")
		require.Equal(t, want, res.GetStatuses()[1].GetCode())
	}
}

// As in the reference service, a request passes while one of its quotas has room. Its metadata names these quotas.
func TestARequestPassesWhileOneOfItsQuotasHasRoom(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	ask := func() (rls.RateLimitResponse_Code, []rls.RateLimitResponse_Code, any) {
		res := should(t, c, request(1, of("generic_key", "checkout"), of("quota", "gold"), of("budget", "x")))
		var codes []rls.RateLimitResponse_Code
		for _, st := range res.GetStatuses() {
			codes = append(codes, st.GetCode())
		}
		return res.GetOverallCode(), codes, res.GetDynamicMetadata().AsMap()["metadata"]
	}
	all, each, metadata := ask()
	require.Equal(t, codeOK, all)
	require.Equal(t, []rls.RateLimitResponse_Code{codeOK, codeOK, codeOK}, each)
	require.Equal(t, map[string]any{"service": map[string]any{"name": "gold"}}, metadata)
	all, each, metadata = ask()
	require.Equal(t, codeOK, all, "gold's quota of 1 is used up, the budget of 2 isn't")
	require.Equal(t, []rls.RateLimitResponse_Code{codeOK, over, codeOK}, each)
	require.Nil(t, metadata)
	all, each, _ = ask()
	require.Equal(t, over, all, "both quotas are used up")
	require.Equal(t, []rls.RateLimitResponse_Code{codeOK, over, over}, each)
	require.EqualValues(t, 1, b.tokens("checkout"), "the refused request charges no bucket")
}

// The number of used tokens is known only when the stream has ended. So a request with hits_addend 0 comes first, and
// the real number is charged later.
func TestTokensAreChargedAfterTheStream(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	b.bucket("llm:acme", 100)
	for key, x := range map[string]struct {
		value string
		limit uint64
	}{"tokens": {"acme", 100}, "bytes": {"acme", 10}} {
		ask := func() rls.RateLimitResponse_Code {
			return should(t, c, request(1, hits(0, of(key, x.value)))).GetOverallCode()
		}
		require.Equal(t, codeOK, ask(), key)
		require.Equal(t, codeOK, should(t, c, request(1, hits(x.limit-1, of(key, x.value)))).GetOverallCode(), key)
		require.Equal(t, codeOK, ask(), "%s: one token is left", key)
		for _, n := range []uint64{7, 1 << 20} {
			res := should(t, c, request(1, hits(n, of(key, x.value))))
			require.Equal(t, over, res.GetOverallCode(), "%s: the request used more than the remaining tokens", key)
			require.Zero(t, res.GetStatuses()[0].GetLimitRemaining(), "%s: the remaining tokens are charged", key)
			require.Equal(t, over, ask(), "%s: no tokens are left", key)
		}
	}
	require.Zero(t, b.tokens("llm:acme"))
	require.Equal(t, codeOK, should(t, c, request(1, of("partner", "acme"))).GetOverallCode())
	res := should(t, c, request(1, hits(0, of("partner", "acme"))))
	require.Equal(t, codeOK, res.GetOverallCode(), "hits_addend 0 works for a bucket without the flag as well")
	require.Equal(t, codeOK, should(t, c, request(2, of("partner", "acme"))).GetOverallCode())
	require.Equal(t, over, should(t, c, request(1, hits(0, of("partner", "acme")))).GetOverallCode())
}

// Descriptors with up_to are charged even if one of them gets too few tokens. If another descriptor denies, they aren't
// charged.
func TestWhatIsChargedAfterwardsStaysCharged(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	b.bucket("llm:acme", 5)
	b.bucket("llm:team", 100)
	res := should(t, c, request(1, hits(7, of("tokens", "acme")), hits(7, of("tokens", "team")),
		of("generic_key", "checkout")))
	require.Equal(t, over, res.GetOverallCode())
	require.Zero(t, b.tokens("llm:acme"))
	require.EqualValues(t, 93, b.tokens("llm:team"))
	require.EqualValues(t, 3, b.tokens("checkout"), "a refused request charges no bucket")
	require.Equal(t, over, should(t, c, request(1, hits(7, of("tokens", "team")),
		hits(4, of("generic_key", "checkout")))).GetOverallCode())
	require.EqualValues(t, 93, b.tokens("llm:team"))
}

func TestShadowForAllNeverDenies(t *testing.T) {
	t.Parallel()
	_, c := envoyBench(t, func(l *envoy.Limits) { l.Shadow = true })
	res := should(t, c, request(9, of("generic_key", "checkout"), of("remote_address", "192.168.0.1")))
	require.Equal(t, codeOK, res.GetOverallCode())
	require.Equal(t, codeOK, res.GetStatuses()[0].GetCode())
}

func TestResponseHeadersDescribeTheStrictestLimit(t *testing.T) {
	t.Parallel()
	_, c := envoyBench(t, func(l *envoy.Limits) {
		l.Headers = &envoy.HeaderNames{Limit: "RateLimit-Limit", Remaining: "RateLimit-Remaining", Reset: "RateLimit-Reset"}
	})
	headersOf := func(res *rls.RateLimitResponse) map[string]string {
		m := make(map[string]string)
		for _, h := range res.GetResponseHeadersToAdd() {
			m[h.GetKey()] = h.GetValue()
		}
		return m
	}
	h := headersOf(should(t, c, request(0, of("generic_key", "checkout"), hits(3, of("remote_address", "10.0.0.2")))))
	require.Equal(t, "3", h["RateLimit-Limit"])
	require.Equal(t, "0", h["RateLimit-Remaining"])
	require.Equal(t, "60", h["RateLimit-Reset"])
	require.NotContains(t, h, "Retry-After")
	h = headersOf(should(t, c, request(4, of("generic_key", "checkout"), of("try", "x"))))
	require.Equal(t, "2", h["RateLimit-Remaining"], "the headers describe the limit that denies, not the shadow")
	require.NotContains(t, h, "Retry-After", "more tokens than the capacity are never due")
	h = headersOf(should(t, c, request(3, of("generic_key", "checkout"))))
	require.Equal(t, h["RateLimit-Reset"], h["Retry-After"])
	require.Contains(t, h, "Retry-After")
	require.Empty(t, headersOf(should(t, c, request(0, of("generic_key", "mail")))))
}

func TestALimitInTheRequestGoesBeforeTheFile(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	own := of("generic_key", "checkout")
	own.Limit = &descriptorpb.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1, Unit: typepb.RateLimitUnit_HOUR}
	require.Equal(t, codeOK, should(t, c, request(0, own)).GetOverallCode())
	res := should(t, c, request(0, own))
	require.Equal(t, over, res.GetOverallCode())
	require.Equal(t, rls.RateLimitResponse_RateLimit_HOUR, res.GetStatuses()[0].GetCurrentLimit().GetUnit())
	require.EqualValues(t, 3, b.tokens("checkout"))
}

func TestWhatEnvoyAsksThatIsNotKnownIsNotLimited(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	before := dump(t, b)
	req := request(0, of("user", "7"), of("generic_key", "mail"), of("partner", "acme", "x", "y"))
	res := should(t, c, req)
	require.Equal(t, codeOK, res.GetOverallCode())
	for _, st := range res.GetStatuses() {
		require.Equal(t, codeOK, st.GetCode())
		require.Nil(t, st.GetCurrentLimit())
	}
	req = request(0, of("generic_key", "checkout"))
	req.Domain = "other"
	require.Equal(t, codeOK, should(t, c, req).GetOverallCode())
	require.Equal(t, before, dump(t, b), "unknown descriptors create no keys")
}

func TestABadEnvoyRequestHasItsCodeAndDoesNothing(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	before := dump(t, b)
	noUnit := of("generic_key", "checkout")
	noUnit.Limit = &descriptorpb.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1}
	many := request(0)
	for range 65 {
		many.Descriptors = append(many.Descriptors, of("generic_key", "checkout"))
	}
	noDomain := request(0, of("generic_key", "checkout"))
	noDomain.Domain = ""
	good := of("generic_key", "checkout")
	for name, x := range map[string]struct {
		req  *rls.RateLimitRequest
		code codes.Code
	}{
		"no domain":             {noDomain, codes.InvalidArgument},
		"no descriptors":        {request(0), codes.InvalidArgument},
		"too many":              {many, codes.InvalidArgument},
		"no entries":            {request(0, good, of()), codes.InvalidArgument},
		"no key":                {request(0, good, of("", "x")), codes.InvalidArgument},
		"hits past all tokens":  {request(0, good, hits(math.MaxUint64, of("partner", "acme"))), codes.InvalidArgument},
		"a limit without unit":  {request(0, good, noUnit), codes.InvalidArgument},
		"an unknown bucket":     {request(0, of("partner", "typo")), codes.NotFound},
		"a name with braces":    {request(0, of("partner", "}}}")), codes.NotFound},
		"a huge value":          {request(0, of("partner", strings.Repeat("x", 10_000))), codes.NotFound},
		"too large":             {request(0, of("partner", strings.Repeat("x", 70_000))), codes.ResourceExhausted},
		"an error after a take": {request(0, good, of("partner", "typo")), codes.NotFound},
	} {
		_, err := c.ShouldRateLimit(t.Context(), x.req)
		require.Equal(t, x.code, status.Code(err), "%s: %v", name, err)
		require.EqualValues(t, 3, b.tokens("checkout"), name)
	}
	after := dump(t, b)
	require.Len(t, after, len(before), "no keys are created")
	b.redis.Kill()
	_, err := c.ShouldRateLimit(t.Context(), request(0, good))
	require.Equal(t, codes.Unavailable, status.Code(err))
	_, err = c.ShouldRateLimit(t.Context(), request(0, of("remote_address", "10.0.0.2")))
	require.Equal(t, codes.Unavailable, status.Code(err))
}

// As in the reference service, no limit applies to a descriptor with more entries than any limit has. The limits of
// other descriptors still apply.
func TestADescriptorOfManyEntriesKeepsNoOtherFromItsLimit(t *testing.T) {
	t.Parallel()
	b, c := envoyBench(t, nil)
	deep := of(slices.Repeat([]string{"partner", "acme"}, 17)...)
	res := should(t, c, request(0, deep, of("generic_key", "checkout")))
	require.Equal(t, codeOK, res.GetOverallCode())
	require.Nil(t, res.GetStatuses()[0].GetCurrentLimit())
	require.EqualValues(t, 2, b.tokens("checkout"))
}

func TestConcurrentEnvoyRequestsAreAdmittedExactly(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Envoy = edgeLimits(t, b) })
	b.bucket("checkout", 100)
	c := rls.NewRateLimitServiceClient(b.dial())
	var admitted atomic.Int64
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() {
			for range 20 {
				res, err := c.ShouldRateLimit(t.Context(), request(0, of("generic_key", "checkout")))
				if err != nil {
					t.Error(err)
					return
				}
				if res.GetOverallCode() == codeOK {
					admitted.Add(1)
				}
			}
		})
	}
	callers.Wait()
	require.EqualValues(t, 100, admitted.Load())
}
