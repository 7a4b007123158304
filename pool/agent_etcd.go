package pool

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
)

// listen follows the keys of etcd that concern this region, and sends their entries to events.
func (a *Agent) listen(ctx context.Context, events chan<- entry) {
	keys := []string{configKey, shareKeys + a.region, reportKeys + a.region}
	for failures := 0; ctx.Err() == nil; {
		began := a.now()
		err := a.follow(ctx, events, keys)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, errConflict) || errors.Is(err, errRewound) {
			timing.Sleep(ctx.Done(), pace)
			continue
		}
		if a.now().Sub(began) > maxPace {
			failures = 0
		}
		failures++
		reachable := false
		a.setState(func(s *AgentState) { reachable, s.Cut = s.Cut == "", err.Error() })
		if reachable {
			a.log.Warn("connection to etcd lost: grants last to their end", "region", a.region, "error", err)
		}
		least := backoff(failures) / 2
		timing.Sleep(ctx.Done(), timing.Between(rand.Float64, least, least+pace))
	}
}

// follow reads the keys, and then their changes, until a request or the watch fails.
func (a *Agent) follow(ctx context.Context, events chan<- entry, keys []string) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	loading, done := context.WithTimeout(ctx, a.timing.load())
	entries, revision, err := a.registry.load(loading, keys...)
	done()
	if err != nil {
		return err
	}
	a.setState(func(s *AgentState) { s.Cut, a.revision = "", revision })
	for _, e := range append(entries, allRead) {
		if err := send(ctx, events, e); err != nil {
			return err
		}
	}
	timing.Signal(a.changed) // our settings may be later than the settings that were read
	watched := make(chan error, 1)
	wg.Go(func() { watched <- a.registry.watch(ctx, revision+1, events, keys...) })
	again := time.NewTicker(a.timing.Lease)
	defer again.Stop()
	for {
		select {
		case err := <-watched:
			return err
		case <-a.rewound:
			return errRewound
		case <-again.C:
			wg.Go(func() { a.recheck(ctx, events) })
		case <-a.changed:
			if err := a.propose(ctx); err != nil {
				return err // the next call of follow reads all keys and proposes again
			}
		}
	}
}

// inEtcd reads the settings in etcd. The entry has revision 0 if there are none.
func (a *Agent) inEtcd(ctx context.Context) (config entry, err error) {
	ctx, cancel := context.WithTimeout(ctx, a.timing.request())
	defer cancel()
	entries, _, err := a.registry.load(ctx, configKey)
	if len(entries) > 0 {
		config = entries[0]
	}
	return config, err
}

// recheck reads and applies the settings in etcd again. If they were deleted, or are older than the settings that this
// agent knows, the agent then proposes its settings. It is possible that no event reports such a change: etcd may have
// been restored while this region was cut off, and by now its revisions may be higher than before.
func (a *Agent) recheck(ctx context.Context, events chan<- entry) {
	config, err := a.inEtcd(ctx)
	if err == nil {
		_ = send(ctx, events, entry{configKey, config.value, config.revision, config.revision == 0})
	}
}

// allRead is an entry that is sent after all entries that were read.
var allRead = entry{}

// wroteAt checks the revision of a write. It is higher than the revision that was read before the write, unless etcd
// was restored.
func (a *Agent) wroteAt(revision, seen int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if revision <= seen {
		a.log.Warn("etcd was restored: everything is read again", "region", a.region, "revision", revision, "seen", seen)
		a.revision = 0 // until all keys are read again
		timing.Signal(a.rewound)
	}
}

// propose writes the latest settings that this agent knows, if the settings in etcd are older. The latest settings are
// the agent's own, or those that it read from etcd before a restore. If etcd has no settings, propose doesn't write
// settings without pools.
func (a *Agent) propose(ctx context.Context) error {
	config, err := a.inEtcd(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	ours, newest := a.settings, a.newest
	a.mu.Unlock()
	a.setState(func(s *AgentState) {
		s.Conflict = false
		s.Outdated = 0
		s.Unread = ""
	})
	theirs, found := noSettings, config.revision > 0
	if found {
		theirs, err = decodeSettings(config.value)
		if err != nil {
			// A later release may have written them, so this agent doesn't replace them.
			a.setState(func(s *AgentState) { s.Unread = err.Error() })
			a.log.Error("settings in etcd can't be read and stay", "error", err)
			return nil
		}
	}
	if newest.Version <= theirs.Version {
		newest = theirs
	}
	if newest.Version >= ours.Version {
		a.compare(ours, newest)
	} else {
		newest = ours.following(newest)
	}
	if newest.Version == theirs.Version || !found && len(newest.Pools) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, a.timing.request())
	defer cancel()
	_, err = a.registry.commit(ctx, leadership{}, []write{{key: configKey, value: newest.record(), seen: config.revision}})
	return err
}

// compare logs if this agent's settings are ignored. This is so if they differ from the settings in force and their
// version is not higher.
func (a *Agent) compare(ours, theirs Settings) {
	switch {
	case theirs.Version > ours.Version:
		a.setState(func(s *AgentState) { s.Outdated = theirs.Version })
		a.log.Warn("pools of a higher version are in force and ours are ignored", "version", theirs.Version, "ours",
			ours.Version)
	case !theirs.Equal(ours):
		a.setState(func(s *AgentState) { s.Conflict = true })
		a.log.Warn("pools changed under the same version and are ignored: raise the config's version", "version",
			ours.Version)
	}
}

// applyEntry applies an entry that was read from etcd or is a change. It reports whether the entry has new terms.
func (a *Agent) applyEntry(e entry) bool {
	a.mu.Lock()
	a.revision = max(a.revision, e.revision)
	a.mu.Unlock()
	switch e.key {
	case allRead.key:
		a.loaded = true
	case configKey:
		if e.deleted {
			timing.Signal(a.changed)
		} else if s, err := decodeSettings(e.value); err == nil {
			a.named = map[string]bool{}
			for _, p := range s.Pools {
				a.named[p.Name] = p.Has(a.region)
			}
			a.mu.Lock()
			if s.Version >= a.newest.Version {
				a.newest = s
			}
			if s.Version < max(a.settings.Version, a.newest.Version) {
				timing.Signal(a.changed) // a replica with an older file wrote first, or etcd was restored
			}
			a.mu.Unlock()
		}
	case reportKeys + a.region:
		if r, err := decodeReport(e.value); err == nil && !e.deleted {
			a.recordReport(r)
		}
	case shareKeys + a.region:
		if e.deleted {
			a.shared = nil
			return false
		}
		s, err := decodeShare(e.value)
		if err != nil {
			a.log.Error("share can't be read and is ignored", "region", a.region, "error", err)
			return false
		}
		return a.applyShare(s)
	}
	return false
}

// applyShare applies the region's share and reports whether it has new terms.
func (a *Agent) applyShare(s share) (news bool) {
	a.shared = map[string]bool{}
	for name, g := range s.pools {
		a.shared[name] = true
		b, t := a.bucket(name), g.terms[0]
		b.open, b.doubled = g.open, g.doubled
		if b.terms.Fence.Before(t.Fence) {
			b.terms = t
			b.terms.Divided = a.divides(name)
			b.offered = true
			b.demand = g.demand
			news = true
		}
	}
	return news
}

// divides reports whether the region's own configuration divides a pool's bucket among flows.
func (a *Agent) divides(pool string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.settings.Pools, func(p Pool) bool { return p.Name == pool && p.Flows != nil })
}
