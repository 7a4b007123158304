package election

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
)

// StaticElector leads at once and asks nobody. Several of them all lead at the same time.
type StaticElector struct {
	identity string
	epoch    int64
	log      hclog.Logger
	running  atomic.Bool

	mu    sync.Mutex
	state State
}

var _ Candidate = (*StaticElector)(nil)

// Static returns an elector that leads at once: for race mode, where refillers need no election, and for tests. Its
// first term has the given epoch, each later one the next number. A nil logger means the default one, named
// "refiller.election".
func Static(identity string, epoch int64, logger hclog.Logger) *StaticElector {
	return &StaticElector{identity: identity, epoch: epoch, log: loggerOr(logger)}
}

// Run calls lead at once, and again, after a pause of half a second give or take half of it, whenever it returns while
// ctx lasts. Its context ends with ctx and never before. Errors of lead are logged. Run returns nil once ctx has ended
// and lead has returned.
func (e *StaticElector) Run(ctx context.Context, lead func(ctx context.Context, term Term) error) error {
	if lead == nil {
		return errNilLead
	}
	if !e.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer e.running.Store(false)
	for ctx.Err() == nil {
		term := e.start()
		err := lead(ctx, term)
		e.finish(term)
		logLeadError(e.log, term, context.Cause(ctx), err)
		sleep(ctx, jitter(rand.Float64, DefaultConfig().RetryInterval))
	}
	e.setRole(RoleIdle)
	return nil
}

// start begins the next term.
func (e *StaticElector) start() Term {
	e.mu.Lock()
	defer e.mu.Unlock()
	term := Term{Epoch: e.epoch + e.state.Terms, Identity: e.identity, trust: newTrust(time.Now().Add(1 << 62))}
	e.state = State{Role: RoleLeader, Term: term, Terms: e.state.Terms + 1}
	return term
}

func (e *StaticElector) finish(t Term) {
	t.trust.end()
	e.setRole(RoleCandidate)
}

func (e *StaticElector) setRole(r Role) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Role, e.state.Term = r, Term{}
}

// Leader returns this elector itself while it leads, else [ErrNoLeader].
func (e *StaticElector) Leader(context.Context) (Leader, error) {
	s := e.State()
	if s.Role != RoleLeader {
		return Leader{}, ErrNoLeader
	}
	return Leader{Identity: s.Term.Identity, Epoch: s.Term.Epoch}, nil
}

// State returns what the elector is doing.
func (e *StaticElector) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state
}
