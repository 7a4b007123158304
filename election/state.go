package election

import (
	"strconv"
	"time"
)

// Role is what a candidate is doing.
type Role uint8

// Roles.
const (
	RoleIdle      Role = iota // not running
	RoleCandidate             // has no key: it is about to campaign, or etcd doesn't answer
	RoleStandby               // has a key, and waits until all older keys are deleted
	RoleLeader                // leads under a trusted term
)

// String returns "idle", "candidate", "standby" or "leader".
func (r Role) String() string {
	switch r {
	case RoleIdle:
		return "idle"
	case RoleCandidate:
		return "candidate"
	case RoleStandby:
		return "standby"
	case RoleLeader:
		return "leader"
	}
	return "role " + strconv.Itoa(int(r))
}

// State is what a candidate is doing, at one instant.
type State struct {
	Role  Role
	Term  Term  // the current term; zero unless Role is RoleLeader
	Terms int64 // terms led so far, including the current one
	Err   error // why etcd is unavailable; nil while it answers
}

// State returns what the elector is doing. A term that isn't trusted any more doesn't count as leading, even if lead
// has not returned yet.
func (e *Elector) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state.at(time.Now())
}

func (s State) at(now time.Time) State {
	if s.Role == RoleLeader && s.Term.Remaining(now) <= 0 {
		s.Role, s.Term = RoleCandidate, Term{}
	}
	return s
}

func (e *Elector) setRole(r Role) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Role, e.state.Term = r, Term{}
}

func (e *Elector) startTerm(t Term) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.state.Role, e.state.Term = RoleLeader, t
	e.state.Terms++
}

// observe records whether etcd served the last request, and logs when that changes.
func (e *Elector) observe(err error) {
	e.mu.Lock()
	before := e.state.Err
	e.state.Err = err
	e.mu.Unlock()
	switch {
	case before == nil && err != nil:
		e.log.Warn("etcd unavailable", "error", err)
	case before != nil && err == nil:
		e.log.Info("etcd available again")
	}
}
