package election

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// consume takes from a bucket until ctx ends, as its kind of consumer does.
func (a *account) consume(ctx context.Context, d *dice, version func() int64) {
	for timing.Sleep(ctx.Done(), d.upTo(4*interval)) {
		a.redis.change(func() {
			b := a.redis.bucket(a.key)
			switch {
			case a.prefix != "":
				a.takeOfTemplate(b, a.terms(version()))
			case b.Control == nil: // unknown, or not ours yet
			case a.policies[0].Strict && d.float() < 0.7:
				a.reserve(b, 1+int64(d.float()*60), d)
			default:
				a.takeAll(b)
			}
		})
	}
}

func tokens(b *oracle.Bucket) int64 {
	if b.Tokens == nil {
		return 0
	}
	return *b.Tokens
}

// takeAll takes all tokens. If there are none, it asks for one and is denied. The caller holds the mutex of a.redis, as
// for the other takes that get a bucket.
func (a *account) takeAll(b *oracle.Bucket) {
	n := max(1, tokens(b))
	if got := b.Take(n, a.redis.now()); got.OK {
		a.took(n)
	}
}

// takeOfTemplate takes all tokens, and creates the bucket if there is none. It puts the bucket into the active set if
// the script would do so.
func (a *account) takeOfTemplate(b *oracle.Bucket, t policy.Terms) {
	n := t.Capacity
	if b.Control != nil {
		n = max(1, tokens(b))
	}
	set, now := lua.ActiveKey(a.prefix, lua.ActiveShard(a.key)), a.redis.now()
	if b.Control != nil && tokens(b) >= n && tokens(b) < t.Capacity { // the script reads the tokens only
		b.Take(n, now)
		a.took(n)
		return
	}
	got, active := oracle.TakeTemplate(&b.Bucket, t, n, now, a.redis.active[set][a.key])
	if got.OK {
		a.took(n)
	}
	if active {
		a.redis.enter(set, a.key)
	}
}

// reserve reserves tokens, and settles an earlier reservation or lets its time pass.
func (a *account) reserve(b *oracle.Bucket, n int64, d *dice) {
	now := a.redis.now()
	a.reserved++
	if b.Control != nil { // Reserve sweeps, too, but doesn't return how many tokens that gave back
		a.returned(b.Sweep(100, now).Returned)
	}
	got, _ := b.Reserve(fmt.Sprint(a.reserved), n, (3 * interval).Microseconds(), policy.OverrunClamp, policy.Leave{},
		now)
	if got.OK {
		a.took(n)
	}
	if d.float() < 0.5 {
		settled, _, _ := b.Settle(fmt.Sprint(a.reserved-1), int64(d.float()*30), now)
		a.returned(settled.Returned)
		if settled.Charged > 0 {
			a.took(settled.Charged)
		}
	}
	if s := b.Control; s != nil && b.Tokens != nil && *b.Tokens > max(0, s.Terms.Capacity-s.Outstanding) {
		a.fault("%d tokens and %d outstanding exceed the capacity, %d", *b.Tokens, s.Outstanding, s.Terms.Capacity)
	}
}

// takePlain takes tokens as a program with plain commands does: it runs DECR, and INCR if there was no token.
func (a *account) takePlain(ctx context.Context, d *dice) {
	add := func(n int64) (left int64) {
		a.redis.change(func() {
			b := a.redis.bucket(a.key)
			if b.Tokens == nil {
				b.Tokens = new(int64)
			}
			*b.Tokens += n
			left = *b.Tokens
			if n < 0 && left >= 0 {
				a.took(-n)
			}
		})
		return left
	}
	for timing.Sleep(ctx.Done(), d.upTo(interval/5)) {
		if add(-1) < 0 {
			time.Sleep(d.upTo(2 * time.Millisecond)) // the time between two commands
			add(1)
		}
	}
}

// addPlain refills as a program with plain commands does. Once an interval it runs INCR on the index. If it gets
// another index than it expected, it undoes this with DECR. Otherwise it adds the tokens of an interval, up to the
// capacity.
func (a *account) addPlain(ctx context.Context, d *dice) {
	t, expected := a.terms(0), int64(0)
	n := t.Tokens * t.Interval / t.Per
	count := func(by int64) (index int64) {
		a.redis.change(func() {
			b := a.redis.bucket(a.key)
			if b.Index == nil {
				b.Index = new(int64)
			}
			*b.Index += by
			index = *b.Index
		})
		return index
	}
	for timing.Sleep(ctx.Done(), interval) {
		index := count(1)
		time.Sleep(d.upTo(2 * time.Millisecond))
		if index != expected+1 {
			expected = count(-1)
			continue
		}
		expected = index
		a.redis.change(func() {
			b := a.redis.bucket(a.key)
			if b.Tokens == nil {
				b.Tokens = new(int64)
			}
			*b.Tokens = min(*b.Tokens+n, t.Capacity)
		})
	}
}
