package fetch

import (
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// isolatedFor is how long a bucket has a call of its own after Redis refused its keys to a script call. Otherwise the
// buckets that share its call would be refused with it.
const isolatedFor = 10 * time.Second

// movingFor is how long a slot counts as moving after a Cluster's server has refused a call because the slot moves.
// Meanwhile each call for the slot is for one bucket, and names only the keys that exist whenever the bucket does, so
// that the server accepts the call. Otherwise each call would be refused first, and would need twice as many round
// trips.
const movingFor = 10 * time.Second

// read applies the reply to a call. It answers the groups of the call, or leaves them for another round trip.
func (t *trip) read(call *scriptCall) {
	if call.cmd == nil {
		return
	}
	err := call.cmd.Err()
	switch {
	case err != nil: // separate, which spares allocations
		if t.readRefusal(call, err) {
			return
		}
	case call.text && !call.lazy():
		call.loaded(t.s).Store(true)
	}
	replies, err := call.replies(err)
	for i, g := range call.groups {
		if err != nil {
			t.answer(g, lua.TakesReply{Err: err})
		} else {
			t.readReply(call, i, &replies[i])
		}
	}
}

// readRefusal reports whether the groups of a call that ended with an error go into another round trip. The script did
// not run.
func (t *trip) readRefusal(call *scriptCall, err error) (again bool) {
	switch {
	case lua.IsNoScript(err) && !call.text:
		t.text = true
		call.loaded(t.s).Store(false)
		return true
	case redis.HasErrorPrefix(err, "NOPERM ") && len(call.groups) > 1: // separate calls show which keys are forbidden
		for _, g := range call.groups {
			g.isolated = true
		}
		return true
	case redis.HasErrorPrefix(err, "NOPERM "):
		t.c.buckets.obtain(call.groups[0].key).refused.claim(isolatedFor, time.Now())
	case lua.IsTryAgain(err):
		return t.retryWhileMoving(call)
	}
	return false
}

// readReply answers the nth group of a call, or leaves it for another round trip.
func (t *trip) readReply(call *scriptCall, n int, reply *lua.TakesReply) {
	g := call.groups[n]
	switch {
	case call.byFlow && g.retryOpened(reply):
	case reply.Missed:
		g.allKeys = true
	case reply.Schedule != "":
		t.reschedule(g, reply.Schedule)
	case reply.Ended:
		t.sweep(g)
	case !call.byFlow && call.words[n].Existing && errors.Is(reply.Err, lua.ErrUnknownBucket):
		t.create(g)
	case g.opensFirst && !g.slotMoves && reply.Err == nil:
		t.applyOpened(g, reply)
	default:
		t.answer(g, *reply)
	}
}

// retryWhileMoving prepares another round trip for the groups of a call that a Cluster's server refused, because it
// lacks some of the call's keys while their slot moves. Each group gets a call of its own, with only the keys that
// exist whenever its bucket does. It reports whether that differs from the refused call.
func (t *trip) retryWhileMoving(call *scriptCall) bool {
	first := call.groups[0]
	if first.slotMoves { // then the call is already of this kind
		return false
	}
	for _, g := range call.groups {
		g.slotMoves = true
	}
	t.c.nodes.moving(first.slot).claim(movingFor, time.Now())
	return len(call.groups) > 1 || first.kind != (configured{}) || call.byFlow
}

// mostSchedules is how often a budget is asked again with another schedule. Each schedule is for the time of the last
// reply.
const mostSchedules = 4

// reschedule prepares another round trip for a budget, with the schedule that a reply requires.
func (t *trip) reschedule(g *group, schedule string) {
	g.schedule = schedule
	g.tries++
	if g.tries > mostSchedules {
		t.answer(g, lua.TakesReply{Err: fmt.Errorf("%w: the server's clock changes too fast for the schedule of bucket %q",
			lua.ErrBadReply, g.key)})
	}
}

// sweep prepares the end of the expired reservations and leases of a budget that has too few tokens. Then the budget is
// asked again.
func (t *trip) sweep(g *group) {
	g.swept = true
	g.step = lua.SweepStep(g.key, lua.SweepAtOnce)
}

// resolve applies the overrides of lazy buckets that were read. If the override of a bucket can't be read, the bucket
// is asked as usual: the script then reads the override itself. resolve also applies the replies to steps.
func (t *trip) resolve() {
	for _, g := range t.groups {
		if g.step != nil {
			t.readStep(g)
			continue
		}
		if g.override == nil || g.own != nil {
			continue
		}
		own, err := lua.ReadOverride(g.override)
		if err == nil && own == nil {
			own = &g.kind.(*lazy).rule.Terms
		}
		g.own = own
	}
}

// readStep applies the reply to the step of a group. If the server doesn't know the step's script, the next round trip
// sends its source.
func (t *trip) readStep(g *group) {
	err := g.step.Read(g.stepCmd)
	if lua.IsNoScript(err) && !g.stepText {
		g.stepText = true
		return
	}
	g.step = nil
	g.stepCmd = nil
	g.stepText = false
	if err != nil {
		t.answer(g, lua.TakesReply{Err: err})
	}
}

// create prepares the creation of a template's bucket that is missing. If the template has max_keys, the bucket is
// counted first, on another server. So if the creation fails, there are fewer buckets than max_keys allows, and never
// more.
func (t *trip) create(g *group) {
	r := g.kind.(*refilled)
	g.create = true
	if r.rule.MaxKeys > 0 {
		g.step = r.template.ClaimStep(g.key)
	}
}

// applyOpened applies the reply to a call that only opened a bucket. The next round trip makes the takes. It makes them
// by flow if the bucket turns out to have flows.
func (t *trip) applyOpened(g *group, reply *lua.TakesReply) {
	t.observe(g, reply)
	opened := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining, Refilled: reply.Refilled}
	g.info = t.c.remember(g.key, 0, policy.Leave{}, &opened, t.asked)
	g.opensFirst = false
	g.opened = true
	g.allKeys = true
	g.byFlow = g.info.divided()
}

// retryOpened is called for a group whose takes were made by flow. It reports whether the group has to be sent again,
// because its bucket is a template's and turned out to be missing or full. It sets opensFirst, so that the bucket is
// opened first. If the bucket is missing although it was opened before, the takes are made without regard to flows.
func (g *group) retryOpened(reply *lua.TakesReply) bool {
	missing := errors.Is(reply.Err, lua.ErrUnknownBucket)
	if !ofTemplate(g.kind) || !missing && !reply.Missed {
		return false
	}
	g.opensFirst = !g.opened
	g.byFlow = g.byFlow && g.opensFirst
	return true
}
