package fetch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// kind is the way in which a bucket is kept. Its methods make calls through a lua.Client, such as a task.
type kind interface {
	// takes returns the Takes of a group, to which the caller adds the runs.
	takes(g *group) lua.Takes
	// outdated reports whether the cached policy is older than the template's. If so, the next take must ask with all
	// keys.
	outdated(i *info) bool
	// has reports whether the result of a take from such a bucket can have this era. The era of a lazy bucket is 0, and
	// the era of a refilled bucket is never 0.
	has(era int64) bool
	// open creates the bucket if it is missing. It is called before the call of another script, which may hold tokens for
	// up to hold.
	open(t *task, hold time.Duration) error
	// giveBack returns tokens to the era in which they were taken, 0 for any, and the right that a flow paid for them.
	giveBack(ctx context.Context, c lua.Client, key string, back lua.ReturnCall) (lua.ReturnReply, error)
	peek(ctx context.Context, c lua.Client, key string) (lua.PeekReply, error)
}

var (
	_ kind = configured{}
	_ kind = (*refilled)(nil)
	_ kind = (*lazy)(nil)
)

// configured is a bucket with a policy of its own, which refillers keep full.
type configured struct{}

func (configured) takes(g *group) lua.Takes { return lua.Takes{Key: g.key} }

func (configured) outdated(*info) bool { return false }

func (configured) has(int64) bool { return true }

func (configured) open(*task, time.Duration) error { return nil }

func (configured) giveBack(ctx context.Context, c lua.Client, key string, back lua.ReturnCall) (lua.ReturnReply,
	error) {
	return lua.ReturnPaid(ctx, c, key, back)
}

// peek returns ErrUnknownBucket if the bucket has neither tokens nor a policy, as a take does. Such a bucket may still
// have an index.
func (configured) peek(ctx context.Context, c lua.Client, key string) (lua.PeekReply, error) {
	p, err := lua.Peek(ctx, c, key, 1)
	if err == nil && p.Lost && p.Terms == nil {
		return lua.PeekReply{}, fmt.Errorf("%w %q", ErrUnknownBucket, key)
	}
	return p, err
}

// refilled is the kind of a template's buckets that refillers refill while they aren't full. It is also the kind of
// budgets, to which takes credit the tokens. The first take creates such a bucket.
type refilled struct {
	rule      *policy.CompiledTemplate
	template  *lua.Template
	crossSlot bool // its active set is in another slot
}

func (r *refilled) takes(g *group) lua.Takes {
	existing := g.slotMoves || r.crossSlot && r.rule.MaxKeys > 0
	return lua.Takes{Key: g.key, Below: g.info.limit(), Template: r.template, Existing: existing && !g.create,
		Schedule: g.schedule, Swept: g.swept}
}

// ofTemplate reports whether k is the kind of a refilled template's buckets. A bucket of that kind may be missing
// because it is full.
func ofTemplate(k kind) bool {
	_, yes := k.(*refilled)
	return yes
}

// asBudget returns k if it is the kind of budgets; nil otherwise.
func asBudget(k kind) *refilled {
	if r, ok := k.(*refilled); ok && r.rule.Terms.Budget() {
		return r
	}
	return nil
}

func (r *refilled) outdated(i *info) bool { return r.replaces(i.terms) }

// replaces reports whether the next take replaces policy t by the template's. It does if t is of an earlier version,
// unless t is the policy of a pool or an override. A nil t is an unknown policy.
func (r *refilled) replaces(t *policy.Terms) bool {
	return t != nil && !t.Pool && t.Fence.Before(r.rule.Terms.Fence)
}

func (r *refilled) has(era int64) bool { return era != 0 }

func (r *refilled) open(t *task, hold time.Duration) error {
	return t.takes(&ask{hold: hold, allKeys: true})
}

// giveBack drops the tokens if the bucket no longer exists, because then it was full.
func (r *refilled) giveBack(ctx context.Context, c lua.Client, key string, back lua.ReturnCall) (lua.ReturnReply,
	error) {
	reply, err := lua.ReturnPaid(ctx, c, key, back)
	if errors.Is(err, lua.ErrUnknownBucket) {
		return lua.ReturnReply{Clamped: back.N}, nil
	}
	return reply, err
}

// peek returns the state that the next take would find. A missing bucket is shown full.
func (r *refilled) peek(ctx context.Context, c lua.Client, key string) (lua.PeekReply, error) {
	p, err := lua.Peek(ctx, c, key, 1)
	missing := errors.Is(err, lua.ErrUnknownBucket)
	if err != nil && !missing {
		return p, err
	}
	if p.Terms != nil {
		if r.replaces(p.Terms) || p.Terms.Budget() {
			r.found(&p, &r.rule.Terms)
		}
		return p, nil
	}
	terms, err := lua.Override(ctx, c, key)
	if terms == nil {
		terms = &r.rule.Terms
	}
	if missing {
		return lua.PeekReply{Tokens: terms.Capacity, Terms: terms}, err
	}
	r.found(&p, terms)
	return p, err
}

// found changes a reply to the state that the next take would find. terms is the policy that the take would bring, as
// the Client knows it. If the take would replace the bucket's policy by terms, it would first refill the bucket under
// its old policy. If the bucket has no state, the take would create or adopt it.
func (r *refilled) found(p *lua.PeekReply, terms *policy.Terms) {
	index := p.Version.Index + p.Moved
	b := policy.Bucket{Tokens: &p.Tokens, Index: &index}
	if p.Lost {
		b.Tokens = nil
	}
	if p.Terms != nil {
		b.Control = &policy.Control{Terms: *p.Terms, Era: p.Version.Era, Index: p.Version.Index, Last: p.Last,
			Carry: p.Carry, Step: p.Step, Next: p.Next, Outstanding: p.Outstanding, Due: p.Due, Debt: p.Debt}
	}
	now := max(p.Now, p.Last)
	steps := r.rule.Policy.Steps
	call := policy.Call{Version: p.Version, Terms: terms, Create: policy.CreateInitial}
	if steps != nil {
		_, call.Next = policy.Due(steps, now, now, 1)
	}
	if p.Terms == nil || !p.Terms.Budget() || steps == nil {
		b.Refill(call, now)
	}
	if steps != nil {
		b.CatchUp(steps, terms, now)
	}
	s := b.Control
	p.Tokens = *b.Tokens
	p.Terms = &s.Terms
	p.Last = s.Last
	p.Carry = s.Carry
	p.Step = s.Step
	p.Next = s.Next
	p.Outstanding = s.Outstanding
	p.Due = s.Due
	p.Debt = s.Debt
	p.Wait = micros(b.Wait(1, p.Now))
}

// lazy is the kind of a lazy template's buckets. Each call first credits the bucket. These buckets have no eras, no
// reservations and no request ids.
type lazy struct{ rule *policy.CompiledTemplate }

func (l *lazy) takes(g *group) lua.Takes {
	if g.own != nil {
		return lua.Takes{Key: g.key, Lazy: g.own, Resolved: true}
	}
	return lua.Takes{Key: g.key, Lazy: &l.rule.Terms}
}

// outdated returns false because each call has the policy.
func (l *lazy) outdated(*info) bool { return false }

func (l *lazy) has(era int64) bool { return era == 0 }

func (l *lazy) open(t *task, _ time.Duration) error {
	return fmt.Errorf("%w: bucket %q is of the template %q; with enforce: refilled it has them", ErrLazyBucket, t.key,
		l.rule.Prefix)
}

func (l *lazy) giveBack(ctx context.Context, c lua.Client, key string, back lua.ReturnCall) (lua.ReturnReply, error) {
	return lua.ReturnReply{}, lua.LazyReturn(ctx, c, key, &l.rule.Terms, back.N)
}

func (l *lazy) peek(ctx context.Context, c lua.Client, key string) (lua.PeekReply, error) {
	r, err := lua.LazyPeek(ctx, c, key, &l.rule.Terms, 1)
	if err != nil {
		return lua.PeekReply{}, err
	}
	if r.Terms == nil {
		r.Terms = &l.rule.Terms
	}
	// The bucket may lack a fraction of a token. The rest of that token is its carry.
	carry := (r.Terms.Capacity-r.Remaining)*r.Terms.Per - r.Reset.Microseconds()*r.Terms.Tokens
	return lua.PeekReply{
		Tokens: r.Remaining, Wait: r.Runs[0].Wait, Terms: r.Terms, Carry: min(max(carry, 0), r.Terms.Per-1),
		Refilled: r.Refilled,
	}, nil
}

// kindOf returns how the buckets of a template are kept.
func kindOf(r *policy.CompiledTemplate, crossSlot bool) kind {
	if r.Enforce == policy.EnforceLazy {
		return &lazy{r}
	}
	return &refilled{r, lua.NewTemplate(r, crossSlot), crossSlot}
}
