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
	// Denied is the key of the first bucket, in the order of the requests, that denies them; empty if OK.
	Denied string
	// RetryAfter is the longest of the buckets that deny them; 0 if OK.
	RetryAfter time.Duration
	// Results are of each request, in their order. When not all were granted, OK of a result tells whether its bucket
	// would have granted it, and Taken is 0. Several requests of one bucket are answered as one.
	Results []Result
}

// TakeAll takes tokens of 1 to MaxAll buckets, all or nothing: it charges nobody if one of them says no. Several
// requests of one bucket count as one of their sum. Each bucket must have a policy. The options are Take's.
//
// Buckets on one server are taken from in one script call. On a Cluster that is one call per slot, so usually one per
// bucket, and for the buckets of lazy templates one per bucket: all at once, and what was taken goes back if one of
// them says no. Meanwhile others find it gone: two such takes at the same moment may both be denied. A process that
// ends, or is cut off, between the calls and the return loses the tokens taken so far; no token is ever made. What goes
// back goes to the era in which it was taken, and nowhere else.
//
// Buckets that can't be reached are asked as their degraded mode says. After ErrUnavailable or the context's own error,
// tokens may be lost: what was taken where the answer is known goes back.
//
// Buckets in shadow mode deny nothing: one that has too few tokens is left out.
func (c *Client) TakeAll(ctx context.Context, reqs []Request, opts ...CallOption) (AllResult, error) {
	cfg, err := c.with(OpTakeAll, opts)
	if err != nil {
		return AllResult{}, err
	}
	call := Call{Op: OpTakeAll, Requests: reqs}
	for i, r := range reqs {
		if i == 0 {
			call.Key = r.Key
		}
		call.Tokens += r.N
	}
	var all AllResult
	o := c.observe(ctx, call, func(ctx context.Context, o *Outcome) {
		if !c.life.enter() {
			o.Err = ErrClosed
			return
		}
		defer c.life.leave()
		all, o.Err = c.takeAll(from(ctx, cfg), reqs)
		o.Result.OK, o.Result.RetryAfter, o.Results = all.OK, all.RetryAfter, all.Results
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
		if part.err != nil && (err == nil || errors.Is(err, ErrUnavailable)) { // what the caller did wrong counts first
			err = part.err
		}
	}
	if !ok {
		c.refund(p, parts)
	}
	if errors.Is(err, ErrUnknownBucket) {
		found, lookErr := c.unknown(parts)
		if found {
			return c.takeAll(p, reqs)
		} else if lookErr != nil {
			err = failure(p.ctx, lookErr)
		}
	}
	if err != nil {
		return AllResult{}, err
	}
	return c.conclude(reqs, of, parts, ok)
}

// unknown reports whether one of the buckets turns out to be a new template's; an error if that can't be said.
func (c *Client) unknown(parts []*part) (found bool, err error) {
	for _, part := range parts {
		for _, t := range part.tasks {
			if found, err = c.templates.unknown(t); found || err != nil {
				return found, err
			}
		}
	}
	return false, nil
}

// conclude answers requests by what became of their demands, of which of tells the places.
func (c *Client) conclude(reqs []Request, of []int, parts []*part, ok bool) (AllResult, error) {
	results, infos := make([]Result, len(reqs)), make([]*info, len(reqs))
	for _, part := range parts {
		for i, a := range part.answers {
			d, t := part.demands[i], part.tasks[i]
			if !ok && !a.reply.OK {
				if err := a.info.exceeded(d.Key, d.N, d.Leave); err != nil {
					return AllResult{}, err
				}
			}
			results[part.of[i]], infos[part.of[i]] = t.result(&a), a.info
		}
	}
	all := AllResult{OK: ok, Results: make([]Result, len(reqs))}
	for i, r := range reqs {
		one := &all.Results[i]
		*one = results[of[i]]
		switch {
		case ok && one.OK:
			one.Taken = r.N
		case ok: // in shadow mode, or was when the request was charged
			*one = c.admit(*one, r.N)
		default:
			one.Taken = 0
			if one.OK || infos[of[i]].shadowed() {
				continue
			}
			all.RetryAfter = max(all.RetryAfter, one.RetryAfter)
			if all.Denied == "" {
				all.Denied = r.Key
			}
		}
	}
	return all, nil
}

// sum makes one demand of all requests of a bucket, and tells for each request which one.
func (c *Client) sum(p budget, reqs []Request) (demands []lua.Demand, of []int, err error) {
	if len(reqs) < 1 || len(reqs) > MaxAll {
		return nil, nil, fmt.Errorf("%w: %d requests; want 1 to %d", ErrInvalidAmount, len(reqs), MaxAll)
	}
	at := make(map[string]int, len(reqs))
	for _, r := range reqs {
		if err := c.check(p.ctx, r.Key, r.N); err != nil {
			return nil, nil, err
		}
		i, seen := at[r.Key]
		if !seen {
			i = len(demands)
			at[r.Key] = i
			demands = append(demands, lua.Demand{Key: r.Key})
		}
		if r.N > policy.MaxTokens-demands[i].N {
			return nil, nil, fmt.Errorf("%w: the requests of bucket %q are of more than %d tokens",
				ErrInvalidAmount, r.Key, int64(policy.MaxTokens))
		}
		demands[i].N += r.N
		of = append(of, i)
	}
	return demands, of, nil
}

// part is what one script call of a TakeAll asks for, and its answers.
type part struct {
	lazy    bool    // one bucket of a lazy template
	tasks   []*task // of each bucket; the first one makes the call
	demands []lua.Demand
	of      []int // their places in the TakeAll
	ok      bool  // taken, if not from buckets in shadow mode that have too few tokens
	answers []answer
	err     error
}

// split groups demands by the call that they can share.
func (c *Client) split(p budget, demands []lua.Demand) (parts []*part, err error) {
	type place struct {
		server *server
		call   int
	}
	at := make(map[place]*part, len(demands))
	for i, d := range demands {
		t := c.begin(p, d.Key)
		t.began, d.Leave = time.Time{}, t.leave(d.N) // others use their time before it does
		here := place{t.server, c.servers.call(d.Key)}
		_, isLazy := t.kind.(*lazy)
		sole := at[here]
		if sole == nil || isLazy {
			sole = &part{lazy: isLazy}
			parts = append(parts, sole)
			if !isLazy {
				at[here] = sole
			}
		}
		sole.tasks, sole.demands, sole.of = append(sole.tasks, t), append(sole.demands, d), append(sole.of, i)
	}
	if p.cfg.request != "" && len(parts) > 1 {
		return nil, fmt.Errorf("%w: a request id of buckets that no single call can take from", ErrInvalidOption)
	}
	return parts, nil
}

// take makes the call of a part.
func (p *part) take() {
	t, err := *p.tasks[0], error(nil)
	t.kind = nil // of buckets that are unknown takeAll takes care
	if p.answers, err = attempt(&t, t.cfg.request != "", p.ask); err != nil {
		p.degrade(err)
		return
	}
	for i := range p.answers {
		a := &p.answers[i]
		t.c.tellShare(a)
		_, _ = p.tasks[i].rescue(p.demands[i].N, &a.reply) // for the next take of all
	}
}

// ask puts a part to its server.
func (p *part) ask() ([]answer, error) {
	t := p.tasks[0]
	if p.lazy {
		a, err := t.takes(&ask{run: policy.Run{N: p.demands[0].N, Count: 1, Leave: p.demands[0].Leave}, whole: true})
		if err != nil {
			return nil, err
		}
		p.ok = a.reply.OK || a.info.shadowed()
		return []answer{*a}, nil
	}
	if err := p.open(); err != nil {
		return nil, err
	}
	t.undo = p.undo
	for _, d := range p.demands {
		t.cost += d.N // at most MaxAll·policy.MaxTokens, which fits
	}
	ok, replies, err := p.send(t)
	t.undo, t.cost = nil, 0
	if err != nil {
		return nil, err
	}
	p.ok = ok
	answers := make([]answer, len(replies))
	for i := range replies {
		d := p.demands[i]
		answers[i] = answer{reply: replies[i], info: t.c.learn(d.Key, d.N, d.Leave, &replies[i])}
	}
	return answers, nil
}

// send makes the script call.
func (p *part) send(by lua.Client) (ok bool, replies []lua.TakeReply, err error) {
	t := p.tasks[0]
	if t.cfg.request != "" {
		return lua.TakeAllOnce(t.ctx, by, t.cfg.request, t.cfg.memory, p.demands)
	}
	return lua.TakeAll(t.ctx, by, p.demands)
}

// open makes the buckets of refilled templates exist, in one round trip.
func (p *part) open() error {
	errs := make([]error, len(p.tasks))
	var wg sync.WaitGroup
	for i, t := range p.tasks {
		if _, ok := t.kind.(*refilled); ok {
			wg.Go(func() { errs[i] = t.kind.open(t, 0) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// undo gives back what a part took after its caller left.
func (p *part) undo(ctx context.Context, by lua.Client, cmd redis.Cmder) {
	if p.tasks[0].cfg.request != "" {
		return // it is the request's
	}
	_, replies, err := p.send(replayed{cmd})
	if err != nil {
		return
	}
	for i, r := range replies {
		t := p.tasks[i]
		if r.Taken > 0 {
			t.c.giveBackBy(ctx, by, t.kind, t.key, r.Taken, r.Version.Era)
		}
	}
}

// replayed is a lua.Client that answers as an earlier command was answered.
type replayed struct{ earlier redis.Cmder }

// Process implements lua.Client.
func (r replayed) Process(_ context.Context, cmd redis.Cmder) error {
	cmd.(interface{ SetVal(any) }).SetVal(r.earlier.(interface{ Val() any }).Val())
	return nil
}

// degrade answers a part that its server did not answer.
func (p *part) degrade(err error) {
	p.ok, p.err = true, nil
	p.answers = make([]answer, len(p.demands))
	for i, d := range p.demands {
		a := p.tasks[i].c.degraded(d.Key, policy.Run{N: d.N, Count: 1, Leave: d.Leave}, err)
		p.answers[i], p.ok = a, p.ok && a.err == nil && (a.reply.OK || a.info.shadowed())
		if a.err != nil {
			p.err = a.err
		}
	}
	if !p.ok {
		for i := range p.answers {
			p.answers[i].giveBackShare()
		}
	}
}

// giveBackShare returns the tokens of an answer by degraded mode local to the share.
func (a *answer) giveBackShare() {
	if a.reply.Taken > 0 && a.info.share != nil {
		a.info.share.giveBack(a.reply.Taken)
	}
	a.reply.Remaining += a.reply.Taken
	a.reply.Taken = 0
}

// refund gives back what the parts have taken, whether or not the caller still waits; in time it is done before the
// caller is told.
func (c *Client) refund(p budget, parts []*part) {
	var backs []func()
	for _, part := range parts {
		for i := range part.answers {
			a := &part.answers[i]
			tokens, key, era := a.reply.Taken, part.demands[i].Key, int64(0)
			switch {
			case a.source.Kind == SourceFallback:
				a.giveBackShare()
			case tokens > 0 && p.cfg.request == "": // otherwise it is the request's
				a.reply.Taken, a.reply.Remaining, era = 0, a.reply.Remaining+tokens, a.info.era
				backs = append(backs, func() { c.giveBack(key, tokens, era) })
			}
		}
	}
	if len(backs) == 0 {
		return
	}
	done := make(chan struct{})
	job := func() {
		var wg sync.WaitGroup
		for _, back := range backs {
			wg.Go(back)
		}
		wg.Wait()
		close(done)
	}
	c.life.running.Go(job)
	left := Never
	if !p.deadline.IsZero() {
		left = time.Until(p.deadline)
	}
	timer := time.NewTimer(left)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	case <-p.ctx.Done():
	}
}
