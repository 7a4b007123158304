package fetch

import (
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// answer distributes the reply to a group among its takes, as if they had been made one by one.
func (t *trip) answer(g *group, reply lua.TakesReply) {
	g.done = true
	t.observe(g, &reply)
	if g.opened && reply.Err == nil {
		t.c.reopen(g.kind, g.key, &lua.TakeReply{Taken: g.taken(&reply), Remaining: reply.Remaining, Terms: reply.Terms})
	}
	i := g.info
	switch {
	case reply.Err != nil:
	case reply.Terms != nil || g.allKeys:
		i = t.c.applyTakes(g, &reply, t.asked)
	default:
		t.c.updateShare(g.key, i.share, reply.Remaining, false)
	}
	rest := portionsOf(g, &reply)
	for _, r := range g.asks {
		a := &r.Body
		a.info, a.err = i, reply.Err
		if a.err == nil {
			rest.give(a)
		}
		if !r.Answer() {
			t.unclaimed = append(t.unclaimed, r)
		}
	}
}

// observe applies the parts of a reply that concern the whole group. They are the tokens that may be lost, the version
// of the templates, and the sets to which the bucket has to be added.
func (t *trip) observe(g *group, reply *lua.TakesReply) {
	if reply.Err != nil {
		if causeOf(reply.Err).reach == lost {
			t.c.stats.lost.Add(g.total)
		}
		return
	}
	switch k := g.kind.(type) {
	case *refilled:
		t.c.templates.observePolicy(reply.Terms)
		if reply.Till != 0 {
			t.entries = append(t.entries, entry{k.template, g.key, reply.Till})
		}
	case configured:
		t.c.reopen(k, g.key, &lua.TakeReply{Terms: reply.Terms})
	}
}

// portions divides the reply to a group among its takes, in the order of the takes.
type portions struct {
	g     *group
	reply *lua.TakesReply
	run   int   // the run of the next take
	nth   int64 // how many takes of that run have their reply
	left  int64 // tokens that the bucket had before the next take
}

// portionsOf returns the portions of a reply. No take has got its portion yet.
func portionsOf(g *group, reply *lua.TakesReply) portions {
	return portions{g: g, reply: reply, left: reply.Remaining + g.taken(reply)}
}

// give sets the reply of the next take.
func (p *portions) give(a *ask) {
	switch {
	case p.reply.OK && p.reply.Runs == nil:
		a.reply = lua.TakeReply{OK: true, Taken: a.total()}
		if p.reply.Paid {
			a.reply.Paid = a.reply.Taken
		}
	case a.line != nil:
		a.reply = lua.TakeReply{OK: p.reply.OK}
		a.runs = append([]lua.RunReply(nil), p.reply.Runs...)
		for n, r := range p.reply.Runs {
			a.reply.Taken += p.g.runs[n].N * r.Taken
			a.reply.Paid += r.Paid
		}
	default:
		a.reply = replyOf(a.run, p.reply.Runs[p.run], p.nth)
		p.nth++
		if a.run.UpTo || p.nth == p.g.runs[p.run].Count {
			p.run++
			p.nth = 0
		}
	}
	p.left -= a.reply.Taken
	a.reply.Terms = p.reply.Terms
	a.reply.Refilled = p.reply.Refilled
	a.reply.Remaining = p.left
	if !a.reply.OK {
		a.reply.Remaining = p.reply.Remaining
	}
}

// replyOf returns the reply to the nth take of a run.
func replyOf(run policy.Run, r lua.RunReply, nth int64) lua.TakeReply {
	switch {
	case run.UpTo:
		return lua.TakeReply{OK: r.Taken > 0, Taken: r.Taken, Wait: r.Wait, Paid: r.Paid}
	case nth < r.Taken:
		return lua.TakeReply{OK: true, Taken: run.N, Paid: paidOf(run.N, r, nth)}
	}
	return lua.TakeReply{Wait: r.Wait}
}

// taken returns how many tokens the takes of a group got.
func (g *group) taken(reply *lua.TakesReply) int64 {
	if reply.OK {
		return g.total
	}
	sum := int64(0)
	for n, r := range reply.Runs {
		sum += g.runs[n].N * r.Taken
	}
	return sum
}

// applyTakes remembers the reply to the takes of a group. If takes were denied, it remembers the denial of the smallest
// one.
func (c *Client) applyTakes(g *group, reply *lua.TakesReply, asked time.Time) *info {
	if g.byFlow {
		return c.rememberFlows(g, reply, asked)
	}
	one := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining, Refilled: reply.Refilled}
	denied := policy.Run{}
	for n, r := range reply.Runs {
		run := g.runs[n]
		if short := run.UpTo && r.Taken == 0 || !run.UpTo && r.Taken < run.Count; short && (one.OK || run.N < denied.N) {
			one.OK = false
			one.Wait = r.Wait
			denied = run
		}
	}
	return c.remember(g.key, denied.N, denied.Leave, &one, asked)
}
