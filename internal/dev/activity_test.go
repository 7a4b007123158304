package dev

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
)

var startup = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func said(name string, applied int64, change ...func(*admin.Status)) report {
	s := &admin.Status{Started: startup, Calls: map[string]int64{"applied": applied}}
	for _, c := range change {
		c(s)
	}
	return report{name: name, status: s}
}

func leader(identity string, epoch int64) func(*admin.Status) {
	return func(s *admin.Status) { s.Leader = &admin.Leader{Identity: identity, Epoch: epoch} }
}

func racing(s *admin.Status)    { s.Racing = true }
func restarted(s *admin.Status) { s.Started = startup.Add(time.Minute) }

func TestTheRefillingReplicaIsDerivedFromRefills(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode          config.Mode
		before, after []report
		want          string
	}{
		"race": {
			config.ModeRace, []report{said("a", 10), said("b", 100)}, []report{said("a", 19), said("b", 101)},
			"race: a won 90 % of the refills",
		},
		"leader": {
			config.ModeEtcd, []report{said("a", 10), said("b", 0)},
			[]report{said("a", 20, leader("a", 5)), said("b", 0, leader("a", 5))},
			"a leads under epoch 5 and refills",
		},
		"in place of the leader": {
			config.ModeEtcd, []report{said("a", 10), said("b", 0)}, []report{{name: "a"}, said("b", 9, leader("a", 5), racing)},
			"b refills, in place of the silent leader a (epoch 5)",
		},
		"racing beside the leader": {
			config.ModeEtcd, []report{said("a", 10), said("b", 0)},
			[]report{said("a", 19, leader("a", 5)), said("b", 1, leader("a", 5), racing)},
			"a leads under epoch 5 and refills",
		},
		"hand-over": {
			config.ModeEtcd, []report{said("a", 10), said("b", 0)},
			[]report{said("a", 19, leader("a", 5)), said("b", 1, leader("b", 6))},
			"b leads under epoch 6; a refilled most",
		},
		"no election service": {
			config.ModeEtcd, []report{said("a", 0)}, []report{said("a", 9, racing)}, "a refills, no replica leads",
		},
		"a restarted replica counts anew": {
			config.ModeRace, []report{said("a", 10), said("b", 500)}, []report{said("a", 12), said("b", 3, restarted)},
			"race: b won 60 % of the refills",
		},
		"standstill": {config.ModeRace, []report{said("a", 10)}, []report{said("a", 10)}, "no replica refills"},
		"no answers": {config.ModeEtcd, []report{{name: "a"}}, []report{{name: "a"}}, "no replica refills"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, compare(c.before, c.after).describe(c.mode))
		})
	}
}
