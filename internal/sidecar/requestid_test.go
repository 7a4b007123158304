package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	refillerv1 "github.com/tokenrefill/refiller/api/refiller/v1"
	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

// namedTake takes n tokens of the bucket checkout for a request. It returns the tokens left, and the code of an error.
type namedTake func(t *testing.T, b *bench, id string, n int64) (remaining int64, failed codes.Code)

// namedTakes are the calls that have a request id.
var namedTakes = map[string]namedTake{
	"HTTP": func(t *testing.T, b *bench, id string, n int64) (int64, codes.Code) {
		r := b.post("/v1/take", string(marshal(t, map[string]any{"key": "checkout", "tokens": n, "request_id": id})))
		if r.status != http.StatusOK {
			return 0, codeOf(r)
		}
		return int64(r.json(t)["remaining"].(float64)), codes.OK
	},
	"HTTPAll": func(t *testing.T, b *bench, id string, n int64) (int64, codes.Code) {
		r := b.post("/v1/take-all", string(marshal(t, map[string]any{
			"requests": []any{map[string]any{"key": "checkout", "tokens": n}}, "request_id": id,
		})))
		if r.status != http.StatusOK {
			return 0, codeOf(r)
		}
		return int64(r.json(t)["results"].([]any)[0].(map[string]any)["remaining"].(float64)), codes.OK
	},
	"GRPC": func(t *testing.T, b *bench, id string, n int64) (int64, codes.Code) {
		r, err := refillerv1.NewBucketsClient(b.dial()).Take(t.Context(), &refillerv1.TakeRequest{
			Key: "checkout", Tokens: proto.Int64(n), RequestId: proto.String(id),
		})
		return r.GetRemaining(), status.Code(err)
	},
	"GRPCAll": func(t *testing.T, b *bench, id string, n int64) (int64, codes.Code) {
		r, err := refillerv1.NewBucketsClient(b.dial()).TakeAll(t.Context(), &refillerv1.TakeAllRequest{
			Requests: []*refillerv1.Amount{{Key: "checkout", Tokens: proto.Int64(n)}}, RequestId: proto.String(id),
		})
		if err != nil {
			return 0, status.Code(err)
		}
		return r.GetResults()[0].GetRemaining(), codes.OK
	},
}

func marshal(t *testing.T, body map[string]any) []byte {
	t.Helper()
	data, err := json.Marshal(body)
	require.NoError(t, err)
	return data
}

// codeOf returns gRPC's code for a status that a take with a request id gets.
func codeOf(r reply) codes.Code {
	return map[int]codes.Code{
		http.StatusBadRequest: codes.InvalidArgument, http.StatusConflict: codes.AlreadyExists,
		http.StatusServiceUnavailable: codes.Unavailable,
	}[r.status]
}

func TestATakeThatFailedIsRepeatedAndChargedOnce(t *testing.T) {
	t.Parallel()
	for name, take := range namedTakes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var proxy *faultproxy.Proxy
			b := start(t, func(o *Options, b *bench) { o.Client, proxy = behindProxy(t, b.redis) })
			b.bucket("checkout", 100)
			require.NoError(t, lua.Load(t.Context(), b.rdb))
			left, failed := take(t, b, "warm", 10)
			require.Equal(t, codes.OK, failed)
			require.EqualValues(t, 90, left)

			require.NoError(t, proxy.CutAfterReply(2, func(request []byte) bool {
				return bytes.Contains(bytes.ToLower(request), []byte("evalsha"))
			}))
			_, failed = take(t, b, "order-1", 30)
			require.Equal(t, codes.Unavailable, failed)
			require.Equal(t, 2, proxy.LostReplies())
			require.EqualValues(t, 60, b.tokens("checkout"), "the take was charged")
			require.NoError(t, proxy.Heal())
			for range 2 {
				left, failed = take(t, b, "order-1", 30)
				require.Equal(t, codes.OK, failed)
				require.EqualValues(t, 60, left)
			}
			require.EqualValues(t, 60, b.tokens("checkout"), "the take is charged once")

			_, failed = take(t, b, "order-1", 31)
			require.Equal(t, codes.AlreadyExists, failed, "the id belongs to another take")
			for _, id := range []string{"", "order 1", strings.Repeat("x", lua.MaxRequestIDLen+1)} {
				_, failed = take(t, b, id, 1)
				require.Equal(t, codes.InvalidArgument, failed, "%q", id)
			}
			require.EqualValues(t, 60, b.tokens("checkout"))
		})
	}
}

// behindProxy makes a client whose connections to a server go through a proxy.
func behindProxy(t *testing.T, server *testenv.RedisServer) (*fetch.Client, *faultproxy.Proxy) {
	t.Helper()
	proxy := testenv.Proxy(t, server.Addr(), 0)
	rdb := redis.NewClient(&redis.Options{Addr: proxy.Addr()})
	t.Cleanup(func() { _ = rdb.Close() })
	client, err := fetch.New(rdb, fetch.WithTimeout(patience))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close(context.Background())) })
	return client, proxy
}
