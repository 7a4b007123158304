package traffic

import (
	"context"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/test/robustness/record"
)

// Block is the number of tokens that a consumer with leases may hold.
const Block = 20

// use takes as many tokens as it can get, in every way that the bucket and the consumer support. When the SDK returns
// tokens without being asked, that is not recorded as an operation: the take of these tokens is recorded as one whose
// result is unknown.
func (c *caller) use(ctx context.Context, by consumer, b record.Bucket) {
	lazy := b.Kind == record.Lazy // such a bucket has no reservations or request ids
	own, through := by.(sdk)
	for c.pause(ctx, c.pace) {
		result := ""
		switch what := c.rng.IntN(12); {
		case b.Strict() && what < 6, !lazy && what == 0:
			result = c.reserve(ctx, by)
		case what == 6:
			result = c.takeLeaving(ctx, by)
		case !through:
			result = c.takeOnce(ctx, by)
		case what == 7:
			result = c.takeUpTo(ctx, own)
		case what == 8 && !lazy:
			result = c.takeTwice(ctx, own)
		case what == 9 && b.Blocks == 0:
			result = c.takeAndUndo(ctx, own)
		case what == 10 && !lazy:
			result = c.takeAll(ctx, own, b)
		default:
			result = c.takeOnce(ctx, by)
		}
		if result != record.Done && result != record.Denied {
			c.pause(ctx, 50*time.Millisecond)
		}
	}
}

// begin returns an operation that begins now.
func (c *caller) begin(kind string, n int64) record.Op {
	return record.Op{Client: c.name, Kind: kind, Key: c.key, N: n, Call: time.Now().UnixNano()}
}

// answered completes an operation with the result of the consumer. If a degraded mode granted the tokens, or a bucket
// in shadow mode lacked them, they were not taken from a bucket.
func (c *caller) answered(op *record.Op, r fetch.Result, err error) {
	op.Taken = r.Taken
	op.Left = r.Remaining
	op.Shadow = r.Shadow
	op.Leased = r.Source.Kind == fetch.SourceLeased
	if r.Source.Kind == fetch.SourceFallback {
		op.Fallback, op.Taken = op.Taken, 0
	}
	if op.Shadow {
		op.Taken = 0
	}
	c.finish(op, err == nil && r.OK, err)
}

func (c *caller) takeOnce(ctx context.Context, by consumer) string {
	op := c.begin(record.Take, c.most)
	r, err := by.take(context.WithoutCancel(ctx), c.key, c.most, 0)
	c.answered(&op, r, err)
	c.t.ops.Add(op)
	return op.Result
}

// takeLeaving makes a take that must leave some tokens.
func (c *caller) takeLeaving(ctx context.Context, by consumer) string {
	op := c.begin(record.Take, c.most)
	op.Leave = 1 + c.rng.Int64N(40)
	r, err := by.take(context.WithoutCancel(ctx), c.key, c.most, op.Leave)
	c.answered(&op, r, err)
	c.t.ops.Add(op)
	return op.Result
}

func (c *caller) takeUpTo(ctx context.Context, by sdk) string {
	op := c.begin(record.UpTo, c.most)
	r, err := by.TakeUpTo(context.WithoutCancel(ctx), c.key, c.most, by.with()...)
	c.answered(&op, r, err)
	c.t.ops.Add(op)
	return op.Result
}

// takeTwice makes a take with a request id, and repeats it with the same id.
func (c *caller) takeTwice(ctx context.Context, by sdk) (result string) {
	id := c.name + "/" + strconv.FormatInt(time.Now().UnixNano(), 36)
	for range 2 {
		op := c.begin(record.Take, c.most)
		op.Request = id
		r, err := by.Take(context.WithoutCancel(ctx), c.key, c.most, by.with(fetch.WithRequestID(id))...)
		c.answered(&op, r, err)
		c.t.ops.Add(op)
		result = op.Result
	}
	return result
}

// takeAndUndo makes a take and undoes it.
func (c *caller) takeAndUndo(ctx context.Context, by sdk) string {
	op := c.begin(record.Take, c.most)
	r, err := by.Take(context.WithoutCancel(ctx), c.key, c.most, by.with()...)
	c.answered(&op, r, err)
	c.t.ops.Add(op)
	if op.Taken == 0 {
		return op.Result
	}
	c.pause(ctx, c.t.cfg.Pace)
	back := c.begin(record.Return, r.Taken)
	err = by.Undo(context.WithoutCancel(ctx), c.key, r)
	c.finish(&back, err == nil, err)
	c.t.ops.Add(back)
	return back.Result
}

// takeAll takes from this bucket and from another one, all or nothing. If the two buckets are on different servers, one
// may give tokens before the other one denies. The SDK returns these tokens, and the take is recorded as one whose
// result is unknown.
func (c *caller) takeAll(ctx context.Context, by sdk, b record.Bucket) string {
	keys := []string{c.key}
	for _, other := range c.t.cfg.Buckets {
		if other.Key != b.Key && !other.Linear && other.Kind == record.Configured {
			keys = append(keys, other.Key)
		}
	}
	keys = keys[:min(len(keys), 2)]
	reqs := make([]fetch.Request, len(keys))
	for i, key := range keys {
		reqs[i] = fetch.Request{Key: key, N: 1 + c.most/2}
	}
	_, cluster := c.rdb.(*redis.ClusterClient)
	separate := cluster && lua.Slot(keys[0]) != lua.Slot(keys[len(keys)-1])
	began := c.begin(record.Take, reqs[0].N)
	began.All = true
	all, err := by.TakeAll(context.WithoutCancel(ctx), reqs, by.with()...)
	result := ""
	for i, key := range keys {
		op := began
		op.Key = key
		r := fetch.Result{}
		if err == nil {
			r = all.Results[i]
		}
		granted := r.OK
		r.OK = r.OK && all.OK
		c.answered(&op, r, err)
		op.Other = granted && !all.OK
		if separate && op.Other && op.Result == record.Denied {
			op.Result = record.Unknown
			op.Error = "another bucket denies"
		}
		c.t.ops.Add(op)
		result = op.Result
	}
	if err == nil {
		return record.Done
	}
	return result
}

// holds is how long a reservation holds its tokens.
const holds = time.Second

// reserve reserves tokens. Then it settles for fewer or more of them, or lets the reservation's time pass.
func (c *caller) reserve(ctx context.Context, by consumer) string {
	overrun := policy.Overrun(c.rng.IntN(2)) // clamp or debt
	op := c.begin(record.Reserve, c.most)
	r, err := by.reserve(context.WithoutCancel(ctx), c.key, c.most, holds, overrun)
	c.answered(&op, r.Result, err)
	c.t.ops.Add(op)
	lapse := op
	lapse.Kind = record.Lapse
	lapse.Result = record.Unknown
	lapse.Taken = 0
	switch {
	case op.Result == record.Unknown || op.Taken > 0 && c.rng.IntN(4) == 0:
		c.t.ops.Add(lapse) // the reservation isn't settled
	case op.Taken > 0:
		c.pause(ctx, c.t.cfg.Pace)
		if !c.settle(ctx, r) {
			c.t.ops.Add(lapse)
		}
	}
	return op.Result
}

// settle settles a reservation. The number of used tokens is random, up to a third more than were reserved. It reports
// whether the settlement was certainly carried out.
func (c *caller) settle(ctx context.Context, r reservation) bool {
	used := c.rng.Int64N(c.most*4/3 + 2)
	op := c.begin(record.Settle, max(0, c.most-used))
	settled, err := r.settle(context.WithoutCancel(ctx), used)
	op.Clamped = op.N - settled.Returned
	op.Taken = settled.Charged
	c.finish(&op, err == nil, err)
	c.t.ops.Add(op)
	return err == nil
}

// invent takes from keys of a template that were never used before. It does so only while the bucket under test exists.
func (c *caller) invent(ctx context.Context, b record.Bucket) {
	client, err := fetch.New(c.rdb, fetch.WithTimeout(c.t.deadline()), fetch.WithRescue(false))
	if err != nil {
		return // can't happen: New with the same options worked for the callers
	}
	c.t.mu.Lock()
	c.t.clients = append(c.t.clients, client)
	c.t.mu.Unlock()
	for n := 0; c.pause(ctx, 200*time.Millisecond); n++ {
		s, err := Sample(ctx, c.t.cfg.Direct, b.Key)
		if err != nil || s.Missing {
			continue
		}
		op := c.begin(record.Take, 1)
		op.Key = b.Prefix + "invented-" + strconv.Itoa(n)
		r, err := client.Take(context.WithoutCancel(ctx), op.Key, 1)
		c.answered(&op, r, err)
		c.t.ops.Add(op)
	}
}
