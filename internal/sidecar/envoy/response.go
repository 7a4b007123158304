package envoy

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/tokenrefill/refiller/fetch"
)

func (r *Limits) response(req *rls.RateLimitRequest, ds []decision, over bool) *rls.RateLimitResponse {
	res := &rls.RateLimitResponse{OverallCode: rls.RateLimitResponse_OK}
	if over {
		res.OverallCode = rls.RateLimitResponse_OVER_LIMIT
	}
	described := false
	for i := range ds {
		d := &ds[i]
		st := &rls.RateLimitResponse_DescriptorStatus{Code: rls.RateLimitResponse_OK}
		res.Statuses = append(res.Statuses, st)
		if d.limit == nil {
			continue
		}
		described = described || d.limit.quota || d.limit.metadata != nil
		if d.limit.unlimited {
			st.LimitRemaining = math.MaxUint32
			continue
		}
		st.CurrentLimit, st.LimitRemaining = d.currentLimit(), clamp(d.result.Remaining)
		if t := d.untilReset(); t != fetch.Never {
			st.DurationUntilReset = durationpb.New(t)
		}
		if d.over() {
			st.Code = rls.RateLimitResponse_OVER_LIMIT
		}
	}
	if described {
		res.DynamicMetadata = metadata(req, ds)
	}
	if r.Headers != nil {
		res.ResponseHeadersToAdd = headers(*r.Headers, ds, res)
	}
	return res
}

func (d *decision) currentLimit() *rls.RateLimitResponse_RateLimit {
	l := &rls.RateLimitResponse_RateLimit{Name: d.limit.name, RequestsPerUnit: clamp(d.result.Limit)}
	if d.limit.window != nil {
		l.RequestsPerUnit = d.limit.per.requests
		l.Unit = rls.RateLimitResponse_RateLimit_Unit(
			rls.RateLimitResponse_RateLimit_Unit_value[strings.ToUpper(d.limit.per.unit.name)])
	}
	return l
}

// untilReset returns the time until the tokens are due if the descriptor is denied. Otherwise it returns the time until
// all tokens are there.
func (d *decision) untilReset() time.Duration {
	if !d.result.OK && d.result.RetryAfter > 0 {
		return d.result.RetryAfter
	}
	return d.result.ResetAfter
}

// clamp converts a number of tokens to Envoy's type. Larger numbers become its largest one.
func clamp(n int64) uint32 { return uint32(max(0, min(n, math.MaxUint32))) }

// metadata returns the dynamic metadata of a response, in the form of the reference service: the request, and the
// metadata of the limits that it does not exceed.
func metadata(req *rls.RateLimitRequest, ds []decision) *structpb.Struct {
	descriptors := &structpb.ListValue{}
	for _, d := range req.GetDescriptors() {
		descriptors.Values = append(descriptors.Values, structpb.NewStructValue(described(d)))
	}
	s := &structpb.Struct{Fields: map[string]*structpb.Value{
		"domain": structpb.NewStringValue(req.GetDomain()), "descriptors": structpb.NewListValue(descriptors),
	}}
	if n := req.GetHitsAddend(); n != 0 {
		s.Fields["hitsAddend"] = structpb.NewNumberValue(float64(n))
	}
	passed := &structpb.Struct{Fields: make(map[string]*structpb.Value)}
	for i := range ds {
		if d := &ds[i]; d.limited() && !d.over() {
			merge(passed, d.limit.metadata)
		}
	}
	if len(passed.Fields) > 0 {
		s.Fields["metadata"] = structpb.NewStructValue(passed)
	}
	return s
}

func described(d *descriptorpb.RateLimitDescriptor) *structpb.Struct {
	entries := &structpb.ListValue{}
	for _, e := range d.GetEntries() {
		entries.Values = append(entries.Values, structpb.NewStringValue(fmt.Sprintf("%s=%s", e.GetKey(), e.GetValue())))
	}
	s := &structpb.Struct{Fields: map[string]*structpb.Value{"entries": structpb.NewListValue(entries)}}
	if l := d.GetLimit(); l != nil {
		s.Fields["limit"] = structpb.NewStringValue(l.String())
	}
	if n := d.GetHitsAddend(); n != nil {
		s.Fields["hitsAddend"] = structpb.NewNumberValue(float64(n.GetValue()))
	}
	return s
}

// merge adds the fields of from to into. A field that into already has keeps its value. If both values are structs,
// they are merged.
func merge(into, from *structpb.Struct) {
	for name, v := range from.GetFields() {
		have, found := into.Fields[name]
		switch {
		case !found && v.GetStructValue() != nil: // make a copy, because more may be merged into it
			s := &structpb.Struct{Fields: make(map[string]*structpb.Value)}
			merge(s, v.GetStructValue())
			into.Fields[name] = structpb.NewStructValue(s)
		case !found:
			into.Fields[name] = v
		case have.GetStructValue() != nil:
			merge(have.GetStructValue(), v.GetStructValue())
		}
	}
}

// headers returns headers that describe the strictest limit. A limit that denies is stricter than one that doesn't.
// Otherwise the limit with fewer remaining tokens is stricter.
func headers(names HeaderNames, ds []decision, res *rls.RateLimitResponse) []*core.HeaderValue {
	strictest := -1
	over := func(i int) bool { return res.OverallCode == res.Statuses[i].Code && ds[i].over() }
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
		{Key: names.Limit, Value: strconv.FormatUint(uint64(st.CurrentLimit.RequestsPerUnit), 10)},
		{Key: names.Remaining, Value: strconv.FormatUint(uint64(st.LimitRemaining), 10)},
	}
	t := ds[strictest].untilReset()
	if t == fetch.Never {
		return out
	}
	seconds := strconv.FormatInt(int64((t+time.Second-1)/time.Second), 10)
	out = append(out, &core.HeaderValue{Key: names.Reset, Value: seconds})
	if over(strictest) {
		out = append(out, &core.HeaderValue{Key: "Retry-After", Value: seconds})
	}
	return out
}
