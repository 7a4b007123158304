package election

import (
	"math"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// mechanism is a safeguard that the simulation can leave out, to show that the accounts detect its absence.
type mechanism string

const (
	nothing        mechanism = ""
	indexCheck     mechanism = "index check"
	elapsedCredit  mechanism = "credit by elapsed time"
	creditCap      mechanism = "credit cap"
	carry          mechanism = "carry"
	clockCheck     mechanism = "clock check"
	quarantine     mechanism = "quarantine"
	rollbackNotice mechanism = "notice of a rollback"
	rollbackKeep   mechanism = "tokens kept over a rollback"
	lossFull       mechanism = "a bucket full again after a loss"
	fenceOrder     mechanism = "fence order"
	stepOnce       mechanism = "an instant credited once"
	stepOfClock    mechanism = "instants after a clock that was put back"
	stepOfRollback mechanism = "instants after a rollback"
	indexCopy      mechanism = "copy of the index"
	strictRoom     mechanism = "room for what is held"
	twoIntervals   mechanism = "two intervals before a bucket is created"
	trustMargin    mechanism = "trust margin"
	leadIsAwaited  mechanism = "wait before resigning"
)

// mechanisms lists all mechanisms.
var mechanisms = []mechanism{
	indexCheck, elapsedCredit, creditCap, carry, clockCheck, quarantine, rollbackNotice, rollbackKeep, lossFull,
	fenceOrder,
	stepOnce, stepOfClock, stepOfRollback, indexCopy, strictRoom, twoIntervals, trustMargin, leadIsAwaited,
}

// before changes the call or the bucket so that the mechanism has no effect. If it returns true, o is the outcome of
// the call.
func (m mechanism) before(b *oracle.Bucket, call *policy.Call, now int64) (o policy.Outcome, done bool) {
	if m == twoIntervals && call.Version.Era == 0 && call.Create == policy.CreateLost {
		call.Create = policy.CreateInitial
	}
	if m == lossFull && call.Terms != nil {
		t := *call.Terms
		t.OnLoss = policy.LossEmpty
		call.Terms = &t
	}
	if b.Control == nil {
		return o, false
	}
	s := b.Control
	stored := policy.Version{Era: s.Era, Index: s.Index}
	switch m {
	case indexCheck:
		if call.Version.Before(stored) {
			call.Version = stored
		}
	case elapsedCredit:
		s.Last = now - s.Terms.Interval
	case creditCap:
		s.Terms.MaxElapsed = math.MaxInt32 * 1000
	case clockCheck:
		if now < s.Last-policy.ClockTolerance {
			return policy.Outcome{Status: policy.StatusEarly, Version: stored, Now: now, Last: s.Last,
				Fence: s.Terms.Fence, Step: s.Step}, true
		}
	case quarantine:
		s.Terms.OnRollback = policy.RollbackKeep
	case rollbackKeep:
		s.Terms.OnRollback = policy.RollbackEmpty
	case rollbackNotice:
		if stored.Before(call.Version) {
			call.Version = stored
		}
	case fenceOrder:
		if call.Terms != nil && call.Terms.Fence.Before(s.Terms.Fence) {
			s.Terms.Fence = policy.Fence{Epoch: -1}
		}
	case stepOnce:
		if s.Terms.Kind == policy.Stepped && call.Step > 0 {
			s.Step = min(s.Step, call.Step-1)
		}
	case indexCopy:
		if b.Index != nil {
			s.Index = *b.Index
		}
	case strictRoom:
		s.Terms.Strict = false
	}
	return o, false
}

// after undoes the effect of the mechanism on b.
func (m mechanism) after(b, before *oracle.Bucket, o policy.Outcome) {
	if b.Control == nil || before.Control == nil {
		return
	}
	switch {
	case m == carry:
		b.Control.Carry = 0
	case m == stepOfClock && o.Status == policy.StatusClock, m == stepOfRollback && o.Status == policy.StatusRolledBack:
		b.Control.Step = before.Control.Step
	}
}
