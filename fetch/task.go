package fetch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// task is a caller's call about one bucket. It makes one or more requests. It is a lua.Client whose commands share the
// call's budget.
type task struct {
	budget // began is zero after the first request or pause

	c      *Client
	key    string
	bucket *bucket
	node   *node
	kind   kind
	info   *info  // what the Client knows about the bucket
	flow   string // the flow that it takes for; empty if the caller names none
	got    answer // the last answer
	brief  bool   // the rest of the calls is optional: they don't wait for a slot that moves
	quits  bool   // calls that wait for a slot that moves end when the Client is closed
	moving bool   // the last call was refused because the bucket's slot moves
}

var _ lua.Client = (*task)(nil)

// begin makes a task for calls about a bucket.
func (c *Client) begin(p budget, key string) *task {
	t := c.plain(p, key)
	t.bucket = c.buckets.find(key)
	t.info = t.bucket.known.Load()
	t.kind = c.templates.of(t)
	return t
}

// plain makes a task for commands on a key. The key need not be that of a bucket.
func (c *Client) plain(p budget, key string) *task {
	t := tasks.Get().(*task)
	t.budget = p
	t.c = c
	t.key = key
	if p.cfg != nil {
		t.flow = p.cfg.flow
	}
	t.node = c.nodes.of(key)
	t.toNode(t.node)
	return t
}

// tasks keeps empty tasks for reuse. Without it, a take costs a third more.
var tasks = sync.Pool{New: func() any { return new(task) }}

// end releases the task for reuse. Nothing may refer to the task or to its answer any more.
func (t *task) end() {
	*t = task{}
	tasks.Put(t)
}

// do sends a request to the bucket's server and waits for the reply. It stores the answer to takes in the task. The
// error may be an error that the server returned.
func (t *task) do(a *ask) error {
	if t.node.lost != nil {
		return t.node.lost
	}
	q, now := t.node.queue, t.began
	t.began = time.Time{}
	if now.IsZero() {
		now = time.Now()
	}
	r := q.Request()
	r.Body = *a
	w := engine.Wait{Began: now, Deadline: t.deadline, Latest: t.latest}
	if err := q.Do(t.ctx, r, w); err != nil {
		if !errors.Is(err, engine.ErrClosed) {
			t.c.stats.abandoned.Add(1)
		}
		if t.moving { // a repeated try has only the rest of the time, which shows nothing about the distance
			return err
		}
		return t.distance.late(time.Since(now), err)
	}
	t.deadline = q.PutOff(w)
	refused := r.Body.err
	if cmd := r.Body.cmd; cmd != nil {
		refused = cmd.Err()
	} else {
		t.got = answer{reply: r.Body.reply, runs: r.Body.runs, info: r.Body.info}
	}
	q.Release(r)
	t.moving = lua.IsTryAgain(refused)
	return refused
}

// Process implements lua.Client. After an error the command must not be read, since it may be under way.
func (t *task) Process(_ context.Context, cmd redis.Cmder) error { return t.do(&ask{cmd: cmd}) }

// undoable is a lua.Client for commands that take tokens. It sends them as its task does. If the caller leaves before
// the reply, undo is called with the command.
type undoable struct {
	*task
	cost int64 // tokens that a command may take although its reply is lost
	undo func(ctx context.Context, c lua.Client, cmd redis.Cmder)
}

// Process implements lua.Client.
func (u *undoable) Process(_ context.Context, cmd redis.Cmder) error {
	return u.do(&ask{cmd: cmd, cost: u.cost, undo: u.undo})
}

// takes makes takes from the bucket, and stores the answer in the task.
func (t *task) takes(a *ask) error {
	a.bucket = t.bucket
	a.key = t.key
	a.kind = t.kind
	a.info = t.info
	a.byFlow = a.total() > 0 && t.asksByFlow(a.flow)
	if t.kind.outdated(t.info) { // the script resolves a leave in percent, under the policy that it puts in force
		a.allKeys = true
	} else {
		a.resolve(t.info.limit())
	}
	return t.do(a)
}

// attempt makes a call, unless the breaker of its server is open. If again is set, the call is idempotent and is made
// once more when its connection fails: the reply was lost, or the call never arrived. If the time that is left is too
// short for that, the failed connection is the error. Any call is also made once more if its bucket turns out to belong
// to a template that was just published.
func (t *task) attempt(again bool, call func() error) error {
	if err := t.node.open(t.key); err != nil {
		return err
	}
	err := t.unsplit(call)
	why := causeOf(err).reason
	if again && (why == ReasonConnection || why == ReasonPool) && t.ctx.Err() == nil {
		if second := t.unsplit(call); causeOf(second).reason != ReasonDistance {
			err = second
		}
	}
	if errors.Is(err, lua.ErrUnknownBucket) {
		if found, readErr := t.c.templates.unknown(t); readErr != nil {
			err = readErr
		} else if found != nil {
			t.kind = found
			err = t.unsplit(call)
		}
	}
	return failure(t.ctx, err)
}

const (
	// splitFirst is the longest pause after the first call that a Cluster's server refused because the bucket's slot
	// moves. It doubles with each call, up to splitMost. The actual pause is random, and at least half as long.
	splitFirst = 4 * time.Millisecond
	splitMost  = 32 * time.Millisecond
	// splitTime bounds the time for which a call without a deadline is repeated. It is as long as the engine awaits a
	// reply.
	splitTime = time.Minute
)

// unsplit makes a call of a task, and makes it again while the bucket's slot moves. It stops when the task has no time
// for another try.
func (t *task) unsplit(call func() error) error {
	if t.brief {
		return call()
	}
	done := t.ctx.Done()
	if t.quits {
		done = t.c.life.quit
	}
	return whileSplit(t.ctx, done, t.deadline, t.c.jitter, call)
}

// whileSplit makes a call, and makes it again while the servers of a Cluster refuse it. They refuse it while the
// bucket's slot moves and no server has all keys of the bucket. A refused call has not run. whileSplit stops before
// end, or when done is closed. If end is zero, it is splitTime after the first refusal. If done is closed because ctx
// has ended, the error is that of ctx.
func whileSplit(ctx context.Context, done <-chan struct{}, end time.Time, jitter func() float64,
	call func() error) error {
	for n := 0; ; n++ {
		err := call()
		if !lua.IsTryAgain(err) {
			return err
		}
		if end.IsZero() {
			end = time.Now().Add(splitTime)
		}
		pause := timing.Doubled(splitFirst, n, splitMost)
		if time.Until(end) < 2*pause {
			return err
		}
		if !timing.Sleep(done, timing.Between(jitter, pause/2, pause)) {
			return cmp.Or(ctx.Err(), err)
		}
	}
}

// answer is the reply to a take. The task owns it; the next request overwrites it.
type answer struct {
	reply  lua.TakeReply
	runs   []lua.RunReply // for the runs of a line
	info   *info
	source Source
	loan   *loan // of the share that gave the tokens, in degraded mode local; nil otherwise
	err    error
}

// ask makes takes from the bucket by call. If the bucket denies them and its refill is overdue, ask refills the bucket.
// If the bucket then has at least want tokens, ask makes the takes again.
func (t *task) ask(want int64, again bool, call func() error) *answer {
	a := t.put(again, call)
	if a.err != nil || a.reply.OK {
		return a
	}
	if more, ours := t.rescue(want, &a.reply); more && t.affords(time.Duration(t.distance)) {
		a = t.put(again, call) // if this fails, tokens may have been taken, so the denial is no answer any more
		if a.err == nil && ours {
			a.source.Kind = SourceRescued
		}
	}
	return a
}

// put makes takes from the bucket by call, which stores the answer in the task. It returns the stored answer.
func (t *task) put(again bool, call func() error) *answer {
	if err := t.attempt(again, call); err != nil {
		t.got = answer{err: err}
	}
	return &t.got
}

// answer stores an answer in the task.
func (t *task) answer(a answer) *answer {
	t.got = a
	return &t.got
}

// askRun asks for a run of takes.
func (t *task) askRun(run policy.Run) *answer {
	now := t.began
	if now.IsZero() {
		now = time.Now()
	}
	var a ask // as a literal it would have two places on the stack
	a.flow = t.flow
	a.run = run
	a.allKeys = !t.info.fresh(now) || t.info.denied != nil && now.Sub(t.info.asOf) < denialMaxAge
	want := run.N + run.Leave.Of(t.info.limit())
	return t.ask(want, false, func() error { return t.takes(&a) })
}

// reopen opens a bucket again in two cases:
//
//   - The reply of a script that followed kind.open shows that the bucket was full until then. A refill between both
//     calls may have removed the full bucket from the active set. Then no further refill would follow.
//   - The bucket turns out to belong to a template that this Client does not know yet. A take without its template does
//     not enter the bucket in the active set.
//
// If this fails, or the Client is closed, a later take opens the bucket: the next take that is denied or asks for the
// policy.
func (c *Client) reopen(k kind, key string, reply *lua.TakeReply) {
	if reply.Terms == nil || !reply.Terms.Template || asBudget(k) != nil { // no refill follows a take of a budget
		return
	}
	full := reply.Taken > 0 && reply.Taken+reply.Remaining >= reply.Terms.Capacity
	unknown := k == (configured{})
	if unknown && c.templates.fixed || !unknown && !full { // a Client with templates of its own reads no others
		return
	}
	c.life.spawn(func() {
		t := c.begin(c.internalBudget(context.Background()), key)
		found, _ := c.templates.unknown(t)
		if found == nil && t.kind == (configured{}) { // they were read a moment ago, perhaps just before the publication
			timing.Sleep(c.life.quit, templatesAgain)
			found, _ = c.templates.unknown(t)
		}
		if found != nil {
			t.kind = found
		}
		_ = t.kind.open(t, 0)
	})
}

// giveBack returns tokens to the bucket, unless the era in which they were taken has ended. An era of 0 matches any.
// The return is tried once, since a second try could return the tokens twice.
func (c *Client) giveBack(key string, back lua.ReturnCall) {
	if back.N == 0 {
		return
	}
	t := c.begin(c.internalBudget(context.Background()), key)
	ctx, cancel := context.WithDeadline(t.ctx, t.deadline)
	defer cancel()
	c.giveBackBy(ctx, t, t.kind, key, back)
}

// giveBackLater calls giveBack in a goroutine. It may be called only from goroutines that Close waits for.
func (c *Client) giveBackLater(key string, back lua.ReturnCall) {
	if back.N > 0 {
		c.life.running.Go(func() { c.giveBack(key, back) })
	}
}

// giveBackBy does the work of giveBack through a lua.Client, for a bucket of kind k.
func (c *Client) giveBackBy(ctx context.Context, by lua.Client, k kind, key string, back lua.ReturnCall) {
	end, _ := ctx.Deadline()
	var reply lua.ReturnReply
	err := whileSplit(ctx, ctx.Done(), end, c.jitter, func() (err error) {
		reply, err = k.giveBack(ctx, by, key, back)
		return err
	})
	c.moreTokens(key)
	if err != nil {
		c.stats.lost.Add(back.N)
		return
	}
	c.stats.clamped.Add(reply.Clamped)
	c.stats.returned.Add(back.N)
}

// errTooLate returns the error of a Wait whose tokens come after its deadline.
func errTooLate(n int64, key string, due, left time.Duration) error {
	return fmt.Errorf("%w: %d tokens of bucket %q are due in %s, the deadline is in %s", ErrDeadline, n, key, due, left)
}
