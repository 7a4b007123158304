package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// MaxAll is the most buckets of one TakeAll.
const MaxAll = lua.MaxAll

// Request is N tokens of the bucket Key.
type Request struct {
	Key string
	N   int64
}

// AllResult is the answer to a TakeAll.
type AllResult struct {
	// OK reports whether all requests were granted; otherwise nothing was taken.
	OK bool
	// Denied is the key of the first bucket, in the order of the requests, that has
	// too few tokens; empty if OK.
	Denied string
	// RetryAfter is the longest of the results'; 0 if OK.
	RetryAfter time.Duration
	// Results are of each request, in their order. When not all were granted, OK of
	// a result tells whether its bucket would have granted it, and Taken is 0.
	// Several requests of one bucket are answered as one.
	Results []Result
}

// TakeAll takes tokens of 1 to MaxAll buckets, all or nothing: it charges nobody
// if one of them says no. Several requests of one bucket count as one of their
// sum. Each bucket must have a policy.
//
// Buckets on one server are taken from in one script call. On a Cluster that is
// one call per slot, so usually one per bucket, and on a Ring, and for the buckets
// of lazy templates, one per bucket: all at once, and what was taken goes back if one of them says no. Meanwhile others
// find it gone: two such takes at the same moment may both be denied. A process
// that ends, or is cut off, between the calls and the return loses the tokens
// taken so far; no token is ever made. What goes back goes to the era in which it
// was taken, and nowhere else.
//
// Buckets that can't be reached are asked as their degraded mode says. After
// ErrUnavailable or the context's own error, tokens may be lost: what was taken
// where the answer is known goes back.
//
// Buckets in shadow mode deny nothing: if all that said no are such buckets, the
// others are asked again without them.
func (c *Client) TakeAll(ctx context.Context, reqs ...Request) (AllResult, error) {
	call := Call{Op: OpTakeAll}
	for i, r := range reqs {
		if i == 0 {
			call.Key = r.Key
		}
		call.Tokens += r.N
	}
	var all AllResult
	_, err := c.observed(ctx, call, func(ctx context.Context) (r Result, err error) {
		all, err = c.takeEvery(ctx, reqs)
		r.OK, r.RetryAfter = all.OK, all.RetryAfter
		for _, one := range all.Results {
			r.Taken += one.Taken
			if one.Source.Kind > r.Source.Kind {
				r.Source = one.Source
			}
		}
		return r, err
	})
	return all, err
}

// takeEvery admits what only buckets in shadow mode deny.
func (c *Client) takeEvery(ctx context.Context, reqs []Request) (AllResult, error) {
	result, of, err := c.takeAll(ctx, reqs)
	if err != nil || result.OK {
		return result, err
	}
	var rest []Request
	for i, r := range reqs {
		if result.Results[i].OK {
			rest = append(rest, r)
		} else if !of[i].shadowed() {
			return result, nil
		}
	}
	others := AllResult{OK: true}
	if len(rest) > 0 {
		if others, err = c.takeEvery(ctx, rest); err != nil {
			return AllResult{}, err
		}
	}
	result.OK, result.Denied, result.RetryAfter = others.OK, others.Denied, others.RetryAfter
	asked := 0
	for i, r := range reqs {
		switch {
		case result.Results[i].OK:
			result.Results[i] = others.Results[asked]
			asked++
		case others.OK:
			result.Results[i] = c.shadow(result.Results[i], of[i], r.N)
		}
	}
	return result, nil
}

// takeAll asks once for all, and tells what is known of the bucket of each
// request.
func (c *Client) takeAll(ctx context.Context, reqs []Request) (AllResult, []*known, error) {
	demands, of, err := sum(reqs)
	if err != nil {
		return AllResult{}, nil, err
	}
	if err := ctx.Err(); err != nil {
		return AllResult{}, nil, fmt.Errorf("fetch: %w", err)
	}
	if err := c.workers.enter(); err != nil {
		return AllResult{}, nil, err
	}
	defer c.workers.leave()
	deadline := deadlineOf(ctx, c.config.deadline, time.Now())
	parts := c.split(ctx, demands)
	var wg sync.WaitGroup
	for _, p := range parts[1:] {
		wg.Go(func() { c.takePart(ctx, p) })
	}
	c.takePart(ctx, parts[0])
	wg.Wait()

	ok := true
	for _, p := range parts {
		ok = ok && p.ok
		if p.err != nil && (err == nil || errors.Is(err, ErrUnavailable)) { // what the caller did wrong counts first
			err = p.err
		}
	}
	if !ok {
		c.refund(ctx, deadline, parts)
	}
	if err != nil {
		return AllResult{}, nil, err
	}
	answers, knowns := make([]Result, len(demands)), make([]*known, len(demands))
	for _, p := range parts {
		for i, a := range p.answers {
			d := demands[p.of[i]]
			if err := a.known.exceeded(d.Key, d.N); err != nil && !a.reply.OK {
				return AllResult{}, nil, err
			}
			answers[p.of[i]], knowns[p.of[i]] = c.result(ctx, d.Key, a), a.known
		}
	}
	result, known := AllResult{OK: ok, Results: make([]Result, len(reqs))}, make([]*known, len(reqs))
	for i, r := range reqs {
		known[i] = knowns[of[i]]
		result.Results[i] = answers[of[i]]
		if ok {
			result.Results[i].Taken = r.N
			continue
		}
		result.Results[i].Taken = 0
		result.RetryAfter = max(result.RetryAfter, answers[of[i]].RetryAfter)
		if result.Denied == "" && !answers[of[i]].OK {
			result.Denied = r.Key
		}
	}
	return result, known, nil
}

// sum makes one demand of all requests of a bucket, and tells for each request
// which one.
func sum(reqs []Request) (demands []lua.Demand, of []int, err error) {
	if len(reqs) < 1 || len(reqs) > MaxAll {
		return nil, nil, fmt.Errorf("%w: %d requests; want 1 to %d", ErrInvalidAmount, len(reqs), MaxAll)
	}
	at := make(map[string]int, len(reqs))
	for _, r := range reqs {
		if err := check(r.Key, r.N); err != nil {
			return nil, nil, err
		}
		i, seen := at[r.Key]
		if !seen {
			i = len(demands)
			at[r.Key] = i
			demands = append(demands, lua.Demand{Key: r.Key})
		}
		if r.N > policy.MaxTokens-demands[i].N {
			return nil, nil, fmt.Errorf("%w: the requests of bucket %q are of more than %d tokens", ErrInvalidAmount, r.Key, int64(policy.MaxTokens))
		}
		demands[i].N += r.N
		of = append(of, i)
	}
	return demands, of, nil
}

// part is what one script call of a TakeAll asks for, and its answers.
type part struct {
	lazy    bool // one bucket of a lazy template
	demands []lua.Demand
	of      []int // their places in the TakeAll
	ok      bool
	answers []answer
	err     error
}

// split groups demands by the call that they can share.
func (c *Client) split(ctx context.Context, demands []lua.Demand) []*part {
	var slot func(i int) int
	switch c.rdb.(type) {
	case *redis.Client:
		slot = func(int) int { return 0 }
	case *redis.ClusterClient:
		slot = func(i int) int { return lua.Slot(demands[i].Key) }
	default: // a Ring; which keys share a server is its own affair
		slot = func(i int) int { return i }
	}
	var parts []*part
	at := make(map[int]*part, len(demands))
	for i, d := range demands {
		if c.isLazy(ctx, d.Key) {
			parts = append(parts, &part{lazy: true, demands: []lua.Demand{d}, of: []int{i}})
			continue
		}
		p := at[slot(i)]
		if p == nil {
			p = &part{}
			at[slot(i)] = p
			parts = append(parts, p)
		}
		p.demands, p.of = append(p.demands, d), append(p.of, i)
	}
	return parts
}

// takePart makes the call of a part.
func (c *Client) takePart(ctx context.Context, p *part) {
	type reply struct {
		ok      bool
		buckets []lua.TakeReply
	}
	key := p.demands[0].Key
	if why := c.breakers.of(key).open(); why != ReasonNone {
		c.degradedPart(p, shut(why))
		return
	}
	began := time.Now()
	r, err := do(ctx, c, c.config.deadline, func(ctx context.Context) (r reply, err error) {
		if p.lazy {
			one, err := c.sendTake(ctx, key, p.demands[0].N, true)
			c.unknownOutcome(p.demands[0].N, err)
			return reply{one.OK, []lua.TakeReply{one}}, err
		}
		for _, d := range p.demands {
			if err := c.open(ctx, d.Key, 0); err != nil {
				return r, err
			}
		}
		r.ok, r.buckets, err = lua.TakeAll(ctx, c.store, p.demands)
		total := int64(0)
		for _, d := range p.demands {
			total += d.N // at most MaxAll·policy.MaxTokens, which fits
		}
		c.unknownOutcome(total, err)
		return r, err
	}, func(ctx context.Context, r reply) {
		for i, b := range r.buckets {
			c.giveBackTo(ctx, p.demands[i].Key, b.Taken, b.Version.Era)
		}
	})
	c.note(key, began, err)
	if err != nil {
		c.degradedPart(p, err)
		return
	}
	p.ok = r.ok
	p.answers = make([]answer, len(p.demands))
	for i, b := range r.buckets {
		d := p.demands[i]
		k, _ := c.terms.get(d.Key, time.Now())
		p.answers[i] = answer{reply: b, known: c.learn(d.Key, k, d.N, b)}
		c.saw(p.answers[i])
		_, _ = c.rescue(ctx, d.Key, d.N, c.config.deadline, b) // for the next take of all
	}
}

// degradedPart answers a part that its server did not answer.
func (c *Client) degradedPart(p *part, err error) {
	p.ok = true
	p.answers = make([]answer, len(p.demands))
	for i, d := range p.demands {
		a, ok := c.degraded(d.Key, d.N, err)
		if !ok {
			p.ok, p.err = false, err
		}
		p.answers[i], p.ok = a, p.ok && a.reply.OK
	}
	if !p.ok {
		for i := range p.answers {
			p.answers[i].giveBackShare()
		}
	}
}

// giveBackShare returns the tokens of an answer by degraded mode local to the share.
func (a *answer) giveBackShare() {
	if a.reply.Taken > 0 && a.known.stand != nil {
		a.known.stand.giveBack(a.reply.Taken)
	}
	a.reply.Remaining += a.reply.Taken
	a.reply.Taken = 0
}

// refund gives back what the parts have taken. Workers do it, whether or not the
// caller still waits. The caller is inside.
func (c *Client) refund(ctx context.Context, deadline time.Time, parts []*part) {
	returned := make(chan struct{}, MaxAll)
	under := 0
	for _, p := range parts {
		for i := range p.answers {
			if p.answers[i].source.Kind == SourceFallback {
				p.answers[i].giveBackShare()
				continue
			}
			reply := &p.answers[i].reply
			key, tokens, era := p.demands[i].Key, reply.Taken, reply.Version.Era
			if tokens == 0 {
				continue
			}
			reply.Taken, reply.Remaining = 0, reply.Remaining+tokens
			if !c.workers.offer(func() {
				c.giveBackTo(ctx, key, tokens, era)
				returned <- struct{}{}
			}) {
				c.stats.lost.Add(tokens)
				continue
			}
			under++
		}
	}
	left := Never
	if !deadline.IsZero() {
		left = time.Until(deadline)
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	for range under {
		select {
		case <-returned:
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		}
	}
}
