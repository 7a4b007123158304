package election

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/timing"
)

var (
	// ErrNoLeader is returned by Leader when there is no leader.
	ErrNoLeader = errors.New("election: no leader")
	// ErrLeadershipLost is the cause of the end of lead's context if the term ended before the context of Run did.
	ErrLeadershipLost = errors.New("election: leadership lost")
	// ErrRunning is returned by Run when the elector is running already.
	ErrRunning = errors.New("election: already running")
)

var errNilLead = errors.New("election: lead must not be nil")

// maxBackoff is how many times RetryInterval doubles at most while campaigns fail.
const maxBackoff = 4

// Elector is a candidate in an election through etcd. Its methods are safe for concurrent use, but only one Run may run
// at a time. The package documentation says what a term guarantees.
//
// # States
//
//	             key written            no older key left
//	Candidate ──────────────▶ Standby ──────────────────▶ Leader
//	    ▲                        │                          │
//	    │   lease or key lost    │   lead returned, or      │
//	    └────────────────────────┴── lease or key lost ─────┘
//
// A candidate takes a lease and writes a key of its own under Prefix/lead/, bound to that lease. The candidate with the
// oldest key, by create revision, is the leader. Each standby waits until the key just before its own is deleted. Then
// it checks in one transaction that its own key still exists and that there is no older key.
//
// # What happens when …
//
//   - lead returns: the elector logs its error, if there is one, resigns, and campaigns again after RetryInterval (with
//     jitter).
//   - the context of Run ends: the context of lead ends, too. Run waits for lead, resigns and returns. The next
//     candidate wins within milliseconds.
//   - the leader dies or is cut off from etcd: its term ends SafetyMargin before its lease. Another candidate leads one
//     TTL after the last renewal at the earliest. If the members of etcd elect a new leader among themselves in that
//     time, it may take two TTL.
//   - etcd is unreachable or has no quorum: the term ends with its window; the elector campaigns again with growing
//     pauses.
//   - an operator deletes the leader's key or revokes its lease: the term ends when the watch or a renewal detects it,
//     and the candidate begins again with a new key.
//   - resigning fails: the lease expires. If etcd is available again before that, the next campaign first revokes the
//     lease.
//   - a watch stalls or is compacted: keys are read again at least once a TTL.
//   - etcd is restored or emptied: leaders that lost their keys end their terms. Keys that a restore brought back are
//     deleted when their leases expire. Then one candidate leads again. An epoch may be used a second time. A caller
//     that fences by epochs must record the highest epoch and use higher numbers, as package pool does.
type Elector struct {
	cfg     Config
	store   store
	log     hclog.Logger
	random  func() float64 // in [0, 1); for jitter
	running atomic.Bool

	// leftBehind are leases that could not be revoked when their candidacy ended. Only Run touches it.
	leftBehind []leaseID

	mu    sync.Mutex
	state State
}

// New returns an elector, which does nothing until Run is called. It fails if cfg is not valid.
func New(cfg Config) (*Elector, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return newElector(cfg, newEtcdStore(cfg.Client, cfg.Prefix)), nil
}

func newElector(cfg Config, s store) *Elector {
	return &Elector{cfg: cfg, store: s, log: loggerOr(cfg.Logger), random: rand.Float64}
}

// Run campaigns, calls lead while this candidate leads, and campaigns again, until ctx ends. Then it returns nil. After
// a failure of etcd it tries again. It returns an error only if lead is nil or another Run is running.
//
// The context of lead ends when ctx ends. It also ends when the term can't be trusted any longer, and then its cause is
// [ErrLeadershipLost]. lead must return soon after its context has ended. Run resigns only after lead has returned. If
// lead returns earlier, Run logs its error, if there is one, resigns, and campaigns again after a pause. Run never
// makes two calls of lead at the same time.
//
// After ctx has ended and lead has returned, Run returns within ResignTimeout, even if etcd doesn't answer.
func (e *Elector) Run(ctx context.Context, lead func(ctx context.Context, term Term) error) error {
	if lead == nil {
		return errNilLead
	}
	if !e.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer e.running.Store(false)
	defer e.setRole(RoleIdle)
	failures := 0
	for ctx.Err() == nil {
		e.setRole(RoleCandidate)
		if e.runTerm(ctx, lead) {
			failures = 0
		} else {
			failures = min(failures+1, maxBackoff)
		}
		timing.Sleep(ctx.Done(), e.jitter(e.cfg.RetryInterval<<failures))
	}
	return nil
}

// Leader returns the candidate whose key is the oldest in etcd, or [ErrNoLeader]. That candidate is elected, but may
// not have detected it yet, or its term may not be trusted any more. ctx bounds the call.
func (e *Elector) Leader(ctx context.Context) (Leader, error) { return e.store.leader(ctx) }

// runTerm runs one candidacy, from the grant of a lease to its revocation. It reports whether the candidate's key was
// written.
func (e *Elector) runTerm(ctx context.Context, lead func(context.Context, Term) error) bool {
	s, err := e.openSession(ctx)
	if err != nil {
		if ctx.Err() == nil {
			e.observe(err)
		}
		return false
	}
	e.revokeLeftBehind(ctx)

	key, epoch, err := e.enrol(s)
	if err == nil {
		if revision, won := e.campaign(s, key, epoch); won {
			term := Term{Epoch: epoch, Identity: e.cfg.Identity, Key: key, trust: s.trust}
			e.lead(s, term, revision, lead)
		}
	}
	s.close()
	e.setRole(RoleCandidate)
	e.resign(ctx, s.lease, key, epoch)
	return err == nil
}

// enrol writes the candidate's key. The key may exist even after an error. Revoking the lease deletes the key.
func (e *Elector) enrol(s *session) (key string, epoch int64, err error) {
	ctx, cancel := context.WithTimeout(s.ctx, e.requestTimeout(e.cfg.TTL))
	defer cancel()
	key, epoch, err = e.store.enrol(ctx, s.lease, e.cfg.Identity)
	if err != nil && s.ctx.Err() == nil {
		e.observe(err)
	}
	return key, epoch, err
}

// campaign waits until no key is older than ours. It returns a revision at which there was no older key and our key
// existed. It returns false if the session ends first.
func (e *Elector) campaign(s *session, key string, epoch int64) (revision int64, won bool) {
	for s.ctx.Err() == nil {
		prev, revision, ok := e.predecessor(s.ctx, s, key, epoch)
		switch {
		case !ok:
		case prev == "":
			return revision, s.ctx.Err() == nil && s.trust.remaining(time.Now()) > 0
		default:
			e.setRole(RoleStandby)
			e.awaitDeleted(s.ctx, prev, revision+1)
		}
	}
	return 0, false
}

// lead calls the function lead for a term that was won at revision, and returns when that function has returned.
func (e *Elector) lead(s *session, term Term, revision int64, lead func(context.Context, Term) error) {
	s.tasks.Go(func() { e.watchKey(s, term, revision) })
	e.startTerm(term)
	e.log.Info("leading", "epoch", term.Epoch, "identity", term.Identity)
	err := lead(s.ctx, term)
	cause := context.Cause(s.ctx)
	e.log.Info("term ended", "epoch", term.Epoch, "identity", term.Identity, "lost", errors.Is(cause, ErrLeadershipLost))
	logLeadError(e.log, term, cause, err)
}

// logLeadError logs the error of lead, unless it only says that its context ended.
func logLeadError(log hclog.Logger, term Term, cause, err error) {
	if err == nil || cause != nil && (errors.Is(err, context.Canceled) || errors.Is(err, cause)) {
		return
	}
	log.Error("lead failed", "epoch", term.Epoch, "error", err)
}

// watchKey ends the session as soon as the leader's key, which existed at revision, is found deleted.
func (e *Elector) watchKey(s *session, term Term, revision int64) {
	for s.upkeep.Err() == nil {
		if e.awaitDeleted(s.upkeep, term.Key, revision+1) {
			s.end("leader key was deleted")
			return
		}
		if _, at, ok := e.predecessor(s.upkeep, s, term.Key, term.Epoch); ok {
			revision = at
		}
	}
}

// predecessor reads the key just before ours. If our key was deleted, it ends the session. After a failure it pauses
// before it returns false.
func (e *Elector) predecessor(ctx context.Context, s *session, key string, epoch int64) (prev string, revision int64,
	ok bool) {
	reading, cancel := context.WithTimeout(ctx, e.requestTimeout(e.cfg.TTL))
	defer cancel()
	prev, revision, err := e.store.ahead(reading, key, epoch)
	switch {
	case ctx.Err() != nil:
		return "", 0, false
	case errors.Is(err, errKeyGone):
		s.end("key was deleted")
		return "", 0, false
	case err != nil:
		e.observe(err)
		timing.Sleep(ctx.Done(), e.jitter(e.cfg.RetryInterval))
		return "", 0, false
	}
	e.observe(nil)
	return prev, revision, true
}

// awaitDeleted waits until key is deleted, at or after the revision from, and then returns true. It returns false after
// a TTL, because a watch on a half-dead connection may stay silent. After a failure it pauses and returns false, too.
// In both cases the caller reads the keys again.
func (e *Elector) awaitDeleted(ctx context.Context, key string, from int64) bool {
	waiting, cancel := context.WithTimeout(ctx, e.cfg.TTL)
	defer cancel()
	err := e.store.waitDeleted(waiting, key, from)
	if err != nil && waiting.Err() == nil {
		e.log.Debug("watch failed", "key", key, "error", err)
		timing.Sleep(ctx.Done(), e.jitter(e.cfg.RetryInterval))
	}
	return err == nil
}

// resign deletes the key of this candidacy, if it was written, and revokes the lease. It has a time limit of its own,
// because the context of Run may have ended.
func (e *Elector) resign(ctx context.Context, lease leaseID, key string, epoch int64) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.cfg.ResignTimeout)
	defer cancel()
	var err error
	if epoch != 0 {
		err = e.store.remove(ctx, key, epoch)
	}
	if revokeErr := e.store.revoke(ctx, lease); revokeErr != nil {
		e.leftBehind = append(e.leftBehind, lease)
		e.observe(errors.Join(err, revokeErr))
	}
}

// revokeLeftBehind tries once more to revoke leases that could not be revoked before. Otherwise their keys would exist
// until the leases expire, and the candidates with younger keys would wait for that.
func (e *Elector) revokeLeftBehind(ctx context.Context) {
	for _, lease := range e.leftBehind {
		revoking, cancel := context.WithTimeout(ctx, e.requestTimeout(e.cfg.TTL))
		if err := e.store.revoke(revoking, lease); err != nil && ctx.Err() == nil {
			e.observe(err)
		}
		cancel()
	}
	e.leftBehind = nil
}

// requestTimeout returns the longest time that one request may take: a third of the trust window of a lease with this
// TTL. This leaves time for a second renewal if the first one hangs.
func (e *Elector) requestTimeout(ttl time.Duration) time.Duration {
	return (ttl - e.cfg.SafetyMargin) / 3
}

// jitter returns d give or take half of it.
func (e *Elector) jitter(d time.Duration) time.Duration { return timing.Between(e.random, d/2, d/2+d) }
