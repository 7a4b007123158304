package sidecar

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// limitReply is the reply of a limit. It has the same form for each door.
type limitReply struct {
	failed codes.Code

	Name         string    `json:"name"`
	OK           bool      `json:"ok"`
	Taken        int64     `json:"taken"`
	Remaining    int64     `json:"remaining"`
	Limit        int64     `json:"limit"`
	RetryAfterMS int64     `json:"retry_after_ms"`
	WaitMS       int64     `json:"wait_ms"`
	NextMS       *int64    `json:"next_ms"`
	DeniedBy     []string  `json:"denied_by"`
	Undo         string    `json:"undo"`
	Repeated     bool      `json:"repeated"`
	Next         time.Time `json:"next"`
	Cancelled    bool      `json:"cancelled"`
}

// limitDoor is an interface through which a client uses limits by name.
type limitDoor interface {
	take(name, key string, n int64) limitReply
	peek(name, key string) limitReply
	undo(name, key, undo string) limitReply
	reserve(name, key, id string, at time.Time) limitReply
	cancel(name, key, id string) limitReply
}

type httpDoor struct{ b *bench }

func openHTTP(b *bench) limitDoor { return httpDoor{b} }

// grpcOf maps HTTP statuses to codes of gRPC.
var grpcOf = map[int]codes.Code{
	http.StatusOK: codes.OK, http.StatusNotFound: codes.NotFound, http.StatusConflict: codes.AlreadyExists,
}

func (d httpDoor) ask(method, name, path string, body map[string]any) limitReply {
	d.b.t.Helper()
	data, err := json.Marshal(body)
	require.NoError(d.b.t, err)
	r := d.b.do(method, "/v1/limits/"+name+path, string(data))
	code, known := grpcOf[r.status]
	require.True(d.b.t, known, "%d: %s", r.status, r.body)
	a := limitReply{failed: code}
	require.NoError(d.b.t, json.Unmarshal(r.body, &a), "%s", r.body)
	return a
}

func (d httpDoor) take(name, key string, n int64) limitReply {
	return d.ask(http.MethodPost, name, "/take", map[string]any{"key": key, "tokens": n})
}

func (d httpDoor) peek(name, key string) limitReply {
	return d.ask(http.MethodGet, name, "/peek?key="+key, nil)
}

func (d httpDoor) undo(name, key, undo string) limitReply {
	return d.ask(http.MethodPost, name, "/undo", map[string]any{"key": key, "undo": undo})
}

func (d httpDoor) reserve(name, key, id string, at time.Time) limitReply {
	body := map[string]any{"key": key, "id": id, "at": at.Format(time.RFC3339Nano)}
	return d.ask(http.MethodPost, name, "/reserve", body)
}

func (d httpDoor) cancel(name, key, id string) limitReply {
	return d.ask(http.MethodPost, name, "/cancel", map[string]any{"key": key, "id": id})
}

type grpcDoor struct {
	t      *testing.T
	client refillerv1.LimitsClient
}

func openGRPC(b *bench) limitDoor { return grpcDoor{b.t, refillerv1.NewLimitsClient(b.dial())} }

func (d grpcDoor) take(name, key string, n int64) limitReply {
	r, err := d.client.Take(d.t.Context(), &refillerv1.TakeLimitRequest{Name: name, Key: key, Tokens: &n})
	return limitReplyOf(r, err)
}

func (d grpcDoor) peek(name, key string) limitReply {
	r, err := d.client.Peek(d.t.Context(), &refillerv1.PeekLimitRequest{Name: name, Key: key})
	return limitReplyOf(r, err)
}

func (d grpcDoor) undo(name, key, undo string) limitReply {
	_, err := d.client.Undo(d.t.Context(), &refillerv1.UndoLimitRequest{Name: name, Key: key, Undo: undo})
	return limitReply{failed: status.Code(err)}
}

func (d grpcDoor) reserve(name, key, id string, at time.Time) limitReply {
	req := &refillerv1.ReserveInstantRequest{Name: name, Key: key, Id: id}
	if !at.IsZero() {
		req.At = timestamppb.New(at)
	}
	r, err := d.client.Reserve(d.t.Context(), req)
	return limitReply{
		failed: status.Code(err), Name: r.GetName(), OK: r.GetResult().GetOk(), Repeated: r.GetRepeated(),
		DeniedBy: r.GetDeniedBy(), Next: r.GetNext().AsTime(),
	}
}

func (d grpcDoor) cancel(name, key, id string) limitReply {
	r, err := d.client.Cancel(d.t.Context(), &refillerv1.CancelInstantRequest{Name: name, Key: key, Id: id})
	return limitReply{failed: status.Code(err), Name: r.GetName(), Cancelled: r.GetCancelled()}
}

func limitReplyOf(r *refillerv1.LimitResult, err error) limitReply {
	res := r.GetResult()
	var next *int64
	if r.GetNext() != nil {
		ms := r.GetNext().AsDuration().Milliseconds()
		next = &ms
	}
	return limitReply{
		NextMS: next,
		failed: status.Code(err), Name: r.GetName(), OK: res.GetOk(), Taken: res.GetTaken(), Remaining: res.GetRemaining(),
		Limit: res.GetLimit(), RetryAfterMS: res.GetRetryAfter().AsDuration().Milliseconds(),
		WaitMS: r.GetWait().AsDuration().Milliseconds(), DeniedBy: r.GetDeniedBy(), Undo: r.GetUndo(),
	}
}

// Redis is near when the sidecar starts. After that it replies only after 150 ms, which is three times the SDK's
// timeout.
func TestALimitHasHalfASecondByDefault(t *testing.T) {
	var far *faultproxy.Proxy
	b := start(t, func(o *Options, b *bench) {
		far = testenv.Proxy(t, b.redis.Addr(), 0)
		rdb := redis.NewClient(&redis.Options{Addr: far.Addr(), ContextTimeoutEnabled: true})
		t.Cleanup(func() { _ = rdb.Close() })
		var err error
		o.Client, err = fetch.New(rdb)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Client.Close(context.Background())) })
		require.NoError(t, o.Client.Ready(t.Context()))
		b.rdb = rdb
		o.Named = b.named("limits: [{name: api, window: {limit: 5, length: 1h}}]")
		o.Deadline = 0
	})
	check := func() int { return b.do(http.MethodGet, "/v1/check?limit=api&key=a", "").status }
	require.Equal(t, http.StatusOK, check())
	require.NoError(t, far.Distance(150*time.Millisecond, 0))
	require.Equal(t, http.StatusOK, check())
}

// A proxy may send the headers of its client with a check.
func TestACheckMayHave64KiBOfHeaders(t *testing.T) {
	t.Parallel()
	b := start(t, func(o *Options, b *bench) {
		o.Named = b.named("limits: [{name: api, window: {limit: 5, length: 1h}}]")
	})
	r := b.do(http.MethodGet, "/v1/check?limit=api&key=a", "", "X-Page", strings.Repeat("x", 63<<10))
	require.Equal(t, http.StatusOK, r.status)
}
