package fetch

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// mostBuckets is the most buckets of one script call, so that it doesn't occupy the server for long: more go in further
// calls of the same round trip.
const mostBuckets = 128

// aloneFor is how long a bucket whose keys were refused to a script call goes alone: others would be refused with it.
const aloneFor = 10 * time.Second

// movingFor is how long calls for a slot are narrow from their first round trip on, after a server has refused one
// because the slot moves. A narrow call is for one bucket, and has only the keys that exist with it. A call that is
// refused first needs twice as many round trips.
const movingFor = 10 * time.Second

// scriptCall is a call of a script: of takes of some buckets, or of one lazy bucket.
type scriptCall struct {
	groups []*group
	takes  lua.TakesCall
	words  []lua.Takes
	byFlow bool // the takes name their flows; then it is made of the next two
	flows  lua.FlowTakesCall
	shares []lua.FlowTakes
	text   bool // with the script's text, and not its name
	cmd    redis.Cmder
}

func (call *scriptCall) lazy() bool { return !call.byFlow && call.words[0].Lazy != nil }

// command returns the call's command, with the script's text or its name.
func (call *scriptCall) command(ctx context.Context) (redis.Cmder, error) {
	if call.byFlow {
		return call.flows.Command(ctx, call.shares, call.text)
	}
	return call.takes.Command(ctx, call.words, call.text)
}

// replies reads the answer to the command, which ended with err.
func (call *scriptCall) replies(err error) ([]lua.TakesReply, error) {
	if call.byFlow {
		return call.flows.Read(err)
	}
	return call.takes.Read(err)
}

// loaded returns the flag that records whether the server has the script.
func (call *scriptCall) loaded(s *node) *atomic.Bool {
	if call.byFlow {
		return &s.flowsLoaded
	}
	if call.words[0].Whole {
		return &s.takesLoaded
	}
	return &s.takeLoaded
}

// trip makes the round trips for a batch. It is used again with its groups and script calls. Otherwise a lone take
// makes 32 allocations in place of 15, and costs a tenth more processor time.
type trip struct {
	c         *Client
	s         *node
	rdb       redis.UniversalClient
	groups    []*group
	last      map[string]*group
	calls     []*scriptCall
	places    map[place]*scriptCall // with room
	cmds      []redis.Cmder
	asked     time.Time              // when they were last sent
	unclaimed []*engine.Request[ask] // their callers have left
	ctx       context.Context
	text      bool // the server doesn't know a script

	entries []entry
	freeG   []*group
	freeC   []*scriptCall
}

// place is the key by which groups share a script call: the slot, the same for all of a single server; the ordinal of
// the group within its bucket; and the script.
type place struct {
	slot, part    int
	whole, byFlow bool
}

var trips = sync.Pool{New: func() any { return &trip{last: map[string]*group{}, places: map[place]*scriptCall{}} }}

// sender sends a server's batches through rdb. Where it may suffice to read the tokens of a bucket, the first round
// trip reads only these. If they turn out not to suffice, the bucket is asked again, whole, in the next round trip.
func (c *Client) sender(s *node, rdb redis.UniversalClient) engine.Sender[ask] {
	return func(ctx context.Context, batch []*engine.Request[ask]) error {
		t := trips.Get().(*trip)
		defer t.free()
		t.c = c
		t.s = s
		t.rdb = rdb
		t.ctx = ctx
		var shown error
		for _, r := range batch {
			if r.Body.cmd != nil {
				t.cmds = append(t.cmds, r.Body.cmd)
			} else {
				t.group(r)
			}
		}
		commands := len(t.cmds)
		for t.place(); len(t.cmds) > 0; t.place() {
			t.asked = time.Now()
			engine.Exec(ctx, rdb, t.cmds)
			for _, cmd := range t.cmds {
				if err := evidence(cmd.Err()); shown == nil {
					shown = err
				}
			}
			if commands > 0 {
				commands = 0
				t.answerCommands(batch)
			}
			for _, call := range t.calls {
				t.read(call)
			}
			t.resolve()
			t.cmds = t.cmds[:0]
		}
		t.finishUnclaimed()
		return shown
	}
}

// group adds takes to the entry of their bucket.
func (t *trip) group(r *engine.Request[ask]) {
	g := t.last[r.Body.key]
	if g == nil || g.kind != r.Body.kind || !g.fits(&r.Body) {
		part := 0
		if g != nil { // asked whole it misses nothing, so that the next part doesn't overtake it
			part, g.whole = g.part+1, true
		}
		if n := len(t.freeG); n > 0 {
			g, t.freeG = t.freeG[n-1], t.freeG[:n-1]
		} else {
			g = &group{}
		}
		g.key = r.Body.key
		g.kind = r.Body.kind
		g.info = r.Body.info
		g.hold = r.Body.hold
		g.inLine = r.Body.line != nil
		g.byFlow = r.Body.byFlow
		g.unopen = g.byFlow && ofTemplate(g.kind) && (g.info.terms == nil || g.kind.outdated(g.info))
		g.part, g.isolated = part, r.Body.bucket.refused.holds(time.Now())
		g.slot = t.c.nodes.callGroup(g.key)
		g.narrow = t.c.nodes.moving(g.slot).holds(time.Now())
		t.groups = append(t.groups, g)
		t.last[r.Body.key] = g
	}
	g.add(r)
}

// place puts the groups that aren't done into script calls.
func (t *trip) place() {
	t.freeC = append(t.freeC, t.calls...)
	t.calls = t.calls[:0]
	clear(t.places)
	for _, g := range t.groups {
		if g.done {
			continue
		}
		if _, isLazy := g.kind.(*lazy); isLazy && g.narrow && g.override == nil {
			g.override = lua.OverrideCommand(t.ctx, g.key)
			t.cmds = append(t.cmds, g.override)
			continue
		}
		words := g.kind.takes(g)
		isolated := g.isolated || g.narrow || words.Lazy != nil
		byFlow := g.byFlow && !g.narrow                  // the keys of the plan may be missing where the slot moves
		words.Whole = g.whole || asBudget(g.kind) != nil // the tokens alone don't show what a budget is owed
		opens := byFlow && g.unopen
		byFlow = byFlow && !opens
		at := place{g.slot, g.part, words.Whole || opens, byFlow}
		call := t.places[at]
		if call == nil || isolated || len(call.groups) == mostBuckets {
			call = t.call()
			if !isolated {
				t.places[at] = call
			}
		}
		call.byFlow = byFlow
		if byFlow {
			call.groups, call.shares = append(call.groups, g), append(call.shares, g.byFlows())
			continue
		}
		words.Runs = g.runs
		words.InLine = g.inLine
		words.Hold = g.hold
		words.Terms = g.whole
		if opens {
			words.Runs, words.InLine = nil, false
			words.Whole, words.Terms = true, true
		}
		call.groups, call.words = append(call.groups, g), append(call.words, words)
	}
	slices.SortStableFunc(t.calls, func(a, b *scriptCall) int { return a.groups[0].part - b.groups[0].part })
	for _, call := range t.calls {
		var err error
		call.text = t.text || !call.lazy() && !call.loaded(t.s).Load()
		call.cmd, err = call.command(t.ctx)
		if err != nil {
			for _, g := range call.groups {
				t.answer(g, lua.TakesReply{Err: err})
			}
			continue
		}
		t.cmds = append(t.cmds, call.cmd)
	}
}

func (t *trip) call() *scriptCall {
	if len(t.freeC) == 0 {
		t.freeC = append(t.freeC, &scriptCall{})
	}
	last := len(t.freeC) - 1
	call := t.freeC[last]
	t.freeC = t.freeC[:last]
	call.groups, call.words = call.groups[:0], call.words[:0]
	call.shares = call.shares[:0]
	call.byFlow = false
	t.calls = append(t.calls, call)
	return call
}

// read answers the groups of a call, or leaves them for another round trip.
func (t *trip) read(call *scriptCall) {
	if call.cmd == nil {
		return
	}
	err := call.cmd.Err()
	switch {
	case err == nil: // spares allocations
	case lua.IsNoScript(err) && !call.text:
		t.text = true
		call.loaded(t.s).Store(false)
		return
	case redis.HasErrorPrefix(err, "NOPERM ") && len(call.groups) > 1:
		// Nothing ran. Separate calls show which keys are forbidden.
		for _, g := range call.groups {
			g.isolated = true
		}
		return
	case lua.IsTryAgain(err) && t.narrow(call): // nothing ran
		return
	case redis.HasErrorPrefix(err, "NOPERM "):
		t.c.buckets.obtain(call.groups[0].key).refused.claim(aloneFor, time.Now())
	}
	if call.text && err == nil && !call.lazy() {
		call.loaded(t.s).Store(true)
	}
	replies, err := call.replies(err)
	for i, g := range call.groups {
		switch {
		case err != nil:
			t.answer(g, lua.TakesReply{Err: err})
		case call.byFlow && g.unopened(&replies[i]):
		case replies[i].Missed:
			g.whole = true
		case replies[i].Schedule != "":
			t.reschedule(g, replies[i].Schedule)
		case replies[i].Ended:
			t.sweep(g)
		case !call.byFlow && call.words[i].Existing && errors.Is(replies[i].Err, lua.ErrUnknownBucket):
			t.create(g)
		case g.unopen && !g.narrow && replies[i].Err == nil:
			t.open(g, &replies[i])
		default:
			t.answer(g, replies[i])
		}
	}
}

// narrow has the groups of a call asked again, each by itself and narrowly, since a Cluster's server misses some of the
// call's keys while their slot moves. It reports whether that changes the call.
func (t *trip) narrow(call *scriptCall) bool {
	first := call.groups[0]
	if first.narrow { // then it is the only one
		return false
	}
	for _, g := range call.groups {
		g.narrow = true
	}
	t.c.nodes.moving(first.slot).claim(movingFor, time.Now())
	return len(call.groups) > 1 || first.kind != (configured{}) || call.byFlow
}

// mostSchedules is how often a budget is asked with another schedule, each of the time of the last reply.
const mostSchedules = 4

// reschedule has a budget asked again with the schedule that a reply requires.
func (t *trip) reschedule(g *group, schedule string) {
	g.schedule = schedule
	g.tries++
	if g.tries > mostSchedules {
		t.answer(g, lua.TakesReply{Err: fmt.Errorf("%w: the server's clock changes too fast for the schedule of bucket %q",
			lua.ErrBadReply, g.key)})
	}
}

// sweep ends what has run out in a budget that has too few tokens, and has it asked again.
func (t *trip) sweep(g *group) {
	g.swept = true
	if err := lua.SweepOne(t.ctx, t.rdb, g.key, lua.SweepAtOnce); err != nil {
		t.answer(g, lua.TakesReply{Err: err})
	}
}

// resolve applies the overrides of lazy buckets that were read. If the override of a bucket can't be read, the bucket
// is asked as usual: the script then reads the override itself.
func (t *trip) resolve() {
	for _, g := range t.groups {
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

// create allows the creation of a template's bucket that was found missing. If the template is bounded, the bucket is
// counted first, on another server: should its creation fail, there are fewer buckets, not more, than its max_keys.
func (t *trip) create(g *group) {
	r := g.kind.(*refilled)
	if r.rule.MaxKeys == 0 {
		g.create = true
		return
	}
	err := r.template.Claim(t.ctx, t.rdb, g.key)
	g.create = err == nil
	if err != nil {
		t.answer(g, lua.TakesReply{Err: err})
	}
}

// answer distributes the reply to a group among its takes, as if they had been made one by one.
func (t *trip) answer(g *group, reply lua.TakesReply) {
	g.done = true
	t.observe(g, &reply)
	if g.opened && reply.Err == nil {
		t.c.reopen(g.kind, g.key, &lua.TakeReply{Taken: g.taken(&reply), Remaining: reply.Remaining, Terms: reply.Terms})
	}
	i := g.info
	if reply.Err == nil && (reply.Terms != nil || g.whole) {
		i = t.c.applyTakes(g, &reply, t.asked)
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

// observe applies the parts of a reply that are for no take: lost tokens, the version of the templates, and the sets
// that the bucket has to be entered in.
func (t *trip) observe(g *group, reply *lua.TakesReply) {
	if reply.Err != nil {
		if !answered(reply.Err) && !notRun(reply.Err) {
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

// portions divides the reply to a group among its takes, in their order.
type portions struct {
	g     *group
	reply *lua.TakesReply
	run   int   // that of the next take
	nth   int64 // the place of the next take in its run
	left  int64 // tokens that the bucket had before the next take
}

// portionsOf returns the portions of a reply before the first take.
func portionsOf(g *group, reply *lua.TakesReply) portions {
	return portions{g: g, reply: reply, left: reply.Remaining + g.taken(reply)}
}

// give sets the reply of the next take.
func (p *portions) give(a *ask) {
	switch {
	case p.reply.OK && p.reply.Runs == nil:
		a.reply = lua.TakeReply{OK: true, Taken: a.total()}
	case a.line != nil:
		a.reply = lua.TakeReply{OK: p.reply.OK}
		a.runs = append([]lua.RunReply(nil), p.reply.Runs...)
		for n, r := range p.reply.Runs {
			a.reply.Taken += p.g.runs[n].N * r.Taken
			a.reply.Free += r.Free
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
		return lua.TakeReply{OK: r.Taken > 0, Taken: r.Taken, Wait: r.Wait, Free: r.Free}
	case nth < r.Taken:
		return lua.TakeReply{OK: true, Taken: run.N, Free: freeOf(run.N, r, nth)}
	}
	return lua.TakeReply{Wait: r.Wait}
}

// open applies the reply of a call that opened a bucket whose flows are served next, if it turns out to have some.
func (t *trip) open(g *group, reply *lua.TakesReply) {
	t.observe(g, reply)
	opened := lua.TakeReply{OK: true, Terms: reply.Terms, Remaining: reply.Remaining, Refilled: reply.Refilled}
	g.info = t.c.remember(g.key, 0, policy.Leave{}, &opened, t.asked)
	g.unopen = false
	g.opened = true
	g.whole = true
	g.byFlow = g.info.divided()
}

// unopened reports whether a group that was asked by flows has to be asked again, because its bucket is a template's
// and turned out to be missing or full. It marks the group so that the bucket is opened first. If the bucket is missing
// although it was opened before, the group is then asked without regard to flows.
func (g *group) unopened(reply *lua.TakesReply) bool {
	missing := errors.Is(reply.Err, lua.ErrUnknownBucket)
	if !ofTemplate(g.kind) || !missing && !reply.Missed {
		return false
	}
	g.unopen = !g.opened
	g.byFlow = g.byFlow && g.unopen
	return true
}

// taken is how many tokens the takes of a group got.
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

// answerCommands ends the requests of commands that were answered.
func (t *trip) answerCommands(batch []*engine.Request[ask]) {
	for _, r := range batch {
		a := &r.Body
		if a.cmd == nil {
			continue
		}
		if err := a.cmd.Err(); err != nil && !notRun(err) {
			t.c.stats.lost.Add(a.cost)
		}
		if !r.Answer() {
			t.unclaimed = append(t.unclaimed, r)
		}
	}
}

// entry is a template's bucket that is to be entered in the active set, and counted, on another server.
type entry struct {
	template *lua.Template
	key      string
	till     int64 // when the bucket expires, in seconds
}

// finishUnclaimed does the work that has no waiter: it returns tokens taken for callers that left, and enters buckets.
// If an entry fails, the bucket's next take that is denied or asks for the policy enters it again.
func (t *trip) finishUnclaimed() {
	if len(t.unclaimed) == 0 && len(t.entries) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.ctx), engine.Grace)
	defer cancel()
	by := engine.NewCommands(t.rdb, 1) // the same round trip for all
	var wg sync.WaitGroup
	for _, r := range t.unclaimed {
		wg.Go(func() {
			switch a := &r.Body; {
			case a.cmd != nil && a.undo != nil && a.cmd.Err() == nil:
				a.undo(ctx, by, a.cmd)
			case a.cmd == nil && a.err == nil && a.reply.Taken > 0:
				t.c.giveBackBy(ctx, by, a.kind, a.key, backOf(&a.reply, a.info, a.flow))
			}
		})
	}
	wg.Wait()
	for _, e := range t.entries {
		_ = e.template.Enter(ctx, t.rdb, e.key, e.till)
	}
}

func (t *trip) free() {
	for _, g := range t.groups {
		clear(g.asks)
		*g = group{asks: g.asks[:0], runs: g.runs[:0], flows: g.flows[:0]}
	}
	t.freeG, t.freeC = append(t.freeG, t.groups...), append(t.freeC, t.calls...)
	clear(t.unclaimed)
	clear(t.last)
	t.groups = t.groups[:0]
	t.calls = t.calls[:0]
	t.cmds = t.cmds[:0]
	t.unclaimed, t.entries = t.unclaimed[:0], t.entries[:0]
	t.c = nil
	t.s = nil
	t.rdb = nil
	t.ctx = nil
	t.text = false
	trips.Put(t)
}

// applyTakes remembers the reply to the takes of a group. Of its denials it remembers that of the smallest take.
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
