package fetch

import (
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// degraded returns the answer to a take that the bucket's server did not answer. In the degraded modes open and local
// it decides in place of the bucket. The answer has the error err in three cases:
//
//   - The mode is closed.
//   - The mode is local, and there is no share from which to take.
//   - err is not the server's fault, or only shows that the server is far away.
func (c *Client) degraded(key string, run policy.Run, err error) answer {
	why := ReasonOf(err)
	if why == ReasonNone {
		return answer{err: err}
	}
	c.stats.degraded[why].Add(1)
	if why == ReasonDistance {
		return answer{err: err}
	}
	i := c.assumed(key)
	mode := c.config.unknown // if the policy is unknown
	if i.terms != nil {
		mode = i.terms.Degraded
	}
	a := answer{info: i, source: Source{Kind: SourceFallback, Reason: why}}
	n, leave := run.N*run.Count, run.Leave.Of(i.limit())
	least := n
	if run.UpTo && i.terms != nil && !i.terms.Shadow { // shadow mode grants all
		least = 1
	}
	switch {
	case mode == policy.DegradedOpen:
		if least < n {
			n = max(least, min(n, i.terms.Capacity-leave))
		}
		if i.exceeded(key, n, run.Leave) == nil { // otherwise the caller gets ErrExceedsCapacity
			a.reply = lua.TakeReply{OK: true, Taken: n}
		}
	case mode == policy.DegradedLocal && i.share != nil:
		now := c.consumers.now()
		i.share.suppose(c.consumers.ofAny(), now)
		asOf := i.share.replies.Load() // with a later reply, the tokens of this take don't go back
		t := i.share.take(least, n, leave, now)
		if !t.Known {
			return answer{err: err}
		}
		if t.OK {
			a.loan = &loan{i.share, asOf, t.Taken}
		}
		a.reply = lua.TakeReply{OK: t.OK, Taken: t.Taken, Remaining: t.Tokens, Wait: micros(t.Wait)}
	default:
		return answer{err: err}
	}
	return a
}

// assumed returns what is known of a bucket. If its policy is unknown, the policy of its template is assumed.
func (c *Client) assumed(key string) *info {
	i := c.buckets.find(key).known.Load()
	if i.terms != nil {
		return i
	}
	rule := c.templates.set.Load().Of(key)
	if rule == nil {
		return i
	}
	if rule.Terms.Degraded == policy.DegradedLocal {
		i = c.buckets.update(key, func(i *info) { i.share = i.share.of(&rule.Terms) })
	}
	assumed := *i
	assumed.terms = &rule.Terms
	return &assumed
}
