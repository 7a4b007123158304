package dev

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
)

const (
	electTimeout = 5 * time.Second // how long the playground waits for a leader that refills; then it accepts any replica
	gapTimeout   = 10 * time.Second
)

// firstActive waits until the sample buckets exist, and returns the replica that refills them. In mode etcd this is the
// leader, unless no leader refills within electTimeout.
func (s *sampleScene) firstActive(ctx context.Context) (*replica, error) {
	deadline, electedBy := time.Now().Add(readyTimeout), time.Now().Add(electTimeout)
	s.reports = ask(ctx, s.replicas())
	for {
		timing.Sleep(ctx.Done(), 3*policy.DefaultInterval)
		s.observe(ask(ctx, s.replicas()))
		if r := s.active.Load(); r != nil && (s.elected(r) || time.Now().After(electedBy)) {
			if _, err := s.regions[0].peek(ctx, s.buckets()[0].Key); err == nil {
				return r, nil
			}
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if time.Now().After(deadline) {
			log := s.replicas()[0].logPath()
			return nil, fmt.Errorf("dev: no replica refilled within %s; the last lines of %s:\n%s", readyTimeout, log, tail(log))
		}
	}
}

// observe applies the reports of the replicas, and determines which of them refilled since the previous reports.
func (s *sampleScene) observe(reports []report) {
	s.activity, s.reports = compare(s.reports, reports), reports
	var active *replica
	for _, r := range s.replicas() {
		if r.name == s.activity.active {
			active = r
		}
	}
	s.active.Store(active)
}

// elected reports whether the right replica refills: it leads, or there is no election.
func (s *sampleScene) elected(r *replica) bool {
	a := s.activity
	return s.opts.Mode == config.ModeRace || a.leader != nil && a.leader.Identity == r.name && !a.racing
}

// follow measures the times of refills. In race mode the winner differs from bucket to bucket, so follow reads all
// buckets that are refilled every interval.
func (s *sampleScene) follow(ctx context.Context) {
	for ; ctx.Err() == nil; timing.Sleep(ctx.Done(), gapPoll) {
		for _, f := range s.followed {
			if r, err := s.regions[0].peek(ctx, f.key); err == nil {
				f.observe(r.Version, r.Last)
			}
		}
	}
}

// around returns the longest gap of a followed bucket around an instant. settled reports whether the gaps of all
// followed buckets are known. The gap is 0 if one of them was missed.
func (s *sampleScene) around(at int64) (gap time.Duration, settled bool) {
	for _, f := range s.followed {
		d, ok := f.around(at)
		if !ok || d == 0 {
			return 0, ok
		}
		gap = max(gap, d)
	}
	return gap, true
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
		// The ticks coincide with the readings of each second. Wait until the present reading has ended. Otherwise it could
		// combine a state before the kill with a state after it.
		timing.Sleep(ctx.Done(), 3*policy.DefaultInterval)
		if r := s.active.Load(); r != nil && ctx.Err() == nil {
			if p := r.up(); p != nil { // unless it has just ended by itself
				s.killed.Store(int64(p.pid))
				p.kill()
			}
		}
	}
}

// ended reports the end of a replica, and measures for how long no replica refilled.
func (s *sampleScene) ended(r *replica, pid int, how string) {
	text, refilled := fmt.Sprintf("%s (pid %d) ended: %s", r.name, pid, how), s.active.Load() == r
	if s.killed.Load() == int64(pid) {
		text, refilled = fmt.Sprintf("killed %s (pid %d)", r.name, pid), true
	}
	if refilled {
		text += ", which refilled"
	} else {
		text += ", which was a standby"
	}
	s.tasks.Go(func() { s.measure(text, refilled) })
}

// measure waits until the gap around this moment is known, and reports it.
func (s *sampleScene) measure(how string, counts bool) {
	ctx, cancel := context.WithTimeout(context.Background(), gapTimeout)
	defer cancel()
	r, err := s.regions[0].peek(ctx, s.buckets()[0].Key)
	// Another replica may have refilled already. The time between two refills is at least half an interval.
	at := r.Now - (policy.DefaultInterval / 2).Microseconds()
	for ; err == nil && ctx.Err() == nil && !s.stopping.Load(); timing.Sleep(ctx.Done(), pollEvery) {
		gap, settled := s.around(at)
		if !settled {
			continue
		}
		if gap == 0 {
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
