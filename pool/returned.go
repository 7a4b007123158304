package pool

// An etcd can come back after its regions have moved to another one. Its grants have ended by then. So a coordinator
// that finds an open pool doubts it: it makes no offers until a region shows a grant that has not ended. If no region
// shows one, the pool is closed until each region that is silent has acknowledged it again or is fenced.

// continues applies the first ticket of a live region in this term. If it shows a grant that has not ended, the regions
// still use this etcd.
func (l *ledger) continues(a *account, t ticket) {
	if a.reported.IsZero() && (t.now <= a.lastEnd || t.terms.Granted(t.era, t.now)) {
		l.doubted = false
	}
}

// judge is the plan while the pool is doubted. It offers nothing: an offer would show the next coordinator a grant that
// has not ended. Once all living regions have had time to report, it closes the pool if a region is silent.
func (l *ledger) judge(m planInput) (changed map[string]bool) {
	if m.incomplete {
		return nil
	}
	l.dirty, l.doubted = true, false // the next plan makes offers
	changed = map[string]bool{}
	for region, a := range l.accounts {
		_, configured := l.parts[region]
		if configured && a.reported.IsZero() && !a.left() {
			a.forget()
			l.open = false
		}
		changed[region] = true
	}
	if l.open {
		return nil
	}
	return changed
}

// logClosed logs the first pool that was doubted and is closed.
func (t *term) logClosed(l *ledger) {
	if waits := l.waits(); len(waits) > 0 && !t.closed {
		t.closed = true
		t.log.Error("all grants had ended before this replica became the coordinator: no region gets more than its floor "+
			"until these regions report or are fenced; are they using another etcd?", "pool", l.name, "regions", waits)
	}
}

// forget makes the region acknowledge the pool again before it counts as a member.
func (a *account) forget() {
	a.joined = false
	for i := range a.offers {
		a.offers[i].old = true
	}
}
