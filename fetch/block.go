package fetch

import (
	"context"
	"crypto/rand"
	"errors"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// leaseRetry is the pause after a call about a block that was not answered.
	leaseRetry = 50 * time.Millisecond
	// leaseFinal is the longest time of each call that gives a block back at Close. A call whose reply was lost is then
	// repeated in time.
	leaseFinal = engine.Grace / 4
	// leaseRest is the shortest pause after the bucket replied that it doesn't have the block.
	leaseRest = time.Second
)

// block holds tokens of a bucket in memory, so that takes need no call. The bucket counts these tokens as outstanding.
// The goroutines of callers, the takers, take tokens from the block. The block's keeper, a goroutine of the Client,
// does everything else. A keeper needs 4 kB, so maxLeases keepers need 17 MB. One keeper for all blocks would need a
// queue of the work that is due, and goroutines for the calls under way.
type block struct {
	ls   *leases
	key  string
	flow *string // the flow to which the block belongs; nil if the bucket has no flows
	rule leaseRule
	wake chan struct{} // of the keeper

	view   atomic.Pointer[view] // nil: takers can take nothing
	asked  atomic.Bool          // the keeper was woken, or pauses
	missed atomic.Int64         // tokens that takers got from the bucket itself since the keeper last checked
	_      [64]byte             // separates left, which takers write, from the fields that they read
	left   atomic.Int64         // tokens
	_      [64]byte

	// Only the keeper uses the following fields.
	id    string         // of the block in the bucket; empty: there is none
	seq   int64          // of its last call
	until time.Duration  // from this time on its tokens must not be used
	call  *lua.LeaseCall // the call that has no answer yet; it is sent until it has one
	sent  time.Duration  // when it was first sent
	again bool           // the call was sent before
	retry time.Duration  // the call isn't sent again before this time
	rest  time.Duration  // no more tokens are asked for before this time
	plan  plan
}

// view has the state of the block and its bucket after the last call, for takers.
type view struct {
	until   time.Duration // from this time on, the block's tokens must not be used
	low     int64         // with fewer tokens left, takers wake the keeper
	bucket  int64         // tokens in the bucket
	limit   int64
	more    time.Duration // as of that call, until the bucket has one more token
	reset   time.Duration // as of that call, until the bucket is full
	onFloor bool
	era     int64
}

func newBlock(ls *leases, key string, flow *string, rule leaseRule) *block {
	half := rule.hold / 2
	return &block{
		ls: ls, key: key, flow: flow, rule: rule, wake: make(chan struct{}, 1),
		plan: plan{most: rule.most, half: half, ends: ls.now() + half},
	}
}

// takeLocal takes up to most tokens. It takes none if that would be fewer than least, or if too few would be left
// (leave). few reports whether few tokens are left in the block. If so, the caller has to wake the keeper.
func (b *block) takeLocal(least, most int64, leave policy.Leave) (r Result, few bool) {
	v := b.view.Load()
	if v == nil || least > v.limit || b.ls.now() >= v.until {
		return Result{}, false
	}
	for {
		left := b.left.Load()
		n := min(most, left)
		if leave != (policy.Leave{}) {
			n = min(n, v.bucket+left-leave.Of(v.limit))
		}
		if n < least {
			return Result{}, false
		}
		if !b.left.CompareAndSwap(left, left-n) {
			continue
		}
		return Result{
			OK: true, Taken: n, Remaining: v.bucket + left - n, Limit: v.limit, ResetAfter: v.reset, MoreAfter: v.more,
			OnFloor: v.onFloor, Source: Source{Kind: SourceLeased}, Era: v.era,
		}, left-n < v.low
	}
}

// miss records that a caller got n tokens from the bucket itself.
func (b *block) miss(n int64) {
	if n == 0 {
		return
	}
	b.missed.Add(n)
	b.signal()
}

// signal wakes the keeper. It does nothing if b is nil, or if the keeper was woken before or rests.
func (b *block) signal() {
	if b != nil && !b.asked.Load() && b.asked.CompareAndSwap(false, true) {
		timing.Signal(b.wake)
	}
}

// withdraw removes up to n tokens from the block, so that takers can't get them. It returns how many it removed.
func (b *block) withdraw(n int64) int64 {
	for {
		left := b.left.Load()
		got := min(n, left)
		if b.left.CompareAndSwap(left, left-got) {
			return got
		}
	}
}

// keep is the main function of the keeper. It returns when no caller takes from the bucket any more, or when the Client
// is closed.
func (b *block) keep() {
	defer b.ls.end(b)
	timer := time.NewTimer(b.rule.hold)
	defer timer.Stop()
	for {
		select {
		case <-b.ls.c.life.quit:
			b.giveUp()
			return
		case <-b.wake:
		case <-timer.C:
		}
		next, over := b.step(b.ls.now())
		if over {
			return
		}
		timer.Reset(next - b.ls.now())
	}
}

// step does the work that is due. It returns the time of the next step, and whether the keeper has nothing more to do.
func (b *block) step(now time.Duration) (next time.Duration, over bool) {
	b.asked.Store(now < max(b.rest, b.retry))
	if b.id != "" && now >= b.until {
		b.lose()
	}
	if b.call == nil {
		back, want, idle := b.decide(now)
		switch {
		case back > 0 || want > 0 || idle && b.id != "":
			b.prepare(now, back, want)
		case idle:
			return 0, true
		}
	}
	if b.call != nil && now >= b.retry {
		if reply, ok := b.send(b.ls.c.internalBudget(context.Background())); ok {
			b.show(reply)
		}
	}
	switch {
	case b.call != nil:
		next = min(b.retry, b.until)
	case b.rest > now:
		next = min(b.rest, b.plan.ends)
	default:
		next = b.plan.ends
	}
	return next, false
}

// decide returns how many tokens the block has to give back, how many it has to ask for, and whether it is unused.
func (b *block) decide(now time.Duration) (back, want int64, idle bool) {
	left, missed := b.left.Load(), b.missed.Swap(0)
	b.plan.observe(left, missed)
	if now >= b.plan.ends {
		back, idle = b.plan.endHalf(now, left)
	}
	switch {
	case b.ls.c.buckets.find(b.key).waitedBy(b.flow):
		back = left
		b.rest = b.after(b.plan.half)
	case back == 0 && now >= b.rest:
		want = b.plan.shortfall(now, left, missed)
	}
	return back, want, idle && want == 0
}

// prepare prepares the call that gives tokens back and asks for others. From then on takers can't get the tokens that
// go back.
func (b *block) prepare(now time.Duration, back, want int64) {
	if b.id == "" {
		b.id, b.seq = rand.Text(), 0
		b.until = now + b.rule.hold + leaseGrace - leaseMargin
	}
	back = b.withdraw(back)
	b.plan.seen -= back
	b.seq++
	b.sent, b.again = now, false
	b.call = &lua.LeaseCall{ID: b.id, Seq: b.seq, Keep: b.left.Load(), Back: back, Want: want,
		TTL: b.rule.hold + leaseGrace}
	if b.flow != nil {
		b.call.Flow = lua.Flow{Name: *b.flow, Divided: true}
	}
}

// send makes the call and applies its reply. If there is no reply, the call is sent again later. The bucket executes it
// only once. No caller waits for it, so the callers' timeout doesn't apply. If that is shorter than the call, each
// reply would be lost, and with it the tokens that the bucket granted.
func (b *block) send(p budget) (reply lua.LeaseReply, ok bool) {
	c, call := b.ls.c, *b.call
	t := c.begin(p, b.key)
	err := t.attempt(false, func() (err error) {
		if call.Want > 0 { // a template's bucket that was full has to be refilled after this call
			if err := t.kind.open(t, call.TTL); err != nil {
				return err
			}
		}
		reply, err = lua.Lease(t.ctx, t, b.key, call)
		return err
	})
	c.reopen(t.kind, b.key, &lua.TakeReply{Taken: reply.Granted, Remaining: reply.Remaining, Terms: reply.Terms})
	if err != nil {
		b.failed(&call, err)
		return reply, false
	}
	b.apply(&call, &reply)
	return reply, true
}

// failed applies the error of a call.
func (b *block) failed(call *lua.LeaseCall, err error) {
	switch {
	case errors.Is(err, lua.ErrNotHeld) && b.again && call.Keep+call.Want == 0:
		// an earlier attempt was executed, and it ended the block
		b.call.Back = 0
		b.lose()
		b.moreToTake(call.Back)
	case causeOf(err).reach == answered: // the bucket no longer has the block, or can have none
		b.call.Want = 0
		b.lose()
		b.rest = b.after(max(b.plan.half, leaseRest))
	default:
		b.again, b.retry = true, b.after(leaseRetry)
	}
}

// apply applies the reply to a call.
func (b *block) apply(call *lua.LeaseCall, reply *lua.LeaseReply) {
	b.call = nil
	b.ls.c.stats.clamped.Add(reply.Clamped)
	b.left.Add(reply.Granted)
	b.plan.add(b.ls.now(), reply.Granted, call.Want)
	b.until = b.sent + b.rule.hold + leaseGrace - leaseMargin
	if call.Keep+reply.Granted == 0 {
		b.id = ""
	}
	b.moreToTake(call.Back)
	switch {
	case call.Want > 0 && reply.Granted == 0: // others empty the bucket first, so a block would only cost calls
		b.rest = b.after(b.plan.half)
	case reply.Granted < call.Want: // the bucket has no more until the next refill
		b.rest = b.after(min(b.plan.half, micros(reply.Terms.Interval)))
	}
}

// moreToTake wakes the waiters of the Client after n tokens went back to the bucket.
func (b *block) moreToTake(n int64) {
	if n > 0 {
		b.ls.c.moreTokens(b.key)
	}
}

// show makes a reply visible to takers.
func (b *block) show(reply lua.LeaseReply) {
	c, now := b.ls.c, time.Now()
	i := c.remember(b.key, 0, policy.Leave{}, &lua.TakeReply{
		OK: true, Remaining: reply.Remaining, Terms: reply.Terms,
		Refilled: lua.Refilled{Version: policy.Version{Era: reply.Era}},
	}, now)
	b.plan.most = min(b.rule.most, i.limit())
	if b.id == "" {
		b.view.Store(nil)
		return
	}
	b.view.Store(&view{
		until: b.until, low: b.plan.low(), bucket: reply.Remaining, limit: i.limit(),
		more: i.moreAfter(reply.Remaining, now), reset: i.resetAfter(reply.Remaining, now), onFloor: i.onFloor(), era: i.era,
	})
}

// lose drops a block that can't be given back any more. Its tokens count as lost. So do the tokens of a call that has
// no reply.
func (b *block) lose() {
	b.view.Store(nil)
	lost := b.left.Swap(0)
	if b.call != nil {
		lost += b.call.Back + b.call.Want
	}
	b.ls.c.stats.lost.Add(lost)
	b.id, b.call = "", nil
	b.plan.seen, b.plan.fresh = 0, 0
}

// giveUp gives the block back when its Client is closed. Calls without an answer are repeated for engine.Grace.
func (b *block) giveUp() {
	b.view.Store(nil)
	end := b.ls.now() + engine.Grace
	for b.id != "" {
		now := b.ls.now()
		if now >= min(end, b.until) {
			b.lose()
			return
		}
		if b.call == nil {
			b.prepare(now, b.left.Load(), 0)
		}
		p := b.ls.c.internalBudget(context.Background())
		p.deadline = p.within(leaseFinal)
		if _, ok := b.send(p); !ok && b.id != "" {
			time.Sleep(leaseRetry)
		}
	}
}

// after returns the time at which d is over. It adds a random part, so that the blocks don't act together.
func (b *block) after(d time.Duration) time.Duration {
	return b.ls.now() + timing.Between(b.ls.c.jitter, d, d+d/10)
}
