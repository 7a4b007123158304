package refill

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// lose empties the server.
func (s *server) lose() { s.set(func() { s.buckets = map[string]*oracle.Bucket{} }) }

func TestAStandbyMintsNothingWhileTheLeaderThatRemembersIsSlow(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", true, 0, checkout(1000))
		b := r.start("b", true, 0, checkout(1000))
		resign := a.lead() // a leads from the start: b finds the bucket missing once, and never refills it
		time.Sleep(time.Second)
		r.server.take("checkout", 1000)

		for n := len(r.server.gaps("checkout")); len(r.server.gaps("checkout")) == n; {
			time.Sleep(time.Millisecond) // until a has just refilled
		}
		thaw := make(chan struct{})
		a.set(func() { a.thaw = thaw })
		r.server.lose()
		time.Sleep(250 * time.Millisecond)
		a.set(func() { a.thaw = nil })
		close(thaw)
		time.Sleep(time.Second)
		require.LessOrEqual(t, r.server.take("checkout", 5000), int64(500), "only tokens due since the loss are added")
		resign()
		a.stop()
		b.stop()
	})
}

// A replica that started during an outage remembers no bucket, and the others wait between two tries.
func TestALateStarterMintsNothingWhileTheOthersWaitAfterAnOutage(t *testing.T) {
	for name, tc := range map[string]struct {
		unlisted bool // the masters are unknown during the outage
		after    time.Duration
		during   func(t *testing.T, r *rig, late *replica) // the end of the outage
	}{
		"nothing else happens":      {false, 30 * time.Millisecond, func(*testing.T, *rig, *replica) {}},
		"it starts at the end":      {false, 0, func(*testing.T, *rig, *replica) {}},
		"the masters were unknown":  {true, 30 * time.Millisecond, func(*testing.T, *rig, *replica) {}},
		"its configuration changes": {false, 30 * time.Millisecond, updateLate},
		"another master takes over": {false, topologyInterval - 150*time.Millisecond, failOver},
	} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				a := r.start("a", false, 1, checkout(1000))
				time.Sleep(time.Second)
				r.server.take("checkout", 1000)
				r.server.set(func() { r.server.away = true })
				time.Sleep(3 * time.Second)
				for range 20 { // at any phase of a
					r.server.set(func() { r.server.unlisted = tc.unlisted })
					b := r.start("b", false, 1, checkout(1000))
					time.Sleep(tc.after)
					tc.during(t, r, b)
					r.server.lose()
					r.server.set(func() { r.server.away, r.server.unlisted = false, false })
					time.Sleep(600 * time.Millisecond)
					require.LessOrEqual(t, r.server.take("checkout", 5000), int64(300), "only tokens due since the loss are added")
					time.Sleep(2 * time.Second)
					r.server.set(func() { r.server.away = true })
					b.stop()
					time.Sleep(2100*time.Millisecond + time.Duration(r.rng.IntN(1000))*time.Millisecond)
				}
				a.stop()
			})
		})
	}
}

func updateLate(t *testing.T, _ *rig, late *replica) {
	require.NoError(t, late.Update([]Bucket{checkout(1000)}, nil, 1))
	synctest.Wait()
}

func failOver(_ *testing.T, r *rig, _ *replica) {
	r.server.set(func() { r.server.master += "." })
}

// During an outage in which Redis loses the bucket, the replica gets a file without it, and then one with it. It
// remembered the bucket when the outage began, and was not restarted.
func TestABucketThatWasRemovedForAMomentIsNotMinted(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		slow, other := checkout(1000), checkout(1000)
		slow.Policy.Rate = policy.PerSecond(10)
		other.Key = "other"
		a := r.start("a", false, 1, slow, other)
		time.Sleep(time.Second)
		require.EqualValues(t, 1000, r.server.take("checkout", 1000))
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second)
		require.NoError(t, a.Update([]Bucket{other}, nil, 2))
		time.Sleep(time.Second)
		require.NoError(t, a.Update([]Bucket{slow, other}, nil, 3))
		time.Sleep(time.Second)
		r.server.lose()
		r.server.set(func() { r.server.away = false })
		time.Sleep(5 * time.Second)
		require.LessOrEqual(t, r.server.take("checkout", 5000), int64(5*10), "only tokens due since the loss are added")
		a.stop()
	})
}

func TestANewBucketIsCreatedSoonAfterAnOutage(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		r.server.set(func() { r.server.away = true })
		a := r.start("a", false, 0, checkout(1000))
		time.Sleep(3 * time.Second)
		r.server.set(func() { r.server.away = false })
		time.Sleep(5 * time.Second) // back-off 1 s, an answer that takes 2 s, back-off again
		require.EqualValues(t, 1000, r.server.take("checkout", 5000))
		a.stop()
	})
}
