package refill

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
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

func TestALateStarterMintsNothingWhileTheOthersWaitAfterAnOutage(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 0, checkout(1000))
		time.Sleep(time.Second)
		r.server.take("checkout", 1000)
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second) // a waits up to a second between two tries
		for range 20 {              // at any phase of a
			b := r.start("b", false, 0, checkout(1000))
			time.Sleep(30 * time.Millisecond)
			r.server.lose()
			r.server.set(func() { r.server.away = false })
			time.Sleep(600 * time.Millisecond)
			require.LessOrEqual(t, r.server.take("checkout", 5000), int64(300), "only tokens due since the loss are added")
			time.Sleep(2 * time.Second)
			r.server.set(func() { r.server.away = true })
			b.stop()
			time.Sleep(2100*time.Millisecond + time.Duration(r.rng.IntN(1000))*time.Millisecond)
		}
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
