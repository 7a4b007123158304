package dev

import (
	"context"
	"fmt"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/policy"
)

// firstActive waits until the sample buckets exist, and returns the replica that refills them: in mode etcd the leader,
// if there is one soon.
func (p *playground) firstActive(ctx context.Context) (*replica, error) {
	deadline, electedBy := time.Now().Add(readyTimeout), time.Now().Add(electTimeout)
	for {
		if r, elected := p.findActive(ctx); r != nil && (elected || time.Now().After(electedBy)) {
			if _, err := p.peek(ctx, watched); err == nil {
				return r, nil
			}
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("dev: nobody refills within %s; %s ends:\n%s", readyTimeout, p.replicas[0].logPath(), tail(p.replicas[0].logPath()))
		}
	}
}

// findActive watches the replicas for three refill intervals and returns the one that refills, nil if none does, and
// whether it is meant to: it leads, or there is no election.
func (p *playground) findActive(ctx context.Context) (r *replica, elected bool) {
	before := ask(ctx, p.replicas)
	pause(ctx, 3*policy.DefaultInterval)
	a := compare(before, ask(ctx, p.replicas))
	for _, r := range p.replicas {
		if r.name == a.active {
			return r, p.opts.Mode == config.ModeRace || a.leader != nil && a.leader.Identity == r.name && len(a.racing) == 0
		}
	}
	return nil, false
}

// followed is a bucket whose refills are timed. In race mode each bucket has a winner of its own, so all that are
// refilled every interval are followed.
type followed struct {
	key string
	refills
}

// look follows the refills.
func (p *playground) look(ctx context.Context) {
	for ctx.Err() == nil {
		for _, f := range p.followed {
			if r, err := p.peek(ctx, f.key); err == nil {
				f.observe(refilled{version: r.Version, at: r.Last})
			}
		}
		pause(ctx, lookEvery)
	}
}

// longestGap is the longest time between two refills of the watched bucket.
func (p *playground) longestGap() time.Duration {
	for _, f := range p.followed {
		if f.key == watched {
			return f.longestGap()
		}
	}
	return 0
}

// around is the longest gap of a followed bucket around an instant, as gapAround is for one.
func (p *playground) around(at int64) (gap time.Duration, known, settled bool) {
	known, settled = true, true
	for _, f := range p.followed {
		d, k, s := f.around(at)
		gap, known, settled = max(gap, d), known && k, settled && s
	}
	return gap, known, settled
}

// killActive kills the replica that refills, again and again.
func (p *playground) killActive(ctx context.Context) {
	ticker := time.NewTicker(p.opts.KillEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		r, _ := p.findActive(ctx)
		if r == nil || ctx.Err() != nil {
			continue
		}
		p.active.Store(&r.name)
		p.killed.Store(int64(r.pid()))
		r.kill() // false: it has just ended by itself
	}
}

// onEnd tells of the end of a replica and measures for how long nobody refilled.
func (p *playground) onEnd(e end) {
	if p.stopping.Load() {
		return
	}
	how := fmt.Sprintf("%s (pid %d) ended: %s", e.replica.name, e.pid, e.how)
	if p.killed.Load() == int64(e.pid) {
		how = fmt.Sprintf("killed %s (pid %d)", e.replica.name, e.pid)
	}
	active := p.active.Load()
	refilled := active != nil && *active == e.replica.name
	if refilled {
		how += ", which refilled"
	} else {
		how += ", which stood by"
	}
	p.measuring.Go(func() { p.measure(how, refilled) })
}

// measure waits until the gap around this moment is known, and tells.
func (p *playground) measure(how string, counts bool) {
	ctx, cancel := context.WithTimeout(context.Background(), gapTimeout)
	defer cancel()
	r, err := p.peek(ctx, watched)
	// Another replica may have refilled already; one that did comes no less than half an interval after the last one.
	at := r.Now - (policy.DefaultInterval / 2).Microseconds()
	for err == nil && ctx.Err() == nil && !p.stopping.Load() {
		gap, known, settled := p.around(at)
		if !settled {
			pause(ctx, pollEvery)
			continue
		}
		if !known {
			break
		}
		text := fmt.Sprintf("%s: gap %s", how, p.screen.style.bold(millis(gap)))
		if counts {
			p.gaps.add(gap)
			p50, longest, n := p.gaps.summary()
			text += " (" + gapSummary(p50, longest, n) + ")"
		}
		p.screen.println(text)
		return
	}
	if !p.stopping.Load() {
		p.screen.println(how + ": the gap could not be measured")
	}
}
