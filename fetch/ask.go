package fetch

import (
	"context"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/engine"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// ask is one request to a server: a command, or, if cmd is nil, takes of a bucket.
type ask struct {
	cmd  redis.Cmder
	cost int64                                                    // tokens that the command may take without a reply
	undo func(ctx context.Context, c lua.Client, cmd redis.Cmder) // undoes a command after its caller has left; may be nil

	bucket  *bucket
	key     string
	flow    string // the flow of all takes; only with byFlow
	byFlow  bool   // the bucket has flows, as far as is known
	kind    kind
	info    *info         // of the bucket; updated with the reply
	run     policy.Run    // one take; if there is neither run nor line, the bucket is only opened
	line    []policy.Run  // several takes; after a denied one, no more of them are made
	hold    time.Duration // for how long tokens will be held by the script for which the bucket is opened
	allKeys bool          // ask with all keys: the policy is wanted, or a denial is likely

	reply lua.TakeReply
	runs  []lua.RunReply // of the line
	err   error
}

// resolve turns leaves in percent into numbers of tokens, if the capacity is known. If it is unknown, resolve sets
// allKeys for such a leave, because the reply to a call with only the key of the tokens doesn't have the capacity.
func (a *ask) resolve(capacity int64) {
	if capacity == 0 {
		a.allKeys = a.allKeys || a.run.Leave.Percent > 0 || len(a.line) > 0 && a.line[0].Leave.Percent > 0
		return
	}
	a.run.Leave = policy.Leave{Tokens: a.run.Leave.Of(capacity)}
	for i := range a.line {
		a.line[i].Leave = policy.Leave{Tokens: a.line[i].Leave.Of(capacity)}
	}
}

// total returns how many tokens are asked for.
func (a *ask) total() int64 {
	sum := a.run.N * a.run.Count
	for _, run := range a.line {
		sum += run.N * run.Count
	}
	return sum
}

// group is one entry of a script call: the takes of one bucket, in the order of their arrival.
type group struct {
	key      string
	slot     int // the same for all buckets of a single server
	kind     kind
	info     *info
	hold     time.Duration
	asks     []*engine.Request[ask]
	runs     []policy.Run
	byFlow   bool     // the takes name their flows
	flows    []string // with byFlow: the flow of each run
	opened   bool     // with byFlow: a call has opened the bucket
	total    int64
	part     int // its number among the groups of the bucket, whose calls are made in this order
	inLine   bool
	allKeys  bool
	isolated bool // in a call of its own
	create   bool // the bucket was found missing, and may be created
	done     bool

	step     *lua.Step // has to be made before the next takes; nil: nothing has to be
	stepCmd  redis.Cmder
	stepText bool // stepCmd has the text of the step's script, since the server doesn't know it

	// opensFirst is set, with byFlow, for a template's bucket that may be missing or full. Then a call opens the bucket
	// before the takes are made.
	opensFirst bool
	// slotMoves is set while the bucket's slot moves. The group then has a call of its own, which names only the keys that
	// exist whenever the bucket does. The server may lack the keys of the bucket's plan.
	slotMoves bool

	// Of a budget.
	schedule string // the instants that the last reply required; empty at first
	swept    bool   // the expired reservations and leases were ended
	tries    int    // how often the bucket was asked with a schedule

	// Of a lazy bucket whose slot moves.
	override *redis.StringCmd // reads its override first
	own      *policy.Terms    // the override, or the template's policy; nil if the override can't be read
}

// fits reports whether a can join the group.
func (g *group) fits(a *ask) bool {
	if g.byFlow != a.byFlow || a.byFlow && len(g.runs) >= lua.MaxFlowRuns {
		return false
	}
	return !g.inLine && a.line == nil && g.total > 0 && a.total() > 0 && a.total() <= policy.MaxTokens-g.total
}

// opens reports whether the next call only opens the bucket.
func (g *group) opens() bool { return g.byFlow && g.opensFirst && !g.slotMoves }

// words returns the arguments of a script call for takes that don't name their flows.
func (g *group) words() lua.Takes {
	words := g.kind.takes(g)
	words.Hold = g.hold
	if g.opens() {
		words.Whole = true
		words.Terms = true
		return words
	}
	words.Runs = g.runs
	words.InLine = g.inLine
	words.Whole = g.allKeys || asBudget(g.kind) != nil // the tokens alone don't show which steps of a budget are due
	words.Terms = g.allKeys
	return words
}

// byFlows returns the group's takes with their flows.
func (g *group) byFlows() lua.FlowTakes {
	takes := lua.FlowTakes{Key: g.key, InLine: g.inLine, Terms: g.allKeys, Runs: make([]policy.FlowRun, len(g.runs))}
	if ofTemplate(g.kind) && !g.opened {
		takes.Below = g.info.limit()
	}
	for i, run := range g.runs {
		takes.Runs[i] = policy.FlowRun{Flow: g.flows[i], Run: run}
	}
	return takes
}

func (g *group) add(r *engine.Request[ask]) {
	a := &r.Body
	g.asks, g.allKeys = append(g.asks, r), g.allKeys || a.allKeys
	if a.line != nil {
		g.runs = append(g.runs, a.line...)
	} else if last := len(g.runs) - 1; last >= 0 && !a.run.UpTo && g.runs[last].N == a.run.N &&
		g.runs[last].Leave == a.run.Leave && !g.runs[last].UpTo && (!g.byFlow || g.flows[last] == a.flow) {
		g.runs[last].Count++
	} else if a.run.N > 0 {
		g.runs = append(g.runs, a.run)
	}
	for g.byFlow && len(g.flows) < len(g.runs) {
		g.flows = append(g.flows, a.flow)
	}
	g.total += a.total()
}
