package refill

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestOneReplicaRefillsEachInterval(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var replicas []*replica
		for _, name := range []string{"a", "b", "c"} {
			replicas = append(replicas, r.start(name, false, 0, checkout(1000)))
		}
		time.Sleep(time.Second)
		r.server.set(func() { r.server.applied["checkout"] = nil })
		time.Sleep(30 * time.Second)
		for _, rep := range replicas {
			rep.stop()
		}
		list := r.server.applied["checkout"]
		for _, a := range list {
			require.Equal(t, list[0].by, a.by, "the same replica keeps refilling")
		}
		for _, gap := range r.server.gaps("checkout") {
			require.InDelta(t, interval, gap, float64(time.Millisecond), "the time between refills is one interval")
		}
		for _, rep := range replicas {
			require.LessOrEqual(t, rep.calls, 330, "a loser calls about once per interval")
		}
	})
}

func TestCreditIsExactWhileReplicasCrashAndPause(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		replicas := map[string]*replica{}
		names := []string{"a", "b", "c", "d"}
		for _, n := range names {
			replicas[n] = r.start(n, false, 0, checkout(1000))
		}
		time.Sleep(500 * time.Millisecond)
		start := time.Now()
		taken := r.server.take("checkout", 1000)
		require.EqualValues(t, 1000, taken, "a new bucket is full")
		taken = 0
		for range 200 {
			rep := replicas[names[r.rng.IntN(len(names))]]
			switch r.rng.IntN(3) {
			case 0:
				rep.stop()
				replicas[rep.name] = r.start(rep.name, false, 0, checkout(1000))
			case 1:
				thaw := make(chan struct{})
				rep.set(func() { rep.thaw = thaw })
				time.Sleep(time.Duration(r.rng.IntN(400)) * time.Millisecond)
				rep.set(func() { rep.thaw = nil })
				close(thaw)
			}
			time.Sleep(time.Duration(r.rng.IntN(300)) * time.Millisecond)
			taken += r.server.take("checkout", 1000)
		}
		time.Sleep(time.Second)
		taken += r.server.take("checkout", 1000)
		for _, rep := range replicas {
			rep.stop()
		}
		list := r.server.applied["checkout"]
		due := int64(500 * list[len(list)-1].at.Sub(start).Seconds())
		require.InDelta(t, due, taken, 500*interval.Seconds()+1,
			"refills added exactly the tokens that fell due since the start")
		versions := map[policy.Version]bool{}
		for _, a := range list {
			require.False(t, versions[a.version], "index %v was won twice", a.version)
			versions[a.version] = true
		}
	})
}

func TestFailoverInRaceModeTakesOneIntervalAndJitter(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		replicas := map[string]*replica{}
		for _, n := range []string{"a", "b", "c"} {
			replicas[n] = r.start(n, false, 0, checkout(1000))
		}
		for range 50 {
			time.Sleep(time.Second + time.Duration(r.rng.IntN(100))*time.Millisecond)
			r.server.mu.Lock()
			winner := r.server.applied["checkout"][len(r.server.applied["checkout"])-1].by
			r.server.mu.Unlock()
			replicas[winner].stop()
			replicas[winner] = r.start(winner, false, 0, checkout(1000))
		}
		for _, rep := range replicas {
			rep.stop()
		}
		require.Less(t, slices.Max(r.server.gaps("checkout")[1:]), interval+interval*3/20+5*time.Millisecond)
	})
}

func TestNewBucketIsCreatedOnceTwoIntervalsLater(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		start := time.Now()
		var replicas []*replica
		for _, n := range []string{"a", "b", "c", "d"} {
			replicas = append(replicas, r.start(n, false, 0, checkout(1000)))
		}
		time.Sleep(time.Second)
		var list []applied
		r.server.set(func() { list = slices.Clone(r.server.applied["checkout"]) })
		require.Equal(t, policy.StatusInitialised, list[0].status)
		require.GreaterOrEqual(t, list[0].at.Sub(start), 2*interval)
		require.EqualValues(t, 1000, r.server.take("checkout", 5000))
		for _, rep := range replicas {
			rep.stop()
		}
	})
}

func TestRestartedEmptyServerMintsNothingBesideALateStarter(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 0, checkout(1000))
		time.Sleep(time.Second)
		r.server.take("checkout", 1000)
		r.server.set(func() { r.server.buckets = map[string]*oracle.Bucket{} })
		b := r.start("b", false, 0, checkout(1000))
		time.Sleep(time.Second)
		require.LessOrEqual(t, r.server.take("checkout", 5000), int64(500), "only tokens due since the loss are added")
		a.stop()
		b.stop()
	})
}

func TestServerAwayIsLoggedOnceAndCaughtUp(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		a := r.start("a", false, 0, checkout(1000))
		time.Sleep(time.Second)
		r.server.take("checkout", 1000)
		r.server.set(func() { r.server.away = true })
		before := a.Stats().Errors
		time.Sleep(1500 * time.Millisecond)
		require.Less(t, a.Stats().Errors-before, int64(30), "the replica backs off")
		require.ErrorIs(t, a.Stats().Away, errAway)
		r.server.set(func() { r.server.away = false })
		time.Sleep(1500 * time.Millisecond)
		require.NoError(t, a.Stats().Away)
		a.stop()
		require.Equal(t, 1, strings.Count(log.String(), "refills pause"))
		require.Equal(t, 1, strings.Count(log.String(), "refills go on"))
		require.EqualValues(t, 1000, r.server.take("checkout", 5000), "the gap was credited")
	})
}

func TestAnUpdateDuringAnOutageDoesNotEndIt(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		a := r.start("a", false, 1, checkout(1000))
		time.Sleep(time.Second)
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second)
		before := a.Stats().Errors
		for range 20 {
			require.NoError(t, a.Update([]Bucket{checkout(1000)}, nil, 1))
			require.ErrorIs(t, a.Stats().Away, errAway)
			synctest.Wait()
			require.ErrorIs(t, a.Stats().Away, errAway)
		}
		require.LessOrEqual(t, a.Stats().Errors-before, int64(1), "the replica backs off")
		r.server.set(func() { r.server.away = false })
		time.Sleep(3 * time.Second)
		require.NoError(t, a.Stats().Away)
		a.stop()
		require.Equal(t, 1, strings.Count(log.String(), "refills pause"), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "refills go on"), log.String())
	})
}

// A standby with nothing to announce only reads the pulse.
func TestAStandbyReportsThatItsServerIsUnavailable(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", true, 0, checkout(1000))
		resign := a.lead()
		var log lockedBuffer
		r.log = &log
		b := r.start("b", true, 0, checkout(1000))
		time.Sleep(3 * time.Second)
		r.server.set(func() { r.server.away = true })
		time.Sleep(3 * time.Second)
		require.ErrorIs(t, b.Stats().Away, errAway)
		r.server.set(func() { r.server.away = false })
		time.Sleep(3 * time.Second)
		require.NoError(t, b.Stats().Away)
		resign()
		a.stop()
		b.stop()
		require.Equal(t, 1, strings.Count(log.String(), "refills pause"), log.String())
		require.Equal(t, 1, strings.Count(log.String(), "refills go on"), log.String())
	})
}

func TestOneBadBucketDoesNotStopTheOthers(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		bad := checkout(1000)
		bad.Key = "bad"
		r.server.bad["bad"] = lua.ErrMalformedBucket
		a := r.start("a", false, 0, bad, checkout(1000))
		time.Sleep(10 * time.Second)
		require.GreaterOrEqual(t, len(r.server.gaps("checkout")), 95)
		require.Less(t, a.Stats().Faults, int64(20), "the malformed bucket is tried less and less often")
		r.server.set(func() { r.server.bad["bad"] = nil })
		time.Sleep(10 * time.Second)
		a.stop()
		require.NotEmpty(t, r.server.gaps("bad"))
		require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"))
		require.Equal(t, 1, strings.Count(log.String(), "bucket is refilled again"))
		require.NotContains(t, log.String(), "refills pause")
	})
}

func TestStandbysReadOnePulseWhileTheLeaderRefills(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a, b := r.start("a", true, 0, checkout(1000)), r.start("b", true, 0, checkout(1000))
		resign := a.lead()
		time.Sleep(2 * time.Second)
		before := 0
		b.set(func() { before = b.calls })
		time.Sleep(20 * time.Second)
		b.set(func() { require.Equal(t, before, b.calls, "a standby makes no refill call") })
		require.False(t, b.Stats().Racing)
		resign()
		a.stop()
		b.stop()
	})
}

// A fault that a standby has found may pass while the leader refills the bucket. The standby calls for the bucket until
// the fault has passed, and not after that.
func TestAStandbyDetectsThatABucketIsRightAgain(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var mu sync.Mutex
		last := map[string]Event{} // the last event that the standby observed, by key
		r.observe = func(name string, e Event) {
			if name == "b" {
				mu.Lock()
				defer mu.Unlock()
				last[e.Key] = e
			}
		}
		lastOf := func(key string) Event {
			mu.Lock()
			defer mu.Unlock()
			return last[key]
		}
		bucket := func(key string, rate int64) Bucket {
			p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(rate), Interval: interval}
			return Bucket{Key: key, Policy: p}
		}
		r.server.bad["bad"] = lua.ErrMalformedBucket
		a := r.start("a", true, 1, bucket("bad", 500), bucket("differs", 500), bucket("good", 500))
		resign := a.lead()
		time.Sleep(time.Second)
		b := r.start("b", true, 1, bucket("bad", 500), bucket("differs", 700), bucket("good", 500))
		time.Sleep(20 * time.Second)
		require.True(t, lastOf("bad").OwnFault())
		require.True(t, lastOf("differs").Outcome.Differs)
		require.False(t, lastOf("good").Outcome.Differs)

		right := bucket("differs", 700).Policy.Terms(policy.Fence{Epoch: 1})
		r.server.set(func() {
			r.server.bad["bad"] = nil
			r.server.buckets["differs"].Control.Terms = right // as if created anew by a replica with that file
		})
		time.Sleep(2 * maxBucketBackoff)
		require.NoError(t, lastOf("bad").Err)
		require.False(t, lastOf("differs").Outcome.Differs)
		before := 0
		b.set(func() { before = b.calls })
		time.Sleep(20 * time.Second)
		b.set(func() { require.Equal(t, before, b.calls, "the standby makes no further calls") })

		r.server.set(func() { r.server.bad["bad"] = lua.ErrMalformedBucket })
		a.stop()
		resign()
		time.Sleep(time.Second)
		require.True(t, lastOf("bad").OwnFault(), "the standby races")
		require.Less(t, slices.Max(r.server.gaps("good")), 2*interval+interval/2)
		a = r.start("a", true, 1, bucket("bad", 500), bucket("differs", 700), bucket("good", 500))
		resign = a.lead()
		time.Sleep(time.Second)
		require.False(t, b.Stats().Racing)
		r.server.set(func() { r.server.bad["bad"] = nil })
		time.Sleep(2 * maxBucketBackoff)
		require.NoError(t, lastOf("bad").Err, "a fault found while the standby raced ends, too")
		resign()
		a.stop()
		b.stop()
	})
}

// If the leader stops, a doubtful bucket is refilled as soon as the others.
func TestABucketInDoubtIsTakenOverAsSoonAsOthers(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		slower := checkout(1000)
		slower.Policy.Rate = policy.PerSecond(100)
		a := r.start("a", true, 1, checkout(1000))
		resign := a.lead()
		time.Sleep(time.Second)
		b := r.start("b", true, 1, slower)
		time.Sleep(8 * time.Second)
		a.stop()
		resign()
		time.Sleep(2 * maxBucketBackoff)
		b.stop()
		require.Less(t, slices.Max(r.server.gaps("checkout")), 2*interval+interval/2)
	})
}

func TestStandbysTakeOverTwoIntervalsAfterTheLeaderDies(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		names := []string{"a", "b", "c"}
		replicas := map[string]*replica{}
		for _, n := range names {
			replicas[n] = r.start(n, true, 0, checkout(1000))
		}
		resign := replicas["a"].lead()
		time.Sleep(2 * time.Second)
		leader := "a"
		var worst time.Duration
		for range 30 {
			r.server.set(func() { r.server.applied = map[string][]applied{} })
			time.Sleep(time.Second + time.Duration(r.rng.IntN(100))*time.Millisecond)
			// The leader's process ends, but its lease does not.
			replicas[leader].stop()
			resign()
			time.Sleep(5 * time.Second)
			worst = max(worst, slices.Max(r.server.gaps("checkout")))
			replicas[leader] = r.start(leader, true, 0, checkout(1000))
			leader = names[r.rng.IntN(len(names))]
			resign = replicas[leader].lead()
			time.Sleep(2 * time.Second)
			for _, n := range names {
				require.False(t, replicas[n].Stats().Racing, "%s does not race", n)
			}
		}
		resign()
		for _, rep := range replicas {
			rep.stop()
		}
		require.Less(t, worst, 2*interval+interval/2)
		t.Logf("largest gap over 30 lost leaders: %s", worst)
	})
}

func TestEveryoneRacesWithoutALeader(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a, b := r.start("a", true, 0, checkout(1000)), r.start("b", true, 0, checkout(1000))
		time.Sleep(5 * time.Second)
		require.True(t, a.Stats().Racing)
		require.True(t, b.Stats().Racing)
		require.GreaterOrEqual(t, len(r.server.gaps("checkout")), 40)
		a.stop()
		time.Sleep(time.Second)
		b.stop()
		require.Less(t, slices.Max(r.server.gaps("checkout")), interval*5/4)
	})
}

func TestResigningWaitsForTheCallUnderWay(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", true, 0, checkout(1000))
		a.set(func() { a.latency = 40 * time.Millisecond })
		resign := a.lead()
		for range 20 {
			time.Sleep(time.Second + time.Duration(r.rng.IntN(100))*time.Millisecond)
			resign()
			r.server.set(func() { r.server.applied[a.pulse] = nil })
			synctest.Wait()
			time.Sleep(interval)
			r.server.set(func() {
				require.Empty(t, r.server.applied[a.pulse], "no pulse is sent after Lead has returned")
			})
			resign = a.lead()
		}
		resign()
		a.stop()
	})
}

func TestAResignationCostsNoMoreThanAnInterval(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		names := []string{"a", "b", "c"}
		replicas := map[string]*replica{}
		for _, n := range names {
			replicas[n] = r.start(n, true, 0, checkout(1000))
		}
		const elected = 15 * time.Millisecond // how long it takes the successor to win
		resign := replicas["a"].lead()
		time.Sleep(2 * time.Second)
		var worst time.Duration
		for i := range 100 {
			r.server.set(func() { r.server.applied = map[string][]applied{} })
			time.Sleep(time.Second + time.Duration(r.rng.IntN(100))*time.Millisecond)
			resign()
			time.Sleep(elected)
			resign = replicas[names[(i+1)%3]].lead()
			time.Sleep(time.Second)
			worst = max(worst, slices.Max(r.server.gaps("checkout")))
		}
		resign()
		for _, rep := range replicas {
			rep.stop()
		}
		require.Less(t, worst, interval+interval*3/20+elected)
		t.Logf("largest gap over 100 resignations: %s", worst)
	})
}

func TestMoreBucketsThanABatchBeginAndChangeAtOnce(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		many := func(capacity int64) (list []Bucket) {
			for i := range 3000 {
				b := checkout(capacity)
				b.Key = fmt.Sprint("bucket-", i)
				list = append(list, b)
			}
			return list
		}
		a := r.start("a", false, 1, many(1000)...)
		time.Sleep(5 * interval)
		created := 0
		r.server.set(func() { created = len(r.server.applied) })
		require.Equal(t, 3000, created, "all buckets are created two intervals after they were found missing")
		require.NoError(t, a.Update(many(100), nil, 2))
		time.Sleep(interval)
		for _, b := range many(100) {
			require.LessOrEqual(t, r.server.take(b.Key, 5000), int64(100), b.Key)
		}
		a.stop()
	})
}

func TestUpdateSwitchesUnderALaterVersionOnly(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a, b := r.start("a", false, 1, checkout(1000)), r.start("b", false, 1, checkout(1000))
		time.Sleep(time.Second)
		lower := checkout(10)
		lower.Policy.Rate, lower.Policy.Interval = policy.PerSecond(10), interval
		require.NoError(t, a.Update([]Bucket{lower}, nil, 2))
		time.Sleep(time.Second)
		require.EqualValues(t, 10, r.server.take("checkout", 5000), "b's old config can't put the old policy back")
		require.ErrorIs(t, a.Update([]Bucket{checkout(1000)}, nil, 1), ErrConfig)
		require.ErrorIs(t, a.Update([]Bucket{checkout(1000)}, nil, policy.MaxTokens+1), ErrConfig, "the version is too high")
		for v := range int64(1000) {
			require.NoError(t, a.Update([]Bucket{checkout(100 + 100_000*(v%2))}, nil, 3+v))
			time.Sleep(time.Millisecond)
		}
		time.Sleep(300 * time.Millisecond)
		require.LessOrEqual(t, r.server.take("checkout", 5000), int64(760), "a storm of reloads adds no extra tokens")
		require.Zero(t, a.Stats().Errors, "a reload cuts off no call")
		a.stop()
		b.stop()
	})
}

func TestAStandbyBringsALaterVersionThatTheLeaderDoesNotHave(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a, b := r.start("a", true, 1, checkout(1000)), r.start("b", true, 1, checkout(1000))
		resign := a.lead()
		time.Sleep(2 * time.Second)
		require.NoError(t, b.Update([]Bucket{checkout(100)}, nil, 2))
		time.Sleep(10 * time.Millisecond)
		require.LessOrEqual(t, r.server.take("checkout", 5000), int64(100), "the later policy is in force at once")
		time.Sleep(5 * time.Second)
		require.EqualValues(t, 100, r.server.take("checkout", 5000), "the leader refills under the later policy")
		require.True(t, b.Stats().Racing, "no leader has the later file")
		require.NoError(t, a.Update([]Bucket{checkout(100)}, nil, 2))
		time.Sleep(time.Second)
		require.False(t, b.Stats().Racing, "the leader has the later file, too")
		require.Less(t, slices.Max(r.server.gaps("checkout")[1:]), 2*interval)
		resign()
		a.stop()
		b.stop()
	})
}

func TestAStandbyWithALaterFileRefillsItsNewBuckets(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		extra := checkout(1000)
		extra.Key = "extra"
		a := r.start("a", true, 1, checkout(1000))
		resign := a.lead()
		time.Sleep(time.Second)
		b := r.start("b", true, 2, checkout(1000), extra)
		time.Sleep(time.Second)
		require.EqualValues(t, 1000, r.server.take("extra", 5000))
		time.Sleep(time.Second)
		require.EqualValues(t, 400, r.server.take("extra", 400), "the bucket is refilled")
		require.NoError(t, a.Update([]Bucket{checkout(1000), extra}, nil, 2))
		time.Sleep(time.Second)
		require.False(t, b.Stats().Racing)
		require.Less(t, slices.Max(r.server.gaps("extra")), 2*interval)
		resign()
		a.stop()
		b.stop()
	})
}

func TestSteppedBucketGetsItsTokensAtTheInstant(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		quota := Bucket{Key: "quota", Policy: policy.Policy{Capacity: 3000, Steps: policy.Every(time.Hour),
			StepTokens: 1000, Interval: time.Second}}
		a, b := r.start("a", false, 0, quota), r.start("b", false, 0, quota)
		time.Sleep(10 * time.Second)
		require.EqualValues(t, 3000, r.server.take("quota", 5000))
		time.Sleep(time.Until(time.Now().Truncate(time.Hour).Add(time.Hour)))
		require.Zero(t, r.server.take("quota", 5000))
		time.Sleep(3 * time.Second)
		require.EqualValues(t, 1000, r.server.take("quota", 5000))
		// No replica runs at two instants. Their tokens are credited when a replica is back.
		a.stop()
		b.stop()
		time.Sleep(2 * time.Hour)
		a = r.start("a", false, 0, quota)
		time.Sleep(10 * time.Second)
		require.EqualValues(t, 2000, r.server.take("quota", 5000))
		a.stop()
	})
}

func TestRunRefusesASecondCaller(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.start("a", false, 0, checkout(1000))
		synctest.Wait()
		require.ErrorIs(t, a.Run(t.Context()), ErrRunning)
		require.ErrorIs(t, a.Lead(t.Context(), 1), ErrConfig)
		a.stop()
	})
}

func TestNewNamesTheBucketAndTheField(t *testing.T) {
	for _, b := range []Bucket{
		{Key: "", Policy: checkout(1000).Policy},
		{Key: "a}", Policy: checkout(1000).Policy},
		{Key: "a", Policy: policy.Policy{Capacity: 1}},
	} {
		err := checkBuckets([]Bucket{b})
		var be *BucketError
		require.ErrorAs(t, err, &be)
		require.Equal(t, b.Key, be.Bucket)
	}
	require.ErrorIs(t, checkBuckets([]Bucket{checkout(1000), checkout(1000)}), ErrConfig)
	_, err := New(Config{})
	require.ErrorIs(t, err, ErrConfig)
	require.ErrorContains(t, err, "Redis")
	_, err = New(Config{Redis: (*redis.Client)(nil)})
	require.ErrorContains(t, err, "Redis is nil")
	require.False(t, errors.Is(err, policy.ErrPolicy))
}

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
