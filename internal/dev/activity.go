package dev

import (
	"context"
	"fmt"
	"sync"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
)

// report is the status of one replica.
type report struct {
	name   string
	status *admin.Status // nil if it doesn't answer
}

// activity describes the refills between two rounds of reports.
type activity struct {
	active string // name of the replica that made the most refills; empty if there were none
	share  int64  // its part of the refills, in percent
	leader *admin.Leader
	racing bool // a replica refills in place of a silent leader
}

// compare returns the activity between two rounds of reports of the same replicas.
func compare(before, after []report) activity {
	var a activity
	var most, all int64
	for i, r := range after {
		if r.status == nil {
			continue
		}
		if l := r.status.Leader; l != nil && (a.leader == nil || l.Epoch > a.leader.Epoch) {
			a.leader = l
		}
		if r.status.Racing {
			a.racing = true
		}
		n := r.status.Calls["applied"]
		if b := before[i].status; b != nil && b.Started.Equal(r.status.Started) {
			n -= b.Calls["applied"]
		}
		all += n
		if n > most {
			most, a.active = n, r.name
		}
	}
	if all > 0 {
		a.share = most * 100 / all
	}
	return a
}

// describe returns in words which replica refills.
func (a activity) describe(mode config.Mode) string {
	switch {
	case a.active == "":
		return "no replica refills"
	case mode == config.ModeRace:
		return fmt.Sprintf("race: %s won %d %% of the refills", a.active, a.share)
	case a.leader == nil:
		return a.active + " refills, no replica leads"
	case a.leader.Identity == a.active:
		return fmt.Sprintf("%s leads under epoch %d and refills", a.active, a.leader.Epoch)
	case a.racing:
		return fmt.Sprintf("%s refills, in place of the silent leader %s (epoch %d)", a.active, a.leader.Identity,
			a.leader.Epoch)
	default:
		return fmt.Sprintf("%s leads under epoch %d; %s refilled most", a.leader.Identity, a.leader.Epoch, a.active)
	}
}

// ask collects the reports of replicas.
func ask(ctx context.Context, replicas []*replica) []report {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	reports := make([]report, len(replicas))
	var all sync.WaitGroup
	for i, r := range replicas {
		reports[i].name = r.name
		if p := r.up(); p != nil {
			all.Go(func() {
				var s admin.Status
				if p.get(ctx, "/status", &s) == nil {
					reports[i].status = &s
				}
			})
		}
	}
	all.Wait()
	return reports
}
