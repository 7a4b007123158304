package envoy

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
)

const roundTrip = 2 * time.Millisecond

// farAway has buckets on a server that is one round trip away.
type farAway struct {
	mu   sync.Mutex
	left map[string]int64
}

var errAway = errors.New("away")

func (f *farAway) Take(_ context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	time.Sleep(roundTrip)
	f.mu.Lock()
	defer f.mu.Unlock()
	left, there := f.left[key]
	switch {
	case !there:
		return fetch.Result{}, errAway
	case left < n:
		return fetch.Result{Remaining: left, Limit: 10}, nil
	}
	f.left[key] -= n
	return fetch.Result{OK: true, Taken: n, Remaining: left - n, Limit: 10}, nil
}

func (f *farAway) TakeUpTo(ctx context.Context, key string, n int64, _ ...fetch.CallOption) (fetch.Result, error) {
	return f.Take(ctx, key, n)
}

func (f *farAway) Peek(context.Context, string, ...fetch.CallOption) (fetch.Result, error) {
	time.Sleep(roundTrip)
	return fetch.Result{OK: true}, nil
}

func (f *farAway) Undo(_ context.Context, key string, r fetch.Result) error {
	time.Sleep(roundTrip)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left[key] += r.Taken
	return nil
}

func (f *farAway) Return(context.Context, string, int64, ...fetch.CallOption) error { return nil }

func TestDescriptorsAreAskedInOneRoundTrip(t *testing.T) {
	t.Parallel()
	const descriptors = 16
	limits, err := Parse(map[string][]byte{"edge.yaml": []byte("domain: edge\n" +
		`descriptors: [{key: user, rate_limit: {bucket: "user:{value}"}}]`)}, nil)
	require.NoError(t, err)
	for name, tc := range map[string]struct {
		left  map[string]int64 // remaining tokens of buckets that don't have 3
		took  time.Duration
		over  bool
		fails bool
	}{
		"all admit":           {nil, roundTrip, false, false},
		"one denies":          {map[string]int64{"user:7": 0}, 2 * roundTrip, true, false},
		"one is unavailable":  {map[string]int64{"user:7": -1}, 2 * roundTrip, false, true},
		"the last one denies": {map[string]int64{"user:15": 0}, 2 * roundTrip, true, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			buckets := &farAway{left: make(map[string]int64)}
			req := &rls.RateLimitRequest{Domain: "edge"}
			for i := range descriptors {
				buckets.left[fmt.Sprintf("user:%d", i)] = 3
				req.Descriptors = append(req.Descriptors, &descriptorpb.RateLimitDescriptor{
					Entries: []*descriptorpb.RateLimitDescriptor_Entry{{Key: "user", Value: fmt.Sprint(i)}},
				})
			}
			for key, n := range tc.left {
				buckets.left[key] = n
				if n < 0 {
					delete(buckets.left, key)
				}
			}
			s := &Server{buckets: buckets, log: hclog.NewNullLogger()}
			s.limits.Store(limits)
			began := time.Now()
			res, err := s.ShouldRateLimit(t.Context(), req)
			require.Equal(t, tc.fails, err != nil, name)
			require.Equal(t, tc.took, time.Since(began), name)
			require.Equal(t, tc.over, res.GetOverallCode() == rls.RateLimitResponse_OVER_LIMIT, name)
			for i := range descriptors {
				key := fmt.Sprintf("user:%d", i)
				want := int64(3)
				if n, ok := tc.left[key]; ok {
					want = max(0, n)
				} else if !tc.over && !tc.fails {
					want = 2
				}
				require.Equal(t, want, buckets.left[key], "%s: %s", name, key)
			}
		})
	}
}
