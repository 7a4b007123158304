package refill

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestAnUnreadablePulseIsNoSignOfLife(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		pulse := pulseName("refiller:pulse", []Bucket{checkout(1000)}, nil)
		r.server.bad[pulse] = lua.ErrMalformedBucket
		a, b := r.start("a", true, 0, checkout(1000)), r.start("b", true, 0, checkout(1000))
		time.Sleep(4 * time.Second)
		require.GreaterOrEqual(t, len(r.server.gaps("checkout")), 30, "there is no leader, so both race")
		require.True(t, a.Stats().Racing)
		resign := a.lead()
		time.Sleep(time.Second)
		require.True(t, b.Stats().Racing, "the standby finds no pulse of the leader")
		resign()
		r.server.set(func() { r.server.bad[pulse] = nil })
		resign = a.lead()
		time.Sleep(3 * time.Second)
		require.False(t, b.Stats().Racing)
		resign()
		a.stop()
		b.stop()
		require.Equal(t, 2, strings.Count(log.String(), "pulse can't be read"), "each replica logs the fault once")
		require.NotContains(t, log.String(), "refills pause")
	})
}

// A pulse shows that its leader refills the buckets of its own file. A standby with another bucket refills that bucket
// itself, whichever version its file has, until both have the same buckets.
func TestAStandbyWithOtherBucketsThanTheLeaderRaces(t *testing.T) {
	for _, version := range []int64{1, 2, 3} {
		t.Run(strconv.FormatInt(version, 10), func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				mail := checkout(1000)
				mail.Key = "mail"
				a := r.start("a", true, 2, checkout(1000))
				resign := a.lead()
				b := r.start("b", true, version, checkout(1000), mail)
				time.Sleep(5 * time.Second)
				require.GreaterOrEqual(t, len(r.server.gaps("mail")), 30, "the standby refills the bucket")
				require.True(t, b.Stats().Racing)
				require.NoError(t, a.Update([]Bucket{mail, checkout(1000)}, nil, 3))
				require.NoError(t, b.Update([]Bucket{checkout(1000), mail}, nil, 3))
				time.Sleep(3 * time.Second)
				require.False(t, b.Stats().Racing, "the leader refills the bucket, too")
				resign()
				a.stop()
				b.stop()
			})
		})
	}
}

// A leader with an old file can't credit the instants of a later file's schedule. So its pulse stops, and the standbys
// with the later file race.
func TestALeaderWithAnOldFileStopsItsPulse(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		stepped := func(every time.Duration) Bucket {
			return Bucket{Key: "quota", Policy: policy.Policy{Capacity: 1000, Steps: policy.Every(every),
				StepTokens: 100, Interval: interval}}
		}
		a, b := r.start("a", true, 1, stepped(time.Second)), r.start("b", true, 1, stepped(time.Second))
		resign := a.lead()
		time.Sleep(2 * time.Second)
		c := r.start("c", true, 2, stepped(10*time.Second))
		time.Sleep(2 * time.Second)
		r.server.take("quota", 1000)
		time.Sleep(100 * time.Second)
		require.EqualValues(t, 1000, r.server.take("quota", 5000), "a hundred seconds have ten refill instants")
		require.NoError(t, a.Update([]Bucket{stepped(10 * time.Second)}, nil, 2))
		time.Sleep(2 * time.Second)
		require.False(t, b.Stats().Racing)
		require.False(t, c.Stats().Racing, "the leader with the later file is trusted again")
		time.Sleep(50 * time.Second)
		require.EqualValues(t, 500, r.server.take("quota", 5000))
		resign()
		for _, rep := range []*replica{a, b, c} {
			rep.stop()
		}
	})
}

// An old file has only the schedule of an old policy, or none. The instants of that schedule must not be credited, and
// a replica that doesn't know the schedule in force must not win a refill.
func TestAnOldFileCreditsNoInstantsOfItsOwn(t *testing.T) {
	stepped := func(every time.Duration) Bucket {
		return Bucket{Key: "quota", Policy: policy.Policy{Capacity: 1000, Steps: policy.Every(every), StepTokens: 100,
			Interval: interval}}
	}
	for name, old := range map[string]Bucket{"another schedule": stepped(time.Second), "a rate": {Key: "quota",
		Policy: checkout(1000).Policy}} {
		t.Run(name, func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				replicas := []*replica{r.start("a", false, 1, old), r.start("b", false, 1, old)}
				time.Sleep(time.Second)
				later := stepped(10 * time.Second)
				c := r.start("c", false, 2, later)
				time.Sleep(time.Second)
				c.stop() // one of the other replicas may win the next refill
				time.Sleep(time.Second)
				replicas = append(replicas, r.start("c", false, 2, later))
				time.Sleep(time.Second)
				r.server.take("quota", 1000)
				time.Sleep(100 * time.Second)
				require.EqualValues(t, 1000, r.server.take("quota", 5000), "a hundred seconds have ten refill instants")
				time.Sleep(50 * time.Second)
				require.EqualValues(t, 500, r.server.take("quota", 5000))
				for _, rep := range replicas {
					rep.stop()
				}
			})
		})
	}
}

func TestRemovedBucketsAreForgotten(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := func(version int64) *policy.Templates {
			templates, err := policy.NewTemplates(version, []policy.Template{{Prefix: fmt.Sprintf("t%d:", version),
				Policy: policy.Policy{
					Capacity: 60, Rate: policy.PerSecond(1), Interval: time.Second,
				}}}, nil)
			require.NoError(t, err)
			return templates
		}
		bucket := func(version int64) Bucket {
			b := checkout(1000)
			b.Key = fmt.Sprintf("bucket-%d", version)
			return b
		}
		a := r.startWith("a", true, 0, set(0), bucket(0), pooled("pool-0"))
		for version := range int64(20) {
			name := fmt.Sprintf("pool-%d", version)
			require.NoError(t, a.Update([]Bucket{bucket(version), pooled(name)}, set(version), version))
			require.NoError(t, a.SetTerms(name, poolTerms(version, 100)))
			time.Sleep(time.Second)
		}
		time.Sleep(pastFor)
		const last = 20
		require.NoError(t, a.Update([]Bucket{bucket(last), pooled("pool-20")}, set(last), last))
		time.Sleep(time.Second)
		a.Refiller.mu.Lock()
		require.Len(t, a.memory.buckets, 6, "two buckets, the two of the file before, the pulse and the claim")
		require.Len(t, a.memory.shards, 32, "the memory has the shards of the template and of the one before")
		require.Len(t, a.past.prefixes, 1)
		require.Len(t, a.past.keys, 2)
		require.Len(t, a.pooled, 1)
		a.Refiller.mu.Unlock()
		a.stop()
	})
}

// While the server works on a call, the next call is made, but not a third one.
func TestTwoCallsAreUnderWayWhereAReplicaIsBehind(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var buckets []Bucket
		for i := range 60 {
			b := checkout(1000)
			b.Key = fmt.Sprint("bucket-", i)
			buckets = append(buckets, b)
		}
		r.batch = 10
		a := r.start("a", false, 0, buckets...)
		time.Sleep(time.Second)
		refills := func() (n int) {
			for _, b := range buckets {
				n += len(r.server.gaps(b.Key))
			}
			return n
		}
		measure := func(latency time.Duration) (perSecond, atOnce int) {
			a.set(func() { a.latency = latency })
			time.Sleep(time.Second)
			before := refills()
			a.set(func() { a.most = 0 })
			time.Sleep(10 * time.Second)
			a.set(func() { atOnce = a.most })
			return (refills() - before) / 10, atOnce
		}
		perSecond, atOnce := measure(time.Millisecond) // 500 calls a second one by one, and some 60 are needed
		require.Greater(t, perSecond, 570)
		require.LessOrEqual(t, atOnce, 2)
		perSecond, atOnce = measure(30 * time.Millisecond) // 17 calls a second one by one
		require.Greater(t, perSecond, 300, "calls run in parallel (one at a time allows 170)")
		require.Equal(t, 2, atOnce)
		a.stop()
	})
}
