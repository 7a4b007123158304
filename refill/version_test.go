package refill

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"

	"github.com/tokenrefill/refiller/policy"
)

// latestWithin is the bound that these tests check. The policies of the latest version that a living replica has are in
// force within that time. It doesn't matter which replica leads, or what the server loses.
const latestWithin = time.Second

// inForce returns the version of the configuration whose policy is in force, -1 if the bucket has none.
func (s *server) inForce(key string) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.buckets[key]
	if b == nil || b.Control == nil {
		return -1
	}
	return b.Control.Terms.FileVersion()
}

// snapshot copies the buckets; restore brings them back as they were.
func (s *server) snapshot() (restore func()) {
	copied := map[string]*oracle.Bucket{}
	s.set(func() {
		for key, b := range s.buckets {
			control := *b.Control
			tokens := *b.Tokens
			index := *b.Index
			copied[key] = &oracle.Bucket{Bucket: policy.Bucket{Tokens: &tokens, Index: &index, Control: &control}}
		}
	})
	return func() { s.set(func() { maps.Copy(s.buckets, copied) }) }
}

// pairOfVersions starts a leader with version 1 and a standby with version 2, which lowers the limit, and waits until
// both have reached the server.
func pairOfVersions(t *testing.T, r *rig) (leader, standby *replica, resign func()) {
	leader = r.start("old", true, 1, checkout(1000))
	resign = leader.lead()
	time.Sleep(latestWithin)
	standby = r.start("later", true, 2, checkout(100))
	time.Sleep(latestWithin)
	require.EqualValues(t, 2, r.server.inForce("checkout"))
	return leader, standby, resign
}

func TestALossUnderAnOlderLeaderBringsNoEarlierPolicyBack(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		leader, standby, resign := pairOfVersions(t, r)
		for range 6 {
			r.server.lose()
			for range 100 {
				time.Sleep(latestWithin / 100)
				require.NotEqualValues(t, 1, r.server.inForce("checkout"), "the leader doesn't restore the old version")
			}
			require.EqualValues(t, 2, r.server.inForce("checkout"))
		}
		resign()
		leader.stop()
		standby.stop()
	})
}

func TestALeaderThatRestartsWithAnOlderFileGivesWayAfterALoss(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		leader, standby, resign := pairOfVersions(t, r)
		for range 6 {
			resign()
			leader.stop()
			leader = r.start("old", true, 1, checkout(1000))
			resign = leader.lead()
			time.Sleep(5 * time.Second)
			r.server.lose()
			time.Sleep(latestWithin)
			require.EqualValues(t, 2, r.server.inForce("checkout"))

			resign()
			leader.stop()
			r.server.lose()
			leader = r.start("old", true, 1, checkout(1000)) // neither this replica nor Redis has a state of the bucket
			resign = leader.lead()
			time.Sleep(2*interval + latestWithin)
			require.EqualValues(t, 2, r.server.inForce("checkout"))
		}
		resign()
		leader.stop()
		standby.stop()
	})
}

func TestAFailoverThatForgetsALaterPolicyForgetsItForASecond(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		leader := r.start("old", true, 1, checkout(1000))
		resign := leader.lead()
		time.Sleep(latestWithin)
		restore := r.server.snapshot()
		standby := r.start("later", true, 2, checkout(100))
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 2, r.server.inForce("checkout"))
		resign()
		leader.stop()
		leader = r.start("old", true, 1, checkout(1000))
		resign = leader.lead()
		time.Sleep(5 * time.Second)
		restore()
		time.Sleep(latestWithin)
		require.EqualValues(t, 2, r.server.inForce("checkout"))
		resign()
		leader.stop()
		standby.stop()
	})
}

// A replica with an older file raced with a replica with a later file. It remembers that its own file is older, even
// while the buckets are missing.
func TestAMissingBucketDoesNotMakeAnOlderFileCurrent(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		old, later := r.start("old", false, 1, checkout(1000)), r.start("later", false, 2, checkout(100))
		time.Sleep(latestWithin)
		require.EqualValues(t, 2, r.server.inForce("checkout"))
		for range 10 {
			thaw := make(chan struct{})
			later.set(func() { later.thaw = thaw })
			r.server.lose()
			time.Sleep(latestWithin - 2*interval)
			require.EqualValues(t, -1, r.server.inForce("checkout"), "the older replica leaves creation to the later one")
			later.set(func() { later.thaw = nil })
			close(thaw)
			time.Sleep(2 * interval)
			require.EqualValues(t, 2, r.server.inForce("checkout"))
		}
		old.stop()
		later.stop()
	})
}

func TestTheLatestTemplateIsInForceUnderALeaderWithAnOlderFile(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		before, after := users(t, 1, policy.PerSecond(20)), users(t, 2, policy.PerSecond(1))
		leader := r.startWith("old", true, 1, before)
		resign := leader.lead()
		time.Sleep(latestWithin)
		r.server.takeTemplate(before.Of("user:1"), "user:1", 60)
		standby := r.startWith("later", true, 2, after)
		time.Sleep(latestWithin + time.Second) // a template's bucket is refilled each second
		require.EqualValues(t, 2, r.server.inForce("user:1"))
		resign()
		leader.stop()
		standby.stop()
	})
}

func TestAPublishedLaterVersionStopsThePulse(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		leader, standby := r.start("a", true, 1, checkout(1000)), r.start("b", true, 1, checkout(1000))
		resign := leader.lead()
		time.Sleep(time.Second)
		leader.RecordVersion(1)
		time.Sleep(time.Second)
		require.False(t, standby.Stats().Racing, "the standby trusts a leader of the published version")
		leader.RecordVersion(2)
		time.Sleep(time.Second)
		require.True(t, standby.Stats().Racing)
		require.NoError(t, leader.Update([]Bucket{checkout(1000)}, nil, 2))
		time.Sleep(time.Second)
		require.False(t, standby.Stats().Racing, "the leader has the later file")
		resign()
		leader.stop()
		standby.stop()
	})
}

// In race mode the replica that made the last refill calls first. One with an older file gives way.
func TestAReplicaWithTheLaterFileMakesTheRefills(t *testing.T) {
	for name, bucket := range map[string]func(version int64) Bucket{
		"configured": func(version int64) Bucket { return checkout(100 * version) },
		"pooled": func(version int64) Bucket {
			b := pooled("checkout")
			b.Start = &policy.Terms{Pool: true, PoolsVersion: version}
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				older := r.start("older", false, 1, bucket(1))
				later := r.start("later", false, 1, bucket(1))
				terms := poolTerms(1, 100)
				terms.Pool = true
				if name == "pooled" {
					require.NoError(t, older.SetTerms("checkout", terms))
					require.NoError(t, later.SetTerms("checkout", terms))
				}
				time.Sleep(time.Second)
				require.NoError(t, later.Update([]Bucket{bucket(2)}, nil, 2))
				time.Sleep(time.Second)
				later.set(func() { later.cut = true })
				time.Sleep(time.Second)
				later.set(func() { later.cut = false }) // now the older one has made the last refill
				time.Sleep(time.Second)
				r.server.set(func() { r.server.applied = map[string][]applied{} })
				time.Sleep(10 * time.Second)
				r.server.set(func() {
					require.NotEmpty(t, r.server.applied["checkout"])
					for _, refill := range r.server.applied["checkout"] {
						require.Equal(t, "later", refill.by)
					}
				})
				later.stop()
				time.Sleep(time.Second)
				r.server.set(func() { r.server.applied = map[string][]applied{} })
				time.Sleep(10 * time.Second)
				gaps := r.server.gaps("checkout")
				require.NotEmpty(t, gaps)
				require.Less(t, slices.Max(gaps), interval*13/10, "the older one refills, too")
				older.stop()
			})
		})
	}
}
