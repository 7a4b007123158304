package sidecar

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/policy"
)

const (
	maxDescriptors = 64 // of a request
	maxEntries     = 16 // of a descriptor
)

// Windows is where the windows of rate limits are kept.
type Windows struct {
	Redis    redis.UniversalClient
	Deadline time.Duration // of a call; more than 0
}

// taker is what a descriptor takes from.
type taker interface {
	Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error)
	Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error)
	Undo(ctx context.Context, key string, r fetch.Result) error
	Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error
}

// windows makes takers of so many requests in a unit of time.
type windows struct {
	rdb      redis.UniversalClient
	deadline time.Duration
}

func (w windows) taker(u unit, requests uint32) (taker, error) {
	if requests == 0 {
		return blocked{}, nil
	}
	l, err := window.New(w.rdb, u.window(requests))
	if err != nil {
		return nil, err
	}
	return timed{l, w.deadline}, nil
}

// timed is a taker whose calls have a deadline.
type timed struct {
	taker
	deadline time.Duration
}

func (t timed) Take(ctx context.Context, key string, n int64, opts ...fetch.CallOption) (fetch.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, t.deadline)
	defer cancel()
	return t.taker.Take(ctx, key, n, opts...)
}

func (t timed) Peek(ctx context.Context, key string, opts ...fetch.CallOption) (fetch.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, t.deadline)
	defer cancel()
	return t.taker.Peek(ctx, key, opts...)
}

func (t timed) Undo(ctx context.Context, key string, r fetch.Result) error {
	ctx, cancel := context.WithTimeout(ctx, t.deadline)
	defer cancel()
	return t.taker.Undo(ctx, key, r)
}

func (t timed) Return(ctx context.Context, key string, n int64, opts ...fetch.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, t.deadline)
	defer cancel()
	return t.taker.Return(ctx, key, n, opts...)
}

// blocked has no tokens, ever.
type blocked struct{}

func (blocked) Take(context.Context, string, int64, ...fetch.CallOption) (fetch.Result, error) {
	return fetch.Result{RetryAfter: fetch.Never, ResetAfter: fetch.Never}, nil
}

func (b blocked) Peek(ctx context.Context, key string, _ ...fetch.CallOption) (fetch.Result, error) {
	return b.Take(ctx, key, 1)
}

func (blocked) Undo(context.Context, string, fetch.Result) error { return nil }

func (blocked) Return(context.Context, string, int64, ...fetch.CallOption) error { return nil }

// envoyServer is Envoy's rate limit service.
type envoyServer struct {
	rls.UnimplementedRateLimitServiceServer // for methods that a later version of the interface adds
	limits                                  *RateLimits
	buckets                                 taker
	log                                     hclog.Logger
}

func newEnvoyServer(limits *RateLimits, client *fetch.Client, log hclog.Logger) *envoyServer {
	return &envoyServer{limits: limits, buckets: client, log: log}
}

// decision is what a descriptor asks for and is answered.
type decision struct {
	limit  *rateLimit // nil: none applies
	taker  taker
	key    string
	n      int64
	back   bool // give n back instead of taking
	result fetch.Result
}

// enforced reports whether a denial counts.
func (d *decision) enforced(shadow bool) bool {
	return d.limit != nil && !shadow && !d.limit.shadow && !d.limit.quota
}

// ShouldRateLimit implements rls.RateLimitServiceServer. It takes for all
// descriptors or, if one of them is denied, for none; those in shadow or quota
// mode take for themselves alone.
func (s *envoyServer) ShouldRateLimit(ctx context.Context, req *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	ds, err := s.decisions(req)
	if err != nil {
		return nil, grpcError(err)
	}
	if err := s.decide(ctx, ds); err != nil {
		return nil, grpcError(err)
	}
	return s.response(req, ds), nil
}

// decisions finds out what is asked for.
func (s *envoyServer) decisions(req *rls.RateLimitRequest) ([]decision, error) {
	bad := func(format string, args ...any) ([]decision, error) {
		return nil, fmt.Errorf("%w: %s", errBadRequest, fmt.Sprintf(format, args...))
	}
	switch n := len(req.GetDescriptors()); {
	case req.GetDomain() == "":
		return bad("domain: it is empty")
	case n < 1 || n > maxDescriptors:
		return bad("descriptors: there are %d; want 1 to %d", n, maxDescriptors)
	}
	ds := make([]decision, len(req.GetDescriptors()))
	for i, descriptor := range req.GetDescriptors() {
		entries, err := entriesOf(descriptor)
		if err != nil {
			return bad("descriptors[%d]: %v", i, err)
		}
		d := &ds[i]
		d.n, d.back = max(1, int64(req.GetHitsAddend())), descriptor.GetIsNegativeHits()
		if own := descriptor.GetHitsAddend(); own != nil {
			if own.GetValue() > policy.MaxTokens {
				return bad("descriptors[%d].hits_addend: %d is not from 0 to %d", i, own.GetValue(), int64(policy.MaxTokens))
			}
			d.n = int64(own.GetValue())
		}
		if err := s.find(d, req.GetDomain(), descriptor, entries); err != nil {
			return bad("descriptors[%d]: %v", i, err)
		}
	}
	replaced := make(map[string]bool)
	for _, d := range ds {
		if d.limit != nil {
			for name := range d.limit.replaces {
				replaced[name] = true
			}
		}
	}
	for i := range ds {
		if l := ds[i].limit; l != nil && l.name != "" && replaced[l.name] {
			ds[i].limit = nil
		}
	}
	return ds, nil
}

func entriesOf(d *descriptorpb.RateLimitDescriptor) ([]entry, error) {
	n := len(d.GetEntries())
	if n < 1 || n > maxEntries {
		return nil, fmt.Errorf("entries: there are %d; want 1 to %d", n, maxEntries)
	}
	entries := make([]entry, n)
	for i, e := range d.GetEntries() {
		if e.GetKey() == "" {
			return nil, fmt.Errorf("entries[%d].key: it is empty", i)
		}
		entries[i] = entry{e.GetKey(), e.GetValue()}
	}
	return entries, nil
}

// find says what a descriptor takes from: what the request itself says, or what
// the file does. Nothing is done for a domain or descriptor that isn't known.
func (s *envoyServer) find(d *decision, inDomain string, descriptor *descriptorpb.RateLimitDescriptor, entries []entry) error {
	root := s.limits.domains[inDomain]
	if root == nil {
		return nil
	}
	if o := descriptor.GetLimit(); o != nil {
		u, ok := units[strings.ToLower(o.GetUnit().String())]
		if !ok {
			return fmt.Errorf("limit.unit: %s is no length of time", o.GetUnit())
		}
		d.limit = &rateLimit{windowed: true, unit: u, requests: o.GetRequestsPerUnit()}
	} else if d.limit, entries = root.match(entries); d.limit == nil || d.limit.unlimited {
		return nil
	}
	if !d.limit.windowed {
		d.taker, d.key = s.buckets, d.limit.bucket.name(inDomain, entries)
		return nil
	}
	var err error
	d.taker, err = s.limits.windows.taker(d.limit.unit, d.limit.requests)
	d.key = windowKey(inDomain, entries)
	return err
}

// decide asks one after the other. After a denial that counts the others are only
// looked at, and what was taken goes back, since the request is refused.
func (s *envoyServer) decide(ctx context.Context, ds []decision) error {
	denied := false
	for i := range ds {
		d := &ds[i]
		if d.limit == nil || d.limit.unlimited {
			continue
		}
		enforced := d.enforced(s.limits.Shadow)
		if err := d.ask(ctx, denied && enforced); err != nil {
			s.giveBack(ctx, ds[:i])
			return err
		}
		if !d.result.OK && enforced {
			denied = true
		}
		if !d.result.OK && !enforced {
			s.log.Debug("over limit, not enforced", "bucket", d.key)
		}
	}
	if denied {
		s.giveBack(ctx, ds)
	}
	return nil
}

// ask takes, or only looks. More than a bucket can ever hold is a denial.
func (d *decision) ask(ctx context.Context, look bool) (err error) {
	switch {
	case d.back && d.n > 0 && !look:
		if err = d.taker.Return(ctx, d.key, d.n); err != nil {
			return err
		}
		fallthrough
	case d.n == 0, d.back:
		d.result, err = d.taker.Peek(ctx, d.key)
		d.result.OK = true // nothing was asked for
	case look:
		d.result, err = d.taker.Peek(ctx, d.key)
		d.result.OK = d.result.Remaining >= d.n+policy.Leave(d.limit.leave).Of(d.result.Limit)
	default:
		var opts []fetch.CallOption
		if !d.limit.windowed {
			opts = []fetch.CallOption{d.limit.leave}
		}
		d.result, err = d.taker.Take(ctx, d.key, d.n, opts...)
		if errors.Is(err, fetch.ErrExceedsCapacity) {
			d.result, err = d.taker.Peek(ctx, d.key)
			d.result.OK, d.result.RetryAfter = false, fetch.Never
		}
	}
	return err
}

// giveBack returns what enforced limits gave. What can't be returned is lost,
// which changes no answer.
func (s *envoyServer) giveBack(ctx context.Context, ds []decision) {
	ctx = context.WithoutCancel(ctx) // the tokens are others' even if this caller has gone
	for i := range ds {
		d := &ds[i]
		if d.result.Taken == 0 || !d.enforced(s.limits.Shadow) {
			continue
		}
		if err := d.taker.Undo(ctx, d.key, d.result); err != nil {
			s.log.Warn("tokens of a refused request are lost", "bucket", d.key, "tokens", d.result.Taken, "error", err)
			continue
		}
		d.result.Remaining += d.result.Taken
		d.result.Taken = 0
	}
}

func (s *envoyServer) response(req *rls.RateLimitRequest, ds []decision) *rls.RateLimitResponse {
	res := &rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OK}
	var violations []any // of quotas
	quotas := false
	for i := range ds {
		d := &ds[i]
		st := &rls.RateLimitResponse_DescriptorStatus{Code: rls.RateLimitResponse_OK}
		res.Statuses = append(res.Statuses, st)
		if d.limit == nil {
			continue
		}
		if d.limit.unlimited {
			st.LimitRemaining = math.MaxUint32
			continue
		}
		st.CurrentLimit, st.LimitRemaining = d.currentLimit(), clamp(d.result.Remaining)
		if t := d.untilReset(); t != fetch.Never {
			st.DurationUntilReset = durationpb.New(t)
		}
		quotas = quotas || d.limit.quota
		switch {
		case d.result.OK:
		case d.enforced(s.limits.Shadow):
			st.Code, res.OverallCode = rls.RateLimitResponse_OVER_LIMIT, rls.RateLimitResponse_OVER_LIMIT
		case d.limit.quota:
			violations = append(violations, i)
		}
	}
	if quotas {
		res.DynamicMetadata = quotaMetadata(req, violations)
	}
	if s.limits.Headers {
		res.ResponseHeadersToAdd = headers(ds, res)
	}
	return res
}

func (d *decision) currentLimit() *rls.RateLimitResponse_RateLimit {
	l := &rls.RateLimitResponse_RateLimit{Name: d.limit.name, RequestsPerUnit: clamp(d.result.Limit)}
	if d.limit.windowed {
		l.RequestsPerUnit = d.limit.requests
		l.Unit = rls.RateLimitResponse_RateLimit_Unit(rls.RateLimitResponse_RateLimit_Unit_value[strings.ToUpper(d.limit.unit.name)])
	}
	return l
}

// untilReset is when to come back: after a denial when the tokens are due, else
// when all are there again.
func (d *decision) untilReset() time.Duration {
	if !d.result.OK {
		return d.result.RetryAfter
	}
	return d.result.ResetAfter
}

// clamp fits a number of tokens into Envoy's type: more than that is as good as
// unlimited.
func clamp(n int64) uint32 { return uint32(max(0, min(n, math.MaxUint32))) }

// quotaMetadata has the form that the reference service gives it.
func quotaMetadata(req *rls.RateLimitRequest, violations []any) *structpb.Struct {
	var descriptors []any
	for _, d := range req.GetDescriptors() {
		var entries []any
		for _, e := range d.GetEntries() {
			entries = append(entries, e.GetKey()+"="+e.GetValue())
		}
		descriptors = append(descriptors, map[string]any{"entries": entries})
	}
	s, err := structpb.NewStruct(map[string]any{
		"domain": req.GetDomain(), "descriptors": descriptors, "quotaModeEnabled": true, "quotaModeViolations": violations,
	})
	if err != nil {
		return nil // text that isn't UTF-8, which no request can hold
	}
	return s
}

// headers tell the strictest limit: one that denies, else the one with the fewest
// tokens left.
func headers(ds []decision, res *rls.RateLimitResponse) []*core.HeaderValue {
	strictest := -1
	over := func(i int) bool { return res.Statuses[i].Code == rls.RateLimitResponse_OVER_LIMIT }
	for i, st := range res.Statuses {
		if st.CurrentLimit == nil {
			continue
		}
		if strictest < 0 || over(i) && !over(strictest) ||
			over(i) == over(strictest) && st.LimitRemaining < res.Statuses[strictest].LimitRemaining {
			strictest = i
		}
	}
	if strictest < 0 {
		return nil
	}
	st := res.Statuses[strictest]
	out := []*core.HeaderValue{
		{Key: "RateLimit-Limit", Value: strconv.FormatUint(uint64(st.CurrentLimit.RequestsPerUnit), 10)},
		{Key: "RateLimit-Remaining", Value: strconv.FormatUint(uint64(st.LimitRemaining), 10)},
	}
	t := ds[strictest].untilReset()
	if t == fetch.Never {
		return out
	}
	seconds := strconv.FormatInt(int64((t+time.Second-1)/time.Second), 10)
	out = append(out, &core.HeaderValue{Key: "RateLimit-Reset", Value: seconds})
	if over(strictest) {
		out = append(out, &core.HeaderValue{Key: "Retry-After", Value: seconds})
	}
	return out
}
