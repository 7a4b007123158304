package fetch

import (
	"cmp"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	denialMaxAge = time.Second // how long a denial is believed
	// policyMaxAge is how long a bucket's policy is believed. Asking for the policy doubles the cost of a take. The reply
	// to a denied take has the policy in any case.
	policyMaxAge = 10 * time.Second
	// pooledMaxAge is policyMaxAge for a pool's bucket, whose grant comes and goes.
	pooledMaxAge = time.Second
	// scheduleMaxAge is the shortest time between two requests for the instants of a stepped bucket while its next instant
	// is overdue.
	scheduleMaxAge = time.Second
)

// info is what a Client remembers of a bucket. It doesn't change: a later reply makes another info.
type info struct {
	terms  *policy.Terms // nil: the bucket has no policy
	era    int64
	share  *share    // nil until the degraded mode is local
	asOf   time.Time // of the last reply that had the policy, or should have had it
	lost   time.Time // when a reply first lacked the policy that is still believed; zero: the last reply had it
	denied *denial   // nil: none
	steps  *schedule // of a stepped bucket; nil if it was never asked for
}

// schedule has the instants of a stepped bucket, at which it is refilled.
type schedule struct {
	asked time.Time     // when they were last asked for
	next  time.Time     // the instant to come; zero if not known
	step  time.Duration // the time from the previous instant to next
}

// updated returns the info after a reply with the terms and the era; era is 0 if the reply has none. A bucket that has
// lost its policy, for example by an eviction, gets it back with the next refill. Until then the Client believes the
// policy that it knows, but not for longer than policyMaxAge.
func (i *info) updated(terms *policy.Terms, era int64, now time.Time) *info {
	if terms == nil && i.terms != nil {
		return i.withoutPolicy(now)
	}
	next := new(info)
	if i.terms != nil && terms != nil && *i.terms == *terms {
		*next = *i
		next.denied = nil
	}
	next.terms = terms
	next.asOf = now
	next.lost = time.Time{}
	if era != 0 {
		next.era = era
	}
	if terms != nil && terms.Degraded == policy.DegradedLocal {
		next.share = i.share.of(terms)
	}
	return next
}

// withoutPolicy returns the info after a reply that lacks the policy. The bucket's era is unknown then.
func (i *info) withoutPolicy(now time.Time) *info {
	lost := cmp.Or(i.lost, now)
	if now.Sub(lost) >= policyMaxAge {
		return &info{asOf: now}
	}
	next := *i
	next.asOf = now
	next.lost = lost
	next.era = 0
	next.denied = nil
	return &next
}

// hasPolicy reports whether the last reply that should have had the bucket's policy had it.
func (i *info) hasPolicy() bool { return i.terms != nil && i.lost.IsZero() }

// denial is the last denial of a bucket. Until it ends, the Client denies takes of n tokens or more that leave at least
// as many tokens (leave).
type denial struct {
	n, leave int64
	left     int64        // tokens that the bucket held
	at       lua.Refilled // the last refill before the denial
	until    time.Time    // when it ends, at most denialMaxAge later
	due      time.Time    // when n tokens are due; zero: never
}

// newDenial returns the denial of a take.
func newDenial(n, leave int64, reply *lua.TakeReply, now time.Time) *denial {
	d := &denial{n: n, leave: leave, left: reply.Remaining, at: reply.Refilled, until: now.Add(denialMaxAge)}
	if reply.Wait >= 0 {
		d.due = now.Add(reply.Wait)
		if d.due.Before(d.until) {
			d.until = d.due
		}
	}
	return d
}

// applies reports whether the denial also answers a take of n tokens with a leave.
func (d *denial) applies(n, leave int64, now time.Time) bool {
	return d != nil && n >= d.n && leave >= d.leave && now.Before(d.until)
}

// deniedFor returns the time until a take that denial d denies could be granted: until n tokens and those that the take
// leaves are due. A negative value means never.
func (i *info) deniedFor(d *denial, n, leave int64, now time.Time) time.Duration {
	if d.due.IsZero() {
		return -1
	}
	due := d.due.Sub(now)
	if n+leave > d.n+d.leave {
		due = max(due, i.untilDue(n+leave, d.left, d.at)-now.Sub(i.asOf))
	}
	return due
}

// exceeded returns the error of a take of more tokens than the bucket ever holds.
func (i *info) exceeded(key string, n int64, leave policy.Leave) error {
	if i.terms == nil || i.terms.Shadow || n+leave.Of(i.terms.Capacity) <= i.terms.Capacity {
		return nil
	}
	if leave == (policy.Leave{}) {
		return fmt.Errorf("%w: %d tokens of bucket %q, which holds at most %d", ErrExceedsCapacity, n, key, i.terms.Capacity)
	}
	return fmt.Errorf("%w: %d tokens of bucket %q, and %d to be left; it holds at most %d",
		ErrExceedsCapacity, n, key, leave.Of(i.terms.Capacity), i.terms.Capacity)
}

// shadowed reports whether denials are admitted.
func (i *info) shadowed() bool { return i.terms != nil && i.terms.Shadow }

func (i *info) limit() int64 {
	if i.terms == nil {
		return 0
	}
	return i.terms.Capacity
}

// remembersDenials reports whether denials of the bucket are remembered. They are not in two cases: a pool's bucket has
// to count its denials, so that the pool's share grows, and a bucket that has lost its policy gets tokens at an unknown
// time.
func (i *info) remembersDenials() bool { return !i.pooled() && i.lost.IsZero() }

// divided reports whether the bucket has flows.
func (i *info) divided() bool { return i.terms != nil && i.terms.Divided }

// flowOf returns the flow of a take that names a flow. If the bucket is known to have no flows, it is empty, because
// the bucket ignores the name.
func (i *info) flowOf(name string) string {
	if i.terms != nil && !i.terms.Divided {
		return ""
	}
	return name
}

// pooled reports whether the bucket is a pool's.
func (i *info) pooled() bool { return i.terms != nil && i.terms.Pool }

// fresh reports whether the policy is recent enough to be used.
func (i *info) fresh(now time.Time) bool {
	if i.pooled() {
		return now.Sub(i.asOf) < pooledMaxAge
	}
	return now.Sub(i.asOf) < policyMaxAge
}

// onFloor reports whether the bucket was a pool's without a grant in force when the scripts last reported its policy.
func (i *info) onFloor() bool { return i.pooled() && i.terms.GrantEra == 0 }

// stepped reports whether the bucket is refilled at instants.
func (i *info) stepped() bool { return i.terms != nil && i.terms.Kind == policy.Stepped }

// lacksSchedule reports whether the Client has to ask for the instants of a stepped bucket. It asks once for each step.
// While the next step is overdue, it asks once in scheduleMaxAge.
func (i *info) lacksSchedule(now time.Time) bool {
	return i.steps == nil || !now.Before(i.steps.next) && now.Sub(i.steps.asked) >= scheduleMaxAge
}

// moreAfter returns the time until a bucket of this policy has one more token than the number in tokens.
func (i *info) moreAfter(tokens int64, now time.Time) time.Duration {
	return i.timeUntil(tokens+1, tokens, now)
}

// resetAfter returns the time until a bucket of this policy that holds tokens is full.
func (i *info) resetAfter(tokens int64, now time.Time) time.Duration {
	return i.timeUntil(policy.MaxTokens, tokens, now)
}

// timeUntil returns the time until a bucket of this policy holds n tokens or is full. It assumes that the bucket was
// refilled just now and then held tokens, and that a grant in force does not end.
func (i *info) timeUntil(n, tokens int64, now time.Time) time.Duration {
	if i.terms == nil {
		return Never
	}
	t := *i.terms
	if t.GrantEra != 0 {
		t.Tokens = t.GrantTokens
	}
	t.GrantTokens = 0
	t.GrantEnd = 0
	t.GrantEra = 0
	s := policy.Control{Terms: t}
	if i.steps != nil && !i.steps.next.IsZero() {
		s.Next = i.steps.next.Sub(now).Microseconds()
		s.Step = s.Next - i.steps.step.Microseconds()
	}
	b := policy.Bucket{Tokens: &tokens, Control: &s}
	return wait(micros(b.Wait(min(n, t.Capacity), 0)))
}

// untilDue returns the time until n tokens are due in a bucket that held tokens at the time of a reply; at is from that
// reply. n may exceed the capacity. The result is negative if the time is unknown.
func (i *info) untilDue(n, tokens int64, at lua.Refilled) time.Duration {
	if i.terms == nil || i.terms.Kind == policy.Stepped || n > policy.MaxTokens {
		return -1
	}
	t := *i.terms
	t.Capacity = policy.MaxTokens
	b := policy.Bucket{Tokens: &tokens, Control: &policy.Control{Terms: t, Era: at.Version.Era, Last: at.Last}}
	return micros(b.Wait(n, at.Now))
}

// wait converts a waiting time of a script, where negative values mean never, to that of a Result.
func wait(d time.Duration) time.Duration {
	if d < 0 {
		return Never
	}
	return d
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// askSchedule asks for the instants of a stepped bucket and returns them. It is called about once a step. Without a
// reply the instants stay unknown, and the take does without them. The instants of a budget are computed from its
// template. at is the server's time in the last reply, 0 if the reply has none.
func (c *Client) askSchedule(t *task, at int64) *schedule {
	steps := &schedule{asked: time.Now()}
	if r := asBudget(t.kind); r != nil {
		if at == 0 {
			at = steps.asked.UnixMicro()
		}
		step, next := r.template.Period()
		steps.next = steps.asked.Add(micros(next - at))
		steps.step = micros(next - step)
		c.buckets.update(t.key, func(i *info) { i.steps = steps })
		return steps
	}
	t.brief = true
	reply, err := t.peek()
	if err == nil && reply.Terms != nil && reply.Next > reply.Step {
		steps.next = steps.asked.Add(micros(reply.Next - reply.Now))
		steps.step = micros(reply.Next - reply.Step)
	}
	c.buckets.update(t.key, func(i *info) { i.steps = steps })
	return steps
}

// peekedTimeUntil returns the time until a bucket that was peeked holds n tokens or is full.
func peekedTimeUntil(n int64, p *lua.PeekReply) time.Duration {
	b := policy.Bucket{Tokens: &p.Tokens, Control: &policy.Control{
		Terms: *p.Terms, Era: p.Version.Era, Last: p.Last, Carry: p.Carry, Step: p.Step, Next: p.Next,
	}}
	return wait(micros(b.Wait(min(n, p.Terms.Capacity), p.Now)))
}
