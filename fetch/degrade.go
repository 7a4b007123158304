package fetch

import (
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// degraded answers a take that the bucket did not answer as its policy says: by degraded mode open or local. The answer
// has the error if that stands, which it does in mode closed, and for errors that are none of the server's.
func (c *Client) degraded(key string, n int64, err error, leave policy.Leave) answer {
	why := ReasonOf(err)
	if why == ReasonNone {
		return answer{err: err}
	}
	c.stats.degraded[why].Add(1)
	i := c.cache.get(key)
	mode := c.config.unknown // of buckets that were never seen, or have no policy
	if i.terms != nil {
		mode = i.terms.Degraded
	}
	a := answer{info: i, source: Source{Kind: SourceFallback, Reason: why}}
	switch {
	case mode == policy.DegradedOpen:
		if i.exceeded(key, n, leave) == nil { // otherwise it is denied, as ever
			a.reply = lua.TakeReply{OK: true, Taken: n}
		}
	case mode == policy.DegradedLocal && i.share != nil:
		t := i.share.take(n, leave.Of(i.limit()), c.shares.now())
		if !t.Known {
			return answer{err: err}
		}
		a.reply = lua.TakeReply{OK: t.OK, Taken: t.Taken, Remaining: t.Tokens, Wait: micros(t.Wait)}
	default:
		return answer{err: err}
	}
	return a
}

// degradedUpTo is how many tokens of up to n a degraded mode is asked for, so that it leaves what is to be left: all of
// a bucket in shadow mode.
func (c *Client) degradedUpTo(i *info, n int64, leave policy.Leave) int64 {
	switch {
	case i.terms == nil || i.terms.Shadow:
		return n
	case i.terms.Degraded == policy.DegradedLocal && i.share != nil:
		return max(1, min(n, i.share.holds(leave.Of(i.limit()), c.shares.now())))
	}
	return max(1, min(n, i.terms.Capacity-leave.Of(i.terms.Capacity)))
}
