package election

import (
	"fmt"

	"github.com/tokenrefill/refiller/policy"
)

// The arguments and replies of the scripts are described in the .lua files.

// script finds out by the numbers of keys and arguments which script is called, and runs it. The caller holds r.mu.
func (r *fakeRedis) script(by string, keys []string, args []any) any {
	switch {
	case len(keys) == 3 && len(args) == 1:
		return r.peek(keys[0])
	case len(keys) == 5 && len(args) == 1:
		return r.sweep(keys[0], int(number(args[0])))
	}
	return r.refills(by, keys, args)
}

// refills does the work of refill.lua. It always replies with the long form for each bucket.
func (r *fakeRedis) refills(by string, keys []string, args []any) any {
	n := len(keys) / 3
	shard := ""
	if len(keys) > 3*n {
		shard = keys[3*n]
	}
	reply := []int64{r.now()}
	for i, call := range decodeCalls(n, shard != "", args) {
		key := keys[i]
		o := policy.Outcome{Status: policy.StatusMalformed, Now: r.now()}
		bad := int64(1)
		if key != r.spoilt {
			o, bad = r.refill(by, key, call), 0
		}
		flags := int64(0)
		kind := int64(policy.KindPlain)
		epoch := int64(0)
		if o.Differs {
			flags = 1
		}
		if s := r.bucket(key).Control; s != nil && bad == 0 {
			if o.Status.Wrote() && o.Due == 0 && o.Tokens >= s.Terms.Capacity {
				flags += 2
			}
			switch {
			case s.Terms.Pool:
				kind, epoch = policy.KindPool, o.Fence.Epoch
			case s.Terms.Template:
				kind = policy.KindTemplate
			}
		}
		if shard != "" && (flags >= 2 || kind != policy.KindTemplate) {
			r.leave(shard, key)
		}
		reply = append(reply, -int64(o.Status), o.Tokens, o.Added, o.Clamped, o.Elapsed, flags, o.Version.Era,
			o.Version.Index, o.Last, o.Carry, kind, o.FileVersion, o.PoolsVersion, epoch, o.Fence.Seq, o.Step, bad,
			o.Outstanding, o.Due, o.Debt)
	}
	return reply
}

// decodeCalls decodes the arguments of a call of refill.lua for n buckets.
func decodeCalls(n int, shard bool, args []any) []policy.Call {
	calls := make([]policy.Call, n)
	for i := range calls {
		c := &calls[i]
		c.Create = policy.CreateLost
		if shard {
			c.Create = policy.CreateNever
		}
		if seen := text(args[i]); seen != "" {
			var last int64
			if _, err := fmt.Sscan(seen, &c.Version.Era, &last, &c.Version.Index); err != nil {
				panic(err)
			}
		}
	}
	policies := number(args[n])
	args = args[n+1:]
	for ; policies > 0; policies-- {
		var terms *policy.Terms
		if pol := text(args[1]); pol != "" {
			t, err := policy.DecodeTerms(pol)
			if err != nil {
				panic(err)
			}
			terms = &t
		}
		for i := number(args[0]) - 1; i < int64(n); i++ {
			calls[i].Terms = terms
		}
		args = args[2:]
	}
	for ; len(args) > 0; args = args[4:] {
		c := &calls[number(args[0])-1]
		c.Create = policy.Create(number(args[1]))
		c.Step = number(args[2])
		c.Next = number(args[3])
	}
	return calls
}

func (r *fakeRedis) peek(key string) any {
	if key == r.spoilt {
		return []any{int64(3), int64(1)}
	}
	b := r.bucket(key)
	if b.Control == nil {
		return []any{int64(2)}
	}
	s := b.Control
	return []any{
		int64(1), *b.Tokens, int64(0), s.Era, s.Index, s.Last, r.now(), s.Terms.Encode(), s.Carry, s.Step, s.Next,
		s.Outstanding, s.Due, s.Debt, int64(0), int64(0),
	}
}

func (r *fakeRedis) sweep(key string, most int) any {
	b := r.bucket(key)
	if b.Control == nil {
		return []any{int64(2)}
	}
	sum := b.Sweep(most, r.now())
	r.accounts[key].returned(sum.Returned)
	s := b.Control
	return []any{int64(1), r.now(), tokens(b), sum.Returned, sum.Clamped, sum.Void, sum.Dropped, s.Outstanding, s.Due,
		s.Debt}
}
