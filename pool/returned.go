package pool

// An etcd can come back after the regions have moved to another one. The grants in the old etcd have ended by then. So
// a coordinator that finds an open pool doubts it: it makes no offers until a region shows a grant that has not ended.
// If no region shows such a grant, the pool is closed until each silent region has acknowledged the pool again or is
// fenced.

// continues applies the first ticket of a live region in this term. If it shows a grant that has not ended, the regions
// still use this etcd.
func (l *ledger) continues(a *account, t ticket) {
	if a.reported.IsZero() && (t.now <= a.lastEnd || t.terms.Granted(t.era, t.now)) {
		l.doubted = false
	}
}

// planDoubted makes the plan while the pool is doubted. It makes no offers, because an offer would show the next
// coordinator a grant that has not ended. Once all living regions have had time to report, it closes the pool if a
// region is silent.
func (l *ledger) planDoubted(m planInput) (changed map[string]bool) {
	if m.incomplete {
		return nil
	}
	l.dirty, l.doubted = true, false // from the next plan on, offers are made
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

// logClosed logs that a doubted pool is closed, for the first such pool of the term.
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
