package dev

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/policy"
)

const (
	electTimeout = 5 * time.Second // for the leader to refill, before any other replica will do
	gapTimeout   = 10 * time.Second
)

// firstActive waits until the sample buckets exist, and returns the replica that refills them: in mode etcd the leader,
// if there is one soon.
func (s *sampleScene) firstActive(ctx context.Context) (*replica, error) {
	deadline, electedBy := time.Now().Add(readyTimeout), time.Now().Add(electTimeout)
	for {
		if r, elected := s.findActive(ctx); r != nil && (elected || time.Now().After(electedBy)) {
			if _, err := s.regions[0].peek(ctx, watched); err == nil {
				return r, nil
			}
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if time.Now().After(deadline) {
			log := s.replicas()[0].logPath()
			return nil, fmt.Errorf("dev: nobody refills within %s; %s ends:\n%s", readyTimeout, log, tail(log))
		}
	}
}

// findActive watches the replicas for three refill intervals and returns the one that refills, nil if none does, and
// whether it is meant to: it leads, or there is no election.
func (s *sampleScene) findActive(ctx context.Context) (r *replica, elected bool) {
	before := ask(ctx, s.replicas())
	pause(ctx, 3*policy.DefaultInterval)
	a := compare(before, ask(ctx, s.replicas()))
	for _, r := range s.replicas() {
		if r.name == a.active {
			return r, s.opts.Mode == config.ModeRace || a.leader != nil && a.leader.Identity == r.name && !a.racing
		}
	}
	return nil, false
}

// follow times the refills. In race mode each bucket has a winner of its own, so all that are refilled every interval
// are followed.
func (s *sampleScene) follow(ctx context.Context) {
	for ; ctx.Err() == nil; pause(ctx, lookEvery) {
		for _, f := range s.followed {
			if r, err := s.regions[0].peek(ctx, f.key); err == nil {
				f.observe(refilled{version: r.Version, at: r.Last})
			}
		}
	}
}

// around is the longest gap of a followed bucket around an instant.
func (s *sampleScene) around(at int64) (gap time.Duration, known, settled bool) {
	known, settled = true, true
	for _, f := range s.followed {
		d, isKnown, isSettled := f.around(at)
		gap, known, settled = max(gap, d), known && isKnown, settled && isSettled
	}
	return gap, known, settled
}

// killActive kills the replica that refills, again and again.
func (s *sampleScene) killActive(ctx context.Context) {
	ticker := time.NewTicker(s.opts.KillEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		r, _ := s.findActive(ctx)
		if r == nil || ctx.Err() != nil {
			continue
		}
		s.active.Store(&r.name)
		if p := r.up(); p != nil { // it hasn't just ended by itself
			s.killed.Store(int64(p.pid))
			p.kill()
		}
	}
}

// ended tells of the end of a replica and measures for how long nobody refilled.
func (s *sampleScene) ended(r *replica, pid int, how string) {
	text := fmt.Sprintf("%s (pid %d) ended: %s", r.name, pid, how)
	if s.killed.Load() == int64(pid) {
		text = fmt.Sprintf("killed %s (pid %d)", r.name, pid)
	}
	active := s.active.Load()
	refilled := active != nil && *active == r.name
	if refilled {
		text += ", which refilled"
	} else {
		text += ", which stood by"
	}
	s.tasks.Go(func() { s.measure(text, refilled) })
}

// measure waits until the gap around this moment is known, and tells.
func (s *sampleScene) measure(how string, counts bool) {
	ctx, cancel := context.WithTimeout(context.Background(), gapTimeout)
	defer cancel()
	r, err := s.regions[0].peek(ctx, watched)
	// Another replica may have refilled already; one that did comes no less than half an interval after the last one.
	at := r.Now - (policy.DefaultInterval / 2).Microseconds()
	for ; err == nil && ctx.Err() == nil && !s.stopping.Load(); pause(ctx, pollEvery) {
		gap, known, settled := s.around(at)
		if !settled {
			continue
		}
		if !known {
			break
		}
		text := fmt.Sprintf("%s: gap %s", how, s.screen.style.bold(millis(gap)))
		if counts {
			s.gaps.add(gap)
			text += fmt.Sprintf(" (%s)", &s.gaps)
		}
		s.screen.println(text)
		return
	}
	s.say(how + ": the gap could not be measured")
}
