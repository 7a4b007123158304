package fetch

import (
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// rescueAfter is the age of the last refill, in refill intervals, after which this Client makes the next one.
	// rescueSpread is the most that a Client adds to rescueAfter. Each Client adds a part of its own, so that they don't
	// all act at the same time.
	rescueAfter  = 2
	rescueSpread = 0.25
)

// rescues reports whether this Client has to refill the bucket. It has to if a denial shows that no refiller does: the
// last refill is overdue, or is in the future because the server's clock went back. Buckets with a schedule are not
// refilled, because only refillers know the instants of the schedule.
func (c *Client) rescues(reply *lua.TakeReply) bool {
	t := reply.Terms
	if !c.config.rescue || reply.OK || t == nil || t.Kind != policy.Smooth {
		return false
	}
	since := reply.Now - reply.Last
	return since < -policy.ClockTolerance || float64(since) > (rescueAfter+rescueSpread*c.spread)*float64(t.Interval)
}

// rescue refills a bucket that denied a take, if no refiller does. It calls the refillers' script with the (era, index)
// of the denial and without a policy, so that the call can neither create the bucket nor change its policy. It reports
// whether the take should be repeated, because the bucket now has the tokens that it needs (want), and whether this
// Client made the refill.
func (t *task) rescue(want int64, reply *lua.TakeReply) (again, ours bool) {
	c := t.c
	if !c.rescues(reply) || want > reply.Terms.Capacity ||
		!c.buckets.obtain(t.key).rescued.claim(micros(reply.Terms.Interval), time.Now()) {
		return false, false
	}
	t.brief = true
	var out policy.Outcome
	err := t.attempt(false, func() (err error) {
		out, err = lua.Refill(t.ctx, t, t.key, policy.Call{Version: reply.Version})
		return err
	})
	if err != nil {
		return false, false // the denial is the result
	}
	ours = out.Status.Wrote()
	if ours {
		c.stats.rescues.Add(1)
	}
	c.buckets.forgive(t.key)
	return out.Tokens >= want, ours
}
