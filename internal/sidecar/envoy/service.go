// Package envoy is a rate limit service for Envoy. It reads files in the format of Envoy's reference service, which may
// name buckets as well as windows. It doesn't listen: see package sidecar.
package envoy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/internal/sidecar/metrics"
	"github.com/tokenrefill/refiller/policy"
)

const maxDescriptors = 64 // in a request

// Server is Envoy's rate limit service.
type Server struct {
	rls.UnimplementedRateLimitServiceServer // for methods that a later version of the interface adds
	limits                                  atomic.Pointer[Limits]
	buckets                                 taker
	metrics                                 *metrics.Metrics
	log                                     hclog.Logger
}

// NewServer makes a Server that enforces limits. client takes the tokens of buckets. If m is nil, nothing is counted.
func NewServer(limits *Limits, client *fetch.Client, m *metrics.Metrics, log hclog.Logger) *Server {
	s := &Server{buckets: client, metrics: m, log: log}
	s.limits.Store(limits)
	return s
}

// Use puts other limits in force. A request under way keeps the limits with which it began.
func (s *Server) Use(limits *Limits) { s.limits.Store(limits) }

// decision is the decision about one descriptor of a request. It has the limit that applies, the request to the limit,
// and the limit's reply.
type decision struct {
	limit  *rateLimit // nil if no limit applies
	label  string     // of the limit, in metrics
	detail bool       // the label has values of the request
	taker  taker
	key    string
	flow   string // of the bucket; empty if the limit names no flow
	n      int64
	back   bool // return n hits instead of taking them
	shadow bool // a denial is not enforced
	result fetch.Result
	asked  bool // the limit was called; result and err are its reply
	err    error
}

// limited reports whether the descriptor has a limit that must be called.
func (d *decision) limited() bool { return d.limit != nil && !d.limit.unlimited }

// over reports whether the descriptor is denied and not in shadow mode.
func (d *decision) over() bool { return d.limited() && !d.result.OK && !d.shadow }

// ShouldRateLimit implements rls.RateLimitServiceServer. It is Decide with errors of gRPC.
func (s *Server) ShouldRateLimit(ctx context.Context, req *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	res, err := s.Decide(ctx, req)
	return res, call.GRPCError(err)
}

// Decide takes tokens for all descriptors of a request. If the request is over limit, it returns the tokens. It doesn't
// return tokens of descriptors in shadow mode. It returns those of descriptors with up_to only if a descriptor without
// up_to denies.
func (s *Server) Decide(ctx context.Context, req *rls.RateLimitRequest) (*rls.RateLimitResponse, error) {
	limits := s.limits.Load()
	ds, err := limits.newDecisions(req)
	if err != nil {
		return nil, err
	}
	over, err := s.askAll(ctx, ds, limits.Quota)
	s.count(ds)
	if err != nil {
		return nil, err
	}
	return limits.response(req, ds, over), nil
}

// count counts the calls of limits in the metrics. It leaves out returns of hits that succeeded.
func (s *Server) count(ds []decision) {
	for i := range ds {
		d := &ds[i]
		if !d.asked || d.back && d.err == nil {
			continue
		}
		label := d.label
		if d.detail {
			label = s.metrics.Detail(label)
		}
		r := d.result
		r.Shadow = r.Shadow || !r.OK && d.shadow
		s.metrics.Decided(metrics.Envoy, label, r, d.err)
	}
}

// newDecisions checks a request and makes a decision for each of its descriptors, with the limit that applies to it.
func (r *Limits) newDecisions(req *rls.RateLimitRequest) ([]decision, error) {
	bad := func(format string, args ...any) ([]decision, error) {
		return nil, fmt.Errorf("%w: %s", call.ErrBadRequest, fmt.Sprintf(format, args...))
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
		if err := r.find(d, req.GetDomain(), descriptor, entries); err != nil {
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

// Key names the content of a request: its domain and descriptors.
func Key(req *rls.RateLimitRequest) string {
	var b strings.Builder
	b.WriteString(req.GetDomain())
	for _, d := range req.GetDescriptors() {
		b.WriteByte('|')
		for _, e := range d.GetEntries() {
			b.WriteString(e.GetKey())
			b.WriteByte('=')
			b.WriteString(e.GetValue())
			b.WriteByte(',')
		}
	}
	return b.String()
}

func entriesOf(d *descriptorpb.RateLimitDescriptor) ([]entry, error) {
	n := len(d.GetEntries())
	if n < 1 {
		return nil, errors.New("entries: the list is empty")
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

// find sets the limit of a descriptor. A limit in the request itself has precedence over a limit in the file. A
// descriptor has no limit if the file lacks its domain, or if neither the request nor the file has a limit for it.
func (r *Limits) find(d *decision, inDomain string, descriptor *descriptorpb.RateLimitDescriptor,
	entries []entry) error {
	root := r.domains[inDomain]
	if root == nil {
		return nil
	}
	if o := descriptor.GetLimit(); o != nil {
		u, ok := units[strings.ToLower(o.GetUnit().String())]
		if !ok {
			return fmt.Errorf("limit.unit: %s is not a supported unit", o.GetUnit())
		}
		per := quota{u, o.GetRequestsPerUnit()}
		w, err := r.windows.taker(per)
		if err != nil {
			return err
		}
		d.limit = &rateLimit{window: w, per: per}
		d.label = labelOf(inDomain, entries)
		d.detail = true
	} else {
		var named []entry
		d.limit, named = root.match(entries)
		if !d.limited() {
			return nil
		}
		d.label, d.detail = d.limit.label(inDomain, named)
		d.flow = d.limit.flow.flow(inDomain, entries) // not from named: values that share a limit are separate flows
		entries = named
	}
	d.shadow = r.Shadow || d.limit.shadow
	d.taker = d.limit.window
	if d.taker != nil {
		d.key = windowKey(r.windows.prefix, inDomain, entries)
		return nil
	}
	d.key = d.limit.bucket.name(inDomain, entries)
	return nil
}

// askAll takes tokens for all descriptors concurrently, and reports whether the request is over limit. It is if one of
// its limits denies, or if all of its quotas do. Then askAll returns the tokens. A descriptor with up_to is charged
// even if it gets too few tokens. Its tokens are returned only if a descriptor without up_to denies.
//
// Descriptors that return hits first only read the state of their limit. They return the hits when all other calls have
// succeeded, so a request with an error returns none. If the request is over limit, most of them return nothing. Two
// kinds still return hits, because tokens that they had taken would stay taken. These are descriptors in shadow mode,
// and those with up_to unless a descriptor without up_to denies.
func (s *Server) askAll(ctx context.Context, ds []decision, allQuotas bool) (over bool, err error) {
	for i := range ds {
		if d := &ds[i]; d.limited() && d.taker == nil {
			d.taker = s.buckets
		}
	}
	err = atOnce(ds, (*decision).limited, func(d *decision) error {
		if d.back {
			return d.answer(d.peek(ctx))
		}
		return d.answer(d.take(ctx))
	})
	if err != nil {
		s.giveBack(ctx, ds, true)
		return false, err
	}
	over, refused := s.verdict(ds, allQuotas)
	returns := func(d *decision) bool { return d.limited() && d.back && d.returnsHits(over, refused) }
	err = atOnce(ds, returns, func(d *decision) error { return d.answer(d.giveHits(ctx)) })
	if err != nil {
		s.giveBack(ctx, ds, true)
		return false, err
	}
	if over {
		s.giveBack(ctx, ds, refused)
	}
	return over, nil
}

// returnsHits reports whether a descriptor that returns hits does so, in spite of the verdict on the request. over and
// refused are that verdict.
func (d *decision) returnsHits(over, refused bool) bool {
	return d.shadow || !refused && (!over || d.limit.upTo)
}

// verdict reports whether the request is over limit, and whether a descriptor without up_to has refused it. With
// allQuotas every limit is a quota. A descriptor without a limit then counts as a quota that is not exceeded, as in the
// reference service.
func (s *Server) verdict(ds []decision, allQuotas bool) (over, refused bool) {
	quotas, exceeded := 0, 0
	for i := range ds {
		d := &ds[i]
		if allQuotas && d.limit == nil {
			quotas++
		}
		if !d.limited() {
			continue
		}
		isQuota := (allQuotas || d.limit.quota) && !d.shadow
		if isQuota {
			quotas++
		}
		switch {
		case d.back || d.result.OK:
		case isQuota:
			exceeded++
		case !d.over():
			s.log.Debug("over limit, not enforced", "bucket", d.key)
		case d.limit.upTo:
			over = true
		default:
			over, refused = true, true
		}
	}
	return over || quotas > 0 && quotas == exceeded, refused
}

// atOnce runs do concurrently for each decision that wanted selects. It returns the first error in the order of the
// decisions.
func atOnce(ds []decision, wanted func(*decision) bool, do func(*decision) error) error {
	errs := make([]error, len(ds))
	var running sync.WaitGroup
	last := -1 // the last selected decision runs in this goroutine
	for i := range ds {
		if !wanted(&ds[i]) {
			continue
		}
		if previous := last; previous >= 0 {
			running.Go(func() { errs[previous] = do(&ds[previous]) })
		}
		last = i
	}
	if last >= 0 {
		errs[last] = do(&ds[last])
	}
	running.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// answer records that the limit was called. It records and returns the call's error.
func (d *decision) answer(err error) error {
	d.asked = true
	d.err = err
	return err
}

// giveHits returns n hits to the limit, and reads its state.
func (d *decision) giveHits(ctx context.Context) error {
	if d.n > 0 {
		if err := d.taker.Return(ctx, d.key, d.n); err != nil {
			return err
		}
	}
	return d.peek(ctx)
}

// peek reads the state of the limit. Its decision is never a denial.
func (d *decision) peek(ctx context.Context) (err error) {
	d.result, err = d.taker.Peek(ctx, d.key)
	d.result.OK = true
	return err
}

// take takes n tokens. If the bucket can never hold n tokens, the result is a denial instead of an error. If n is 0,
// take takes nothing. The result is then a denial if a take of one token would be denied.
func (d *decision) take(ctx context.Context) (err error) {
	var opts []fetch.CallOption
	if d.limit.window == nil {
		opts = append(opts, call.LeaveOption(d.limit.leave))
	}
	if d.flow != "" {
		opts = append(opts, fetch.WithFlow(d.flow))
	}
	switch {
	case d.n == 0:
		d.result, err = d.taker.Peek(ctx, d.key)
		d.result.OK = d.result.Remaining > d.limit.leave.Of(d.result.Limit)
		if d.limit.window == nil && (errors.Is(err, fetch.ErrUnavailable) || err == nil && !d.result.OK) {
			err = d.try(ctx, opts)
		}
	case d.limit.upTo:
		d.result, err = d.taker.TakeUpTo(ctx, d.key, d.n, opts...)
		d.result.OK = d.result.OK && (d.result.Taken >= d.n || d.result.Shadow)
	default:
		d.result, err = d.taker.Take(ctx, d.key, d.n, opts...)
		if errors.Is(err, fetch.ErrExceedsCapacity) {
			err = d.denyTooLarge(ctx, opts)
		}
	}
	return err
}

// denyTooLarge denies a request for more tokens than the limit can ever hold. It reads the state of the limit for the
// response. If Redis is unavailable, a bucket's degraded mode knows the capacity. The request is denied even if the
// state can't be read. With an error, Envoy would let it pass.
func (d *decision) denyTooLarge(ctx context.Context, opts []fetch.CallOption) (err error) {
	d.result, err = d.taker.Peek(ctx, d.key)
	if errors.Is(err, fetch.ErrUnavailable) {
		err = nil
		if d.limit.window == nil {
			_ = d.try(ctx, opts)
		}
	}
	d.result.OK = false
	d.result.RetryAfter = fetch.Never
	return err
}

// try takes one token from a bucket and gives it back. Unlike a Peek, a take knows the bucket's shadow mode and its
// degraded mode. Neither mode grants tokens that could go back.
func (d *decision) try(ctx context.Context, opts []fetch.CallOption) error {
	r, err := d.taker.Take(ctx, d.key, 1, opts...)
	if errors.Is(err, fetch.ErrExceedsCapacity) { // the bucket never has more than the tokens that must be left
		return nil
	}
	if err != nil {
		return err
	}
	err = d.taker.Undo(context.WithoutCancel(ctx), d.key, r) // the token is returned even if this caller has left
	r.Taken = 0
	d.result = r
	return err
}

// giveBack returns the tokens that were taken, except in shadow mode. Tokens of descriptors with up_to are returned
// only if all is set. Tokens that can't be returned are lost. The response then has the remaining tokens without them,
// but the same verdict.
func (s *Server) giveBack(ctx context.Context, ds []decision, all bool) {
	ctx = context.WithoutCancel(ctx) // the tokens are returned even if this caller has left
	taken := func(d *decision) bool { return d.result.Taken > 0 && !d.shadow && (all || !d.limit.upTo) }
	_ = atOnce(ds, taken, func(d *decision) error {
		if err := d.taker.Undo(ctx, d.key, d.result); err != nil {
			s.log.Warn("tokens of a refused request are lost", "bucket", d.key, "tokens", d.result.Taken, "error", err)
			return nil
		}
		d.result.Remaining += d.result.Taken
		d.result.Taken = 0
		return nil
	})
}
