package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// MaxAll is the largest number of requests in one TakeAll.
const MaxAll = lua.MaxAll

// Request asks for N tokens of the bucket Key.
type Request struct {
	Key string
	N   int64
	// Flow is the flow for which the tokens are taken, as in WithFlow. If it is empty, the WithFlow option of the call
	// applies.
	Flow string
}

// AllResult is the result of a TakeAll.
type AllResult struct {
	// OK reports whether all requests were granted; otherwise nothing was taken.
	OK bool
	// Denied is the key of the first request, in the order of the requests, that was denied; empty if OK.
	Denied string
	// RetryAfter is the longest RetryAfter of the requests that were denied; 0 if OK.
	RetryAfter time.Duration
	// Results has one result for each request, in their order. If not all were granted, Taken is 0 and OK reports whether
	// the bucket would have granted the request. All requests of one bucket have the same result.
	Results []Result

	keys []string // of the requests that were granted
}

// TakeAll takes tokens from 1 to MaxAll buckets, all or nothing: if one of them denies, no bucket is charged. Several
// requests of one bucket count as one request for their sum, and must name the same flow. Each bucket must have a
// policy. TakeAll accepts the options of Take.
//
// All buckets of one server share one script call. On a Cluster the buckets of one slot share a call, so there is
// usually one call for each bucket. A bucket of a lazy template always has a call of its own. All calls are made at the
// same time. If one of the calls is denied, the tokens that the other calls took are returned. Other callers can't take
// these tokens in between, so two such takes at the same moment may both be denied. If the process ends or is cut off
// before the return, these tokens are lost. No failure adds tokens to a bucket: if a bucket has begun a new era in
// between, nothing is returned to it.
//
// If the server of a bucket is unavailable, the bucket's degraded mode decides. After ErrUnavailable or the context's
// own error, tokens may be lost: the Client returns only tokens that it knows to have been taken.
//
// Buckets in shadow mode never deny. If such a bucket has too few tokens, none of its tokens are taken.
func (c *Client) TakeAll(ctx context.Context, reqs []Request, opts ...CallOption) (AllResult, error) {
	cfg, invalid := c.with(OpTakeAll, opts)
	call := Call{Op: OpTakeAll, Requests: reqs}
	for i, r := range reqs {
		if i == 0 {
			call.Key = r.Key
		}
		call.Tokens += r.N
	}
	var all AllResult
	o := c.observe(ctx, call, func(ctx context.Context, o *Outcome) {
		if invalid != nil {
			o.Err = invalid
			return
		}
		if !c.life.enter() {
			o.Err = ErrClosed
			return
		}
		defer c.life.leave()
		all, o.Err = c.takeAll(budgetOf(ctx, cfg), reqs)
		o.Result.OK = all.OK
		o.Result.RetryAfter = all.RetryAfter
		o.Results = all.Results
		for _, one := range all.Results {
			o.Result.Taken += one.Taken
			o.Result.Shadow = o.Result.Shadow || one.Shadow
			if one.Source.Kind > o.Result.Source.Kind {
				o.Result.Source = one.Source
			}
		}
	})
	return all, o.Err
}

func (c *Client) takeAll(p budget, reqs []Request) (AllResult, error) {
	demands, of, err := c.sum(p, reqs)
	if err != nil {
		return AllResult{}, err
	}
	parts, err := c.split(p, demands)
	if err != nil {
		return AllResult{}, err
	}
	var wg sync.WaitGroup
	for _, part := range parts[1:] {
		wg.Go(part.take)
	}
	parts[0].take()
	wg.Wait()

	ok := true
	for _, part := range parts {
		ok = ok && part.ok
		if part.err != nil && (err == nil || errors.Is(err, ErrUnavailable)) { // other errors have precedence
			err = part.err
		}
	}
	if !ok {
		c.refund(p, demands)
	}
	if errors.Is(err, ErrUnknownBucket) {
		found, readErr := c.unknown(demands)
		if found {
			return c.takeAll(p, reqs)
		} else if readErr != nil {
			err = failure(p.ctx, readErr)
		}
	}
	if err != nil {
		return AllResult{}, err
	}
	return c.toAllResult(reqs, demands, of, ok)
}

// demand is the sum of all requests of a TakeAll for one bucket, and the answer of the bucket.
type demand struct {
	lua.Demand
	*task
	forFlow string // the flow's name; empty for none
	answer  answer
}

// unknown reports whether one of the unknown buckets belongs to a template by now. It reads the templates again, unless
// they were read just now. It returns an error if the templates can't be read.
func (c *Client) unknown(demands []*demand) (found bool, err error) {
	for _, d := range demands {
		k, err := c.templates.unknown(d.task)
		if k != nil || err != nil {
			return k != nil, err
		}
	}
	return false, nil
}

// toAllResult makes the results of the requests from the answers to the demands. of[i] is the demand of request i.
func (c *Client) toAllResult(reqs []Request, demands, of []*demand, ok bool) (AllResult, error) {
	results := make(map[*demand]Result, len(demands))
	for _, d := range demands {
		if !ok && !d.answer.reply.OK {
			if err := d.answer.info.exceeded(d.Key, d.N, d.Leave); err != nil {
				return AllResult{}, err
			}
		}
		results[d] = d.result(&d.answer)
	}
	paid := make(map[*demand]int64)
	shadowed := int64(0) // 1 if a bucket in shadow mode admits the call
	all := AllResult{OK: ok, Results: make([]Result, len(reqs))}
	for i, r := range reqs {
		if ok {
			all.keys = append(all.keys, r.Key)
		}
		one := &all.Results[i]
		*one = results[of[i]]
		switch {
		case ok && one.OK:
			one.Taken = r.N
			one.paid = of[i].partOf(paid, r.N)
			one.loan = of[i].answer.loan.part(r.N)
		case ok: // the bucket is in shadow mode, or was when the request was charged
			*one = one.admit(r.N)
			shadowed = 1
		default:
			one.Taken = 0
			if one.OK || of[i].answer.info.shadowed() {
				continue
			}
			all.RetryAfter = max(all.RetryAfter, one.RetryAfter)
			if all.Denied == "" {
				all.Denied = r.Key
			}
		}
	}
	c.stats.shadowed.Add(shadowed)
	return all, nil
}

// partOf returns the part of the flow's payment for a demand that belongs to a request for n tokens. It returns nil if
// earlier requests have used up the payment. paid has, for each demand, the sum of the parts of earlier requests;
// partOf updates it.
func (d *demand) partOf(paid map[*demand]int64, n int64) *payment {
	all := d.answer.payment(d.flow)
	if all == nil || all.tokens <= paid[d] {
		return nil
	}
	part := min(n, all.tokens-paid[d])
	paid[d] += part
	return &payment{d.flow, part}
}

// sum combines all requests for the same bucket into one demand. of[i] is the demand of request i.
func (c *Client) sum(p budget, reqs []Request) (demands, of []*demand, err error) {
	if len(reqs) < 1 || len(reqs) > MaxAll {
		return nil, nil, fmt.Errorf("%w: %d requests; want 1 to %d", ErrInvalidAmount, len(reqs), MaxAll)
	}
	at := make(map[string]*demand, len(reqs))
	for _, r := range reqs {
		if err := c.check(p.ctx, r.Key, r.N); err != nil {
			return nil, nil, err
		}
		d := at[r.Key]
		if d == nil {
			d = &demand{Demand: lua.Demand{Key: r.Key}, forFlow: flowOf(p.cfg, r)}
			at[r.Key], demands = d, append(demands, d)
		}
		if err := d.checkFlow(flowOf(p.cfg, r)); err != nil {
			return nil, nil, err
		}
		if r.N > policy.MaxTokens-d.N {
			return nil, nil, fmt.Errorf("%w: the requests of bucket %q are of more than %d tokens",
				ErrInvalidAmount, r.Key, int64(policy.MaxTokens))
		}
		d.N += r.N
		of = append(of, d)
	}
	return demands, of, nil
}

// flowOf returns the flow that a request is for; empty for none.
func flowOf(cfg *callConfig, r Request) string { return cmp.Or(r.Flow, cfg.flow) }

// checkFlow checks the flow of a further request for the demand's bucket.
func (d *demand) checkFlow(flow string) error {
	if err := policy.CheckFlow(flow); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalidOption, err)
	}
	if flow != d.forFlow {
		return fmt.Errorf("%w: requests of bucket %q for the flows %q and %q; want one", ErrInvalidOption, d.Key,
			d.forFlow, flow)
	}
	return nil
}

// part has the demands of a TakeAll that share one script call. The task of the first demand makes the call. All parts
// make their calls concurrently. At a round trip of 20 ms, four calls then need 24 ms. One after the other they would
// need 92 ms.
type part struct {
	demands []*demand
	ok      bool // granted; a bucket in shadow mode may have had too few tokens
	err     error
}

// split groups demands by the call that they can share. A bucket of a lazy template shares its call with no other
// bucket, and has no request ids.
func (c *Client) split(p budget, demands []*demand) (parts []*part, err error) {
	type place struct {
		node *node
		call int
	}
	at := make(map[place]*part, len(demands))
	for _, d := range demands {
		d.task = c.begin(p, d.Key)
		d.flow = d.forFlow
		d.began, d.Leave = time.Time{}, d.leave(d.N) // the time must be read again, since other calls come first
		here := place{d.node, c.nodes.callGroup(d.Key)}
		_, isLazy := d.kind.(*lazy)
		if isLazy && p.cfg.request != "" {
			return nil, d.kind.open(d.task, 0)
		}
		sole := at[here]
		if sole == nil || isLazy {
			sole = &part{}
			parts = append(parts, sole)
			if !isLazy {
				at[here] = sole
			}
		}
		sole.demands = append(sole.demands, d)
	}
	if p.cfg.request != "" && len(parts) > 1 {
		return nil, fmt.Errorf("%w: a request id of buckets that no single call can take from", ErrInvalidOption)
	}
	return parts, nil
}

// take makes the call of a part, and remembers its replies. If the server doesn't answer, the degraded modes decide.
func (p *part) take() {
	t := *p.demands[0].task
	t.kind = nil // takeAll handles unknown buckets
	again, call := p.call()
	if err := t.attempt(again, call); err != nil {
		p.degrade(err)
		return
	}
	for _, d := range p.demands {
		_, _ = d.rescue(d.N, &d.answer.reply) // only for later takes: the answer stays
	}
}

// call returns the function that makes the call, and whether it is idempotent.
func (p *part) call() (again bool, call func() error) {
	first := p.demands[0]
	if _, isLazy := first.kind.(*lazy); isLazy {
		return false, p.askLazy
	}
	return first.cfg.request != "", p.ask
}

// askLazy makes the call for a lazy bucket once.
func (p *part) askLazy() error {
	first := p.demands[0]
	err := first.takes(&ask{run: policy.Run{N: first.N, Count: 1, Leave: first.Leave}, allKeys: true})
	if err == nil {
		first.answer = first.got
		p.ok = first.got.reply.OK || first.got.info.shadowed()
	}
	return err
}

// ask makes the call for other buckets once.
func (p *part) ask() error {
	first := p.demands[0]
	if err := p.open(); err != nil {
		return err
	}
	demands := p.named()
	by := &undoable{task: first.task, undo: p.undo(demands)}
	for _, d := range demands {
		by.cost += d.N // at most MaxAll·policy.MaxTokens, which fits
	}
	asked := time.Now()
	ok, replies, err := first.cfg.takeAll(first.ctx, by, demands)
	if err != nil {
		return err
	}
	p.ok = ok
	for i, d := range p.demands {
		d.c.reopen(d.kind, d.Key, &replies[i])
		d.answer = answer{reply: replies[i], info: d.applyReply(d.N, d.Leave, &replies[i], asked)}
	}
	return nil
}

// named returns the demands of the script call, with the flows for which they are made.
func (p *part) named() []lua.Demand {
	demands := make([]lua.Demand, len(p.demands))
	for i, d := range p.demands {
		demands[i] = d.Demand
		demands[i].Flow = d.namedFlow()
	}
	return demands
}

// takeAll makes the script call of a part.
func (cfg *callConfig) takeAll(ctx context.Context, by lua.Client, demands []lua.Demand) (ok bool,
	replies []lua.TakeReply, err error) {
	if cfg.request != "" {
		return lua.TakeAllOnce(ctx, by, cfg.request, cfg.memory, demands)
	}
	return lua.TakeAll(ctx, by, demands)
}

// open creates the buckets of refilled templates that don't exist, in one round trip.
func (p *part) open() error {
	errs := make([]error, len(p.demands))
	var wg sync.WaitGroup
	for i, d := range p.demands {
		if ofTemplate(d.kind) {
			wg.Go(func() { errs[i] = d.kind.open(d.task, 0) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// undo returns the function that returns the tokens of a part after its caller left. Takes with a request id stay
// charged. The function uses copies, because the caller's goroutine may use the tasks at the same time.
func (p *part) undo(demands []lua.Demand) func(context.Context, lua.Client, redis.Cmder) {
	c, cfg := p.demands[0].c, p.demands[0].cfg
	kinds := make([]kind, len(demands))
	for i, d := range p.demands {
		kinds[i] = d.kind
	}
	return func(ctx context.Context, by lua.Client, cmd redis.Cmder) {
		_, replies, err := cfg.takeAll(ctx, replayed{cmd}, demands)
		if err != nil {
			return
		}
		var backs sync.WaitGroup
		defer backs.Wait()
		for i, r := range replies {
			switch key := demands[i].Key; {
			case cfg.request != "":
				c.reopen(kinds[i], key, &r)
			case r.Taken > 0:
				back := backOf(&r, c.buckets.find(key).known.Load(), demands[i].Flow.Name)
				back.Era = r.Version.Era
				backs.Go(func() { c.giveBackBy(ctx, by, kinds[i], key, back) })
			}
		}
	}
}

// replayed is a lua.Client that answers each command with the reply to an earlier one.
type replayed struct{ earlier redis.Cmder }

// Process implements lua.Client.
func (r replayed) Process(_ context.Context, cmd redis.Cmder) error {
	cmd.(interface{ SetVal(any) }).SetVal(r.earlier.(interface{ Val() any }).Val())
	return nil
}

// degrade sets the answers of a part's demands as their degraded modes decide. It is called after the server failed
// with err.
func (p *part) degrade(err error) {
	p.ok = true
	for _, d := range p.demands {
		a := d.c.degraded(d.Key, policy.Run{N: d.N, Count: 1, Leave: d.Leave}, err)
		d.answer, p.ok = a, p.ok && a.err == nil && (a.reply.OK || a.info.shadowed())
		if a.err != nil {
			p.err = a.err
		}
	}
}

// refund returns the tokens of a TakeAll that was denied. It waits until they are returned, until the caller's deadline
// passes or until its context ends. The tokens are returned in any case.
func (c *Client) refund(p budget, demands []*demand) {
	var backs sync.WaitGroup
	for _, d := range demands {
		a := &d.answer
		tokens, degraded := a.reply.Taken, a.source.Kind == SourceFallback
		switch {
		case tokens == 0:
		case !degraded && p.cfg.request == "": // tokens that were taken with a request id stay charged
			back := backOf(&a.reply, a.info, d.flow)
			backs.Go(func() { c.giveBack(d.Key, back) })
		case degraded:
			c.giveToShare(d.Key, a.loan, tokens)
		}
		a.reply.Taken, a.reply.Remaining = 0, a.reply.Remaining+tokens
	}
	for _, d := range demands {
		if d.deadline.After(p.deadline) {
			p.deadline = d.deadline
		}
	}
	done := make(chan struct{})
	c.life.running.Go(func() {
		backs.Wait()
		close(done)
	})
	_ = p.wait(done, 1)
}
