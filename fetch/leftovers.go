package fetch

import (
	"context"
	"sync"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
)

// mostLeftovers is the largest number of round trips that are made at once for the leftovers of a server's calls.
const mostLeftovers = 8

// leftovers are the work that remains when the requests of a trip are answered. No caller waits for it. It returns
// tokens taken for callers that left, and adds buckets to the sets of their templates. If that fails, the bucket's next
// take that is denied or asks for the policy adds the bucket.
type leftovers struct {
	c         *Client
	s         *node
	unclaimed []*engine.Request[ask]
	entries   []entry
}

// entry is a bucket of a template that has to be added to two sets on another server: the active set and the set of
// buckets that are counted.
type entry struct {
	template *lua.Template
	key      string
	till     int64 // when the bucket expires, in seconds
}

// do does the work. The commands for the leftovers of all calls to a server share round trips.
func (l *leftovers) do() {
	most := engine.Grace + engine.Trips*l.s.queue.RoundTrip()
	ctx, cancel := context.WithTimeout(context.Background(), most)
	defer cancel()
	var wg sync.WaitGroup
	for _, r := range l.unclaimed {
		wg.Go(func() { l.undo(ctx, &r.Body) })
	}
	for _, e := range l.entries {
		wg.Go(func() { _ = e.template.Enter(ctx, l.s.after, e.key, e.till) })
	}
	wg.Wait()
}

// undo returns the tokens of a request after its caller left.
func (l *leftovers) undo(ctx context.Context, a *ask) {
	switch {
	case a.cmd != nil && a.undo != nil && a.cmd.Err() == nil:
		a.undo(ctx, l.s.after, a.cmd)
	case a.cmd == nil && a.err == nil && a.reply.Taken > 0:
		l.c.giveBackBy(ctx, l.s.after, a.kind, a.key, backOf(&a.reply, a.info, a.flow))
	}
}
