package fetch

import (
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// degraded answers a take that the bucket did not answer as its policy says: by
// degraded mode open or local. It reports false if the error stands, which it does
// in mode closed, and for errors that are none of the server's.
func (c *Client) degraded(key string, n int64, err error) (answer, bool) {
	why := ReasonOf(err)
	if why == ReasonNone {
		return answer{}, false
	}
	c.stats.degraded[why].Add(1)
	k, _ := c.terms.get(key, time.Now())
	mode := c.config.degraded // of buckets that were never seen, or have no policy
	if k.terms != nil {
		mode = k.terms.Degraded
	}
	a := answer{known: k, source: Source{Kind: SourceFallback, Reason: why}}
	switch {
	case mode == policy.DegradedOpen:
		if k.exceeded(key, n) != nil {
			return a, true // denied, as ever
		}
		a.reply = lua.TakeReply{OK: true, Taken: n}
	case mode == policy.DegradedLocal && k.stand != nil:
		t := k.stand.take(n, c.stands.now())
		if !t.Known {
			return answer{}, false
		}
		a.reply = lua.TakeReply{OK: t.OK, Taken: t.Taken, Remaining: t.Tokens, Wait: micros(t.Wait)}
	default:
		return answer{}, false
	}
	return a, true
}

// degradedUpTo is degraded for as many tokens as there are.
func (c *Client) degradedUpTo(key string, n int64, err error) (answer, bool) {
	k, _ := c.terms.get(key, time.Now())
	if k.terms != nil && k.terms.Degraded == policy.DegradedLocal && k.stand != nil {
		n = max(1, min(n, k.stand.holds(c.stands.now())))
	} else if k.terms != nil {
		n = min(n, k.terms.Capacity)
	}
	return c.degraded(key, n, err)
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }
