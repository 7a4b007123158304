package sidecar

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/durationpb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/lua"
)

func TestBucketsOverGRPC(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("checkout", 3)
	c := refillerv1.NewBucketsClient(b.dial())

	r, err := c.Take(t.Context(), &refillerv1.TakeRequest{Key: "checkout", Tokens: proto.Int64(2)})
	require.NoError(t, err)
	require.True(t, r.GetOk())
	require.EqualValues(t, 2, r.GetTaken())
	require.EqualValues(t, 1, r.GetRemaining())
	require.EqualValues(t, 3, r.GetLimit())
	require.Zero(t, r.GetRetryAfter().AsDuration())
	require.Equal(t, 2*time.Hour, r.GetResetAfter().AsDuration().Round(time.Minute))
	require.Equal(t, "shared", r.GetSource())

	r, err = c.Take(t.Context(), &refillerv1.TakeRequest{Key: "checkout", Tokens: proto.Int64(2)})
	require.NoError(t, err, "a denial is no error")
	require.False(t, r.GetOk())
	require.Equal(t, time.Hour, r.GetRetryAfter().AsDuration().Round(time.Minute))

	back, err := c.Return(t.Context(), &refillerv1.ReturnRequest{Key: "checkout"})
	require.NoError(t, err)
	require.EqualValues(t, 1, back.GetTokens())
	r, err = c.Peek(t.Context(), &refillerv1.PeekRequest{Key: "checkout"})
	require.NoError(t, err)
	require.EqualValues(t, 2, r.GetRemaining())

	w, err := c.Wait(t.Context(), &refillerv1.WaitRequest{Key: "checkout", Tokens: proto.Int64(2)})
	require.NoError(t, err)
	require.True(t, w.GetOk())
	require.EqualValues(t, 2, w.GetTaken())
	w, err = c.Wait(t.Context(), &refillerv1.WaitRequest{Key: "checkout", Timeout: durationpb.New(50 * time.Millisecond)})
	require.NoError(t, err)
	require.False(t, w.GetOk())

	b.bucket("llm", 100)
	reqs := []*refillerv1.Amount{{Key: "llm", Tokens: proto.Int64(60)}, {Key: "checkout"}}
	all, err := c.TakeAll(t.Context(), &refillerv1.TakeAllRequest{Requests: reqs})
	require.NoError(t, err, "a denial is no error")
	require.False(t, all.GetOk())
	require.Equal(t, "checkout", all.GetDenied())
	require.Equal(t, time.Hour, all.GetRetryAfter().AsDuration().Round(time.Minute))
	require.EqualValues(t, 100, b.tokens("llm"), "no bucket is charged")
	all, err = c.TakeAll(t.Context(), &refillerv1.TakeAllRequest{Requests: reqs[:1]})
	require.NoError(t, err)
	require.True(t, all.GetOk())
	require.EqualValues(t, 60, all.GetResults()[0].GetTaken())

	held, err := c.Reserve(t.Context(), &refillerv1.ReserveRequest{Key: "llm", Tokens: proto.Int64(30),
		Ttl: durationpb.New(time.Hour)})
	require.NoError(t, err)
	require.True(t, held.GetResult().GetOk())
	require.EqualValues(t, 10, held.GetResult().GetRemaining())
	require.WithinDuration(t, time.Now().Add(time.Hour), held.GetUntil().AsTime(), time.Minute)
	r, err = c.Peek(t.Context(), &refillerv1.PeekRequest{Key: "llm"})
	require.NoError(t, err)
	require.EqualValues(t, 30, r.GetOutstanding())
	denied, err := c.Reserve(t.Context(), &refillerv1.ReserveRequest{Key: "llm", Tokens: proto.Int64(11),
		Ttl: durationpb.New(time.Hour)})
	require.NoError(t, err)
	require.False(t, denied.GetResult().GetOk())
	require.Empty(t, denied.GetId())
	require.Nil(t, denied.GetUntil())
	for _, again := range []bool{false, true} {
		settled, err := c.Settle(t.Context(), &refillerv1.SettleRequest{Key: "llm", Id: held.GetId(), Used: proto.Int64(5)})
		require.NoError(t, err)
		require.EqualValues(t, 25, settled.GetReturned())
		require.EqualValues(t, 35, settled.GetRemaining())
		require.Equal(t, again, settled.GetAgain())
	}
	held, err = c.Reserve(t.Context(), &refillerv1.ReserveRequest{Key: "llm", Tokens: proto.Int64(35),
		Ttl: durationpb.New(time.Hour), Id: proto.String("job"), Overrun: refillerv1.Overrun_OVERRUN_DEBT})
	require.NoError(t, err)
	require.Equal(t, "job", held.GetId())
	cancelled, err := c.Cancel(t.Context(), &refillerv1.CancelRequest{Key: "llm", Id: "job"})
	require.NoError(t, err)
	require.EqualValues(t, 35, cancelled.GetReturned())

	_, err = lua.Add(t.Context(), b.rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	r, err = c.Peek(t.Context(), &refillerv1.PeekRequest{Key: "foreign"})
	require.NoError(t, err)
	require.Nil(t, r.GetResetAfter(), "a bucket without a policy has no reset time")
}

func TestABadGRPCRequestHasItsCodeAndDoesNothing(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.bucket("checkout", 3)
	require.NoError(t, b.rdb.Set(t.Context(), "other", "no number", 0).Err())
	require.EqualValues(t, 1, b.post("/v1/take", `{"key":"checkout"}`).json(t)["taken"])
	before := dump(t, b)
	c := refillerv1.NewBucketsClient(b.dial())
	take := func(key string, n int64) func() error {
		return func() error {
			_, err := c.Take(t.Context(), &refillerv1.TakeRequest{Key: key, Tokens: &n})
			return err
		}
	}
	wait := func(timeout time.Duration) func() error {
		return func() error {
			_, err := c.Wait(t.Context(), &refillerv1.WaitRequest{Key: "checkout", Timeout: durationpb.New(timeout)})
			return err
		}
	}
	all := func(reqs ...*refillerv1.Amount) func() error {
		return func() error {
			_, err := c.TakeAll(t.Context(), &refillerv1.TakeAllRequest{Requests: reqs})
			return err
		}
	}
	reserve := func(key string, ttl time.Duration, change func(*refillerv1.ReserveRequest)) func() error {
		return func() error {
			req := &refillerv1.ReserveRequest{Key: key, Ttl: durationpb.New(ttl)}
			if change != nil {
				change(req)
			}
			_, err := c.Reserve(t.Context(), req)
			return err
		}
	}
	settle := func(key, id string, used *int64) func() error {
		return func() error {
			_, err := c.Settle(t.Context(), &refillerv1.SettleRequest{Key: key, Id: id, Used: used})
			return err
		}
	}
	for name, call := range map[string]struct {
		do   func() error
		code codes.Code
	}{
		"no tokens":          {take("checkout", 0), codes.InvalidArgument},
		"negative tokens":    {take("checkout", -1), codes.InvalidArgument},
		"too many tokens":    {take("checkout", 1<<51), codes.InvalidArgument},
		"no key":             {take("", 1), codes.InvalidArgument},
		"huge key":           {take(strings.Repeat("k", 513), 1), codes.InvalidArgument},
		"huge request":       {take(strings.Repeat("k", 70_000), 1), codes.ResourceExhausted},
		"closing brace":      {take("check}out", 1), codes.InvalidArgument},
		"unknown bucket":     {take("typo", 1), codes.NotFound},
		"malformed bucket":   {take("other", 1), codes.FailedPrecondition},
		"exceeds capacity":   {take("checkout", 4), codes.OutOfRange},
		"no time":            {wait(0), codes.InvalidArgument},
		"negative time":      {wait(-time.Second), codes.InvalidArgument},
		"too long a time":    {wait(time.Minute + 1), codes.InvalidArgument},
		"take-all, none":     {all(), codes.InvalidArgument},
		"take-all, too many": {all(make([]*refillerv1.Amount, 65)...), codes.InvalidArgument},
		"take-all, no key":   {all(&refillerv1.Amount{Key: "checkout"}, &refillerv1.Amount{}), codes.InvalidArgument},
		"take-all, a typo":   {all(&refillerv1.Amount{Key: "checkout"}, &refillerv1.Amount{Key: "typo"}), codes.NotFound},
		"take-all, too much": {all(&refillerv1.Amount{Key: "checkout", Tokens: proto.Int64(4)}), codes.OutOfRange},
		"reserves forever":   {reserve("checkout", 25*time.Hour, nil), codes.InvalidArgument},
		"reserves no time":   {reserve("checkout", 0, nil), codes.InvalidArgument},
		"reserves nothing": {reserve("checkout", time.Hour,
			func(r *refillerv1.ReserveRequest) { r.Tokens = proto.Int64(0) }), codes.InvalidArgument},
		"reserves too much": {reserve("checkout", time.Hour,
			func(r *refillerv1.ReserveRequest) { r.Tokens = proto.Int64(4) }), codes.OutOfRange},
		"empty id": {reserve("checkout", time.Hour, func(r *refillerv1.ReserveRequest) { r.Id = proto.String("") }),
			codes.InvalidArgument},
		"huge id": {reserve("checkout", time.Hour,
			func(r *refillerv1.ReserveRequest) { r.Id = proto.String(strings.Repeat("i", 65)) }), codes.InvalidArgument},
		"unknown overrun": {reserve("checkout", time.Hour, func(r *refillerv1.ReserveRequest) { r.Overrun = 7 }),
			codes.InvalidArgument},
		"reserves a typo":          {reserve("typo", time.Hour, nil), codes.NotFound},
		"settles without a number": {settle("checkout", "job", nil), codes.InvalidArgument},
		"settles negative":         {settle("checkout", "job", proto.Int64(-1)), codes.InvalidArgument},
		"settles no id":            {settle("checkout", "", proto.Int64(1)), codes.InvalidArgument},
		"settles not held":         {settle("checkout", "job", proto.Int64(1)), codes.NotFound},
		"cancels not held": {func() error {
			_, err := c.Cancel(t.Context(), &refillerv1.CancelRequest{Key: "checkout", Id: "job"})
			return err
		}, codes.NotFound},
		"returns to a typo": {func() error {
			_, err := c.Return(t.Context(),
				&refillerv1.ReturnRequest{Key: "typo"})
			return err
		}, codes.NotFound},
		"peeks at a typo": {func() error {
			_, err := c.Peek(t.Context(),
				&refillerv1.PeekRequest{Key: "typo"})
			return err
		}, codes.NotFound},
	} {
		err := call.do()
		require.Equal(t, call.code, status.Code(err), "%s: %v", name, err)
	}
	require.Equal(t, before, dump(t, b), "no call took, returned or created anything")

	b.redis.Kill()
	require.Equal(t, codes.Unavailable, status.Code(take("checkout", 1)()))
}

func TestTokensThatAreDueAfterTheCallersDeadlineAreDeniedAtOnce(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	b.empty("checkout", 40*time.Second)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := refillerv1.NewBucketsClient(b.dial()).Wait(ctx, &refillerv1.WaitRequest{Key: "checkout"})
	require.NoError(t, err)
	require.False(t, r.GetOk())
	require.Less(t, r.GetWaited().AsDuration(), patience/2)
	b.underWay(0)
}

func TestHealthAndReflectionKnowTheServices(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) { o.Envoy = edgeLimits(t, b) })
	conn := b.dial()
	health := healthpb.NewHealthClient(conn)
	services := []string{"refiller.v1.Buckets", "refiller.v1.Limits", "envoy.service.ratelimit.v3.RateLimitService"}
	for _, name := range append(services, "") {
		r, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: name})
		require.NoError(t, err, name)
		require.Equal(t, healthpb.HealthCheckResponse_SERVING, r.GetStatus(), name)
	}
	_, err := health.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "other"})
	require.Equal(t, codes.NotFound, status.Code(err))

	stream, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	require.NoError(t, err)
	ask := func(req *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
		require.NoError(t, stream.Send(req))
		res, err := stream.Recv()
		require.NoError(t, err)
		return res
	}
	var listed []string
	for _, s := range ask(&reflectionpb.ServerReflectionRequest{
		MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{},
	}).GetListServicesResponse().GetService() {
		listed = append(listed, s.GetName())
	}
	require.Subset(t, listed, append(services, "grpc.health.v1.Health"))
	files := ask(&reflectionpb.ServerReflectionRequest{
		MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: "refiller.v1.Buckets",
		},
	}).GetFileDescriptorResponse().GetFileDescriptorProto()
	require.NotEmpty(t, files)
	var file descriptorpb.FileDescriptorProto
	require.NoError(t, proto.Unmarshal(files[0], &file))
	var methods []string
	for _, m := range file.GetService()[0].GetMethod() {
		methods = append(methods, m.GetName())
	}
	require.Equal(t, []string{"Take", "TakeAll", "Return", "Peek", "Wait", "Reserve", "Settle", "Cancel"}, methods)
	require.NoError(t, stream.CloseSend())
}

// The tokens that a take must leave are the same over HTTP, gRPC and Envoy's interface.
func TestATakeLeavesTheRequestedTokens(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		limits, err := envoy.Parse(map[string][]byte{"batch.yaml": []byte(`
domain: edge
descriptors:
  - key: class
    value: batch
    rate_limit: {bucket: llm, leave: 20%}
`)}, envoy.NewWindows(b.rdb, always(patience), envoy.DefaultWindowOptions()))
		require.NoError(t, err)
		o.Envoy = limits
	})
	b.bucket("llm", 100)
	c := refillerv1.NewBucketsClient(b.dial())
	envoy := rls.NewRateLimitServiceClient(b.dial())

	r, err := c.Take(t.Context(), &refillerv1.TakeRequest{Key: "llm", Tokens: proto.Int64(70), Leave: "30"})
	require.NoError(t, err)
	require.True(t, r.GetOk())
	require.EqualValues(t, 30, r.GetRemaining())
	for _, leave := range []string{"21", "30%"} {
		r, err = c.Take(t.Context(), &refillerv1.TakeRequest{Key: "llm", Tokens: proto.Int64(10), Leave: leave})
		require.NoError(t, err)
		require.False(t, r.GetOk(), leave)
		require.Positive(t, r.GetRetryAfter().AsDuration())
		all, err := c.TakeAll(t.Context(), &refillerv1.TakeAllRequest{Requests: []*refillerv1.Amount{{Key: "llm",
			Tokens: proto.Int64(10)}}, Leave: leave})
		require.NoError(t, err)
		require.False(t, all.GetOk())
		held, err := c.Reserve(t.Context(), &refillerv1.ReserveRequest{Key: "llm", Tokens: proto.Int64(10),
			Ttl: durationpb.New(time.Hour), Leave: leave})
		require.NoError(t, err)
		require.False(t, held.GetResult().GetOk())
		w, err := c.Wait(t.Context(), &refillerv1.WaitRequest{Key: "llm", Tokens: proto.Int64(10),
			Timeout: durationpb.New(time.Second), Leave: leave})
		require.NoError(t, err)
		require.False(t, w.GetOk())
		for _, path := range []string{"/v1/take", "/v1/wait", "/v1/reserve"} {
			extra := ""
			if path == "/v1/reserve" {
				extra = `,"ttl_ms":1000`
			}
			answer := b.post(path, `{"key":"llm","tokens":10,"leave":"`+leave+`"`+extra+`}`)
			require.Equal(t, false, answer.json(t)["ok"], "%s: %s", path, answer.body)
		}
		require.Equal(t, false, b.post("/v1/take-all",
			`{"requests":[{"key":"llm","tokens":10}],"leave":"`+leave+`"}`).json(t)["ok"])
	}
	require.Equal(t, codeOK, should(t, envoy, request(10, of("class", "batch"))).GetOverallCode())
	require.Equal(t, over, should(t, envoy, request(1, of("class", "batch"))).GetOverallCode())
	require.EqualValues(t, 20, b.tokens("llm"))
	require.Equal(t, true, b.post("/v1/take", `{"key":"llm","tokens":20}`).json(t)["ok"])

	for _, leave := range []string{"many", "101%", "-1", "%"} {
		_, err = c.Take(t.Context(), &refillerv1.TakeRequest{Key: "llm", Leave: leave})
		require.Equal(t, codes.InvalidArgument, status.Code(err), leave)
		require.Equal(t, http.StatusBadRequest, b.post("/v1/take", `{"key":"llm","leave":"`+leave+`"}`).status, leave)
	}
}
