package refill

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// users returns a set of one template: 60 tokens at a rate, refilled once a second.
func users(t testing.TB, version int64, rate policy.Rate) *policy.Templates {
	set, err := policy.NewTemplates(version, []policy.Template{{
		Prefix: "user:", Policy: policy.Policy{Capacity: 60, Rate: rate, Interval: time.Second},
	}}, nil)
	require.NoError(t, err)
	return set
}

// userKeys returns n names that the template matches.
func userKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("user:%d", i)
	}
	return keys
}

// shardsHeld returns how many shards of the template each replica refills.
func shardsHeld(replicas []*replica) (held []int) {
	for _, r := range replicas {
		held = append(held, r.Stats().Templates[0].Shards)
	}
	return held
}

// worstGap returns the longest time between two refills of one of the buckets.
func worstGap(s *server, keys []string) (worst time.Duration) {
	for _, key := range keys {
		if gaps := s.gaps(key); len(gaps) > 0 {
			worst = max(worst, slices.Max(gaps))
		}
	}
	return worst
}

func TestATemplatesBucketIsRefilledWhileItIsNotFull(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		a, b := r.startWith("a", false, 1, set), r.startWith("b", false, 1, set)
		time.Sleep(10 * time.Second)
		r.server.set(func() { r.server.polls = 0 })
		time.Sleep(100 * time.Second)
		r.server.set(func() {
			require.LessOrEqual(t, r.server.polls, 10*100, "the replica with the claim sends at most ten commands a second")
			require.Empty(t, r.server.users())
		})

		for i := range 20 {
			taken := time.Now()
			require.True(t, r.server.takeTemplate(set.Of("user:1"), "user:1", 10).OK)
			time.Sleep(3*time.Second + time.Duration(r.rng.IntN(1000))*time.Millisecond)
			r.server.set(func() {
				first := r.server.applied["user:1"][0]
				require.Less(t, first.at.Sub(taken), 1150*time.Millisecond, "bucket %d waits no longer than others", i)
			})
			time.Sleep(20 * time.Second)
			r.server.set(func() {
				require.EqualValues(t, 60, *r.server.buckets["user:1"].Tokens)
				require.Empty(t, r.server.active, "the full bucket has left the active set")
				r.server.applied = map[string][]applied{}
			})
			time.Sleep(20 * time.Second)
			r.server.set(func() { require.Empty(t, r.server.users(), "a full bucket is not refilled") })
		}
		a.stop()
		b.stop()
	})
}

// holder returns the replica that refills the active set, and checks that there is only one.
func holder(t *testing.T, replicas []*replica) int {
	t.Helper()
	held := shardsHeld(replicas)
	who := slices.IndexFunc(held, func(n int) bool { return n > 0 })
	require.GreaterOrEqual(t, who, 0, "no replica refills")
	for i, n := range held {
		require.True(t, i == who || n == 0, "two replicas refill: %v", held)
	}
	return who
}

func TestOneReplicaRefillsTheActiveSetAndAnotherTakesItOver(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set, keys := users(t, 1, policy.PerSecond(1)), userKeys(150)
		busy := func(d time.Duration) { // keeps every bucket active
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Second) {
				for _, key := range keys {
					r.server.takeTemplate(set.Of(key), key, 6)
				}
			}
		}
		replicas := []*replica{r.startWith("a", false, 1, set), r.startWith("b", false, 1, set), r.startWith("c", false,
			1, set)}
		for _, key := range keys {
			r.server.takeTemplate(set.Of(key), key, 40)
		}
		busy(10 * time.Second)
		holds := holder(t, replicas)
		r.server.set(func() { r.server.applied = map[string][]applied{} })
		busy(30 * time.Second)
		require.Equal(t, holds, holder(t, replicas), "the same replica keeps refilling")
		require.Less(t, worstGap(r.server, keys), 1010*time.Millisecond)

		var worst time.Duration
		for range 10 {
			time.Sleep(time.Duration(r.rng.IntN(1000)) * time.Millisecond)
			holds = holder(t, replicas)
			replicas[holds].stop()
			killed := time.Now()
			r.server.set(func() { r.server.applied = map[string][]applied{} })
			busy(15 * time.Second)
			r.server.set(func() {
				for _, key := range keys {
					worst = max(worst, r.server.applied[key][0].at.Sub(killed))
				}
			})
			replicas[holds] = r.startWith(replicas[holds].name, false, 1, set)
			busy(5 * time.Second)
			require.NotEqual(t, holds, holder(t, replicas))
		}
		t.Logf("longest time from the loss of the replica to the refill of a bucket: %s", worst)
		require.LessOrEqual(t, worst, 1900*time.Millisecond, "refills resume within two intervals")
		for _, rep := range replicas {
			rep.stop()
		}
	})
}

func TestALaterConfigurationTakesTheActiveSetFromAnOlderOne(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		old, later := users(t, 1, policy.PerSecond(1)), users(t, 2, policy.PerSecond(2))
		a, b := r.startWith("a", false, 1, old), r.startWith("b", false, 1, old)
		replicas := []*replica{a, b}
		busy := func(d time.Duration) {
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(time.Second) {
				r.server.takeTemplate(later.Of("user:1"), "user:1", 3)
			}
		}
		busy(10 * time.Second)
		holder(t, replicas)
		c := r.startWith("c", false, 2, later)
		replicas = append(replicas, c)
		busy(3 * time.Second)
		require.Equal(t, 2, holder(t, replicas), "the replica with the later file refills")
		c.stop()
		busy(6 * time.Second)
		require.NotEqual(t, 2, holder(t, replicas), "a replica with the old file refills if there is no other")
		c = r.startWith("c", false, 2, later)
		replicas[2] = c
		busy(6 * time.Second)
		require.Equal(t, 2, holder(t, replicas), "the replica with the later file refills again")
		for _, rep := range replicas {
			rep.stop()
		}
	})
}

// If the key of the claim holds something else, all replicas refill the templates. That costs only work.
func TestAnUnreadableClaimKeepsNoReplicaFromRefilling(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		r.server.bad["refiller:pulse:active"] = lua.ErrMalformedBucket
		a, b := r.startWith("a", false, 1, set), r.startWith("b", false, 1, set)
		time.Sleep(time.Second)
		r.server.takeTemplate(set.Of("user:1"), "user:1", 60)
		time.Sleep(20 * time.Second)
		r.server.set(func() { require.InDelta(t, 20, *r.server.buckets["user:1"].Tokens, 2) })
		a.stop()
		b.stop()
	})
}

// Only the first failure of a bucket itself is logged. If the bucket then leaves the set, or the server fails, nothing
// more is logged about it.
func TestAFailureOfATemplatesBucketIsLoggedOnce(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		beside := "" // in the shard of user:1, and refilled all the while
		for i := 2; beside == ""; i++ {
			if key := fmt.Sprintf("user:%d", i); lua.ActiveShard(key) == lua.ActiveShard("user:1") {
				beside = key
			}
		}
		for name, after := range map[string]func(){
			"the bucket was deleted": func() {
				r.server.bad["user:1"] = nil
				delete(r.server.buckets, "user:1")
			},
			"the server fails": func() { r.server.bad["user:1"] = errAway },
		} {
			var log lockedBuffer
			r.log, r.server = &log, newServer()
			r.server.bad["user:1"] = lua.ErrMalformedBucket
			r.server.takeTemplate(set.Of("user:1"), "user:1", 60)
			r.server.takeTemplate(set.Of(beside), beside, 60)
			a := r.startWith("a", false, 1, set)
			for a.Stats().Templates[0].Faults == 0 {
				time.Sleep(time.Millisecond)
			}
			r.server.set(after)
			time.Sleep(5 * time.Second)
			a.stop()
			require.Equal(t, 1, strings.Count(log.String(), "bucket can't be refilled"), "%s: %s", name, log.String())
		}
	})
}

func TestShardsOfManyTemplatesAreAllRefilled(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var list []policy.Template
		for i := range 20 {
			list = append(list, policy.Template{Prefix: fmt.Sprintf("t%d:", i), Policy: policy.Policy{
				Capacity: 60, Rate: policy.Rate{Tokens: 1, Per: time.Minute}, Interval: time.Second,
			}})
		}
		set, err := policy.NewTemplates(1, list, nil)
		require.NoError(t, err)
		var keys []string
		for i := range list {
			for n := range 40 { // some in every shard: more of them are due at once than go in a round trip
				key := fmt.Sprintf("t%d:%d", i, n)
				keys = append(keys, key)
				r.server.takeTemplate(set.Of(key), key, 60)
			}
		}
		r.server.set(func() { require.Greater(t, len(r.server.active), 2*countsAtOnce) })
		a, b := r.startWith("a", false, 1, set), r.startWith("b", false, 1, set)
		for _, rep := range []*replica{a, b} {
			rep.set(func() { rep.latency = time.Millisecond })
		}
		time.Sleep(time.Minute)
		r.server.set(func() { r.server.applied = map[string][]applied{} })
		time.Sleep(time.Minute)
		for _, key := range keys {
			require.GreaterOrEqual(t, len(r.server.gaps(key)), 57, key)
		}
		require.Less(t, worstGap(r.server, keys), 1500*time.Millisecond)
		a.stop()
		b.stop()
	})
}

// A replica that can't refill every bucket in each interval keeps the claim. If the claim moved from replica to
// replica, each of them would first have to read the indexes.
func TestAReplicaThatIsBehindKeepsTheClaim(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set, keys := users(t, 1, policy.Rate{Tokens: 1, Per: time.Minute}), userKeys(6000)
		for _, key := range keys {
			r.server.takeTemplate(set.Of(key), key, 60)
		}
		r.batch = 10
		var replicas []*replica
		for _, name := range []string{"a", "b", "c"} {
			rep := r.startWith(name, false, 1, set)
			// latency each way: two at a time, 330 batches can be made in a second, and 600 are due
			rep.set(func() { rep.latency = 3 * time.Millisecond })
			replicas = append(replicas, rep)
		}
		time.Sleep(time.Minute)
		calls := func() (stale, applied int64) {
			for _, rep := range replicas {
				c := rep.Stats().Templates[0].Calls
				stale, applied = stale+c[policy.StatusStale], applied+c[policy.StatusApplied]
			}
			return stale, applied
		}
		staleBefore, appliedBefore := calls()
		holds := holder(t, replicas)
		r.server.set(func() { r.server.applied = map[string][]applied{} })
		time.Sleep(time.Minute)
		stale, applied := calls()
		worst := worstGap(r.server, keys)
		t.Logf("%d refills of %d that were due, longest gap %s", applied-appliedBefore, 60*len(keys), worst)
		require.Zero(t, stale-staleBefore, "two replicas refill")
		require.Equal(t, holds, holder(t, replicas))
		require.Greater(t, worst, 1200*time.Millisecond, "the replica can't keep up")
		require.Less(t, worst, 3*time.Second, "every bucket is refilled")
		for _, rep := range replicas {
			rep.stop()
		}
	})
}

// Calls take longer than the time between two polls of the idle shards, and the replica's own buckets are always due.
func TestPollsFarAwayDoNotReplaceTheRoundsOfASet(t *testing.T) {
	for _, ms := range []int{50, 60, 70, 80, 90, 100, 150} {
		t.Run(fmt.Sprint(ms, " ms one way"), func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:",
					Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(300), Interval: interval}}}, nil)
				require.NoError(t, err)
				buckets := []Bucket{checkout(1000), checkout(1000), checkout(1000)}
				for i := range buckets {
					buckets[i].Key = fmt.Sprint("bucket", i)
				}
				rep := r.startWith("a", false, 1, set, buckets...)
				rep.set(func() { rep.latency = time.Duration(ms) * time.Millisecond })
				for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
					r.server.takeTemplate(set.Of("user:1"), "user:1", 10)
				}
				worst := worstGap(r.server, []string{"user:1"})
				require.Less(t, worst, 2*time.Second)
				require.NotEmpty(t, r.server.gaps("user:1"))
				rep.stop()
			})
		})
	}
}

// A call takes longer than a refill interval, and the replica that takes over the active set needs several calls. The
// longest stretch that one refill credits is two seconds.
func TestReplicasFarAwayRefillTheActiveSet(t *testing.T) {
	for _, oneWay := range []time.Duration{30 * time.Millisecond, 75 * time.Millisecond, 150 * time.Millisecond} {
		t.Run(oneWay.String(), func(t *testing.T) {
			simulate(t, func(t *testing.T, r *rig) {
				set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "user:",
					Policy: policy.Policy{Capacity: 1000, Rate: policy.PerSecond(300), Interval: interval}}}, nil)
				require.NoError(t, err)
				var replicas []*replica
				for _, name := range []string{"a", "b", "c"} {
					rep := r.startWith(name, false, 1, set)
					rep.set(func() { rep.latency = oneWay })
					replicas = append(replicas, rep)
				}
				for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
					r.server.takeTemplate(set.Of("user:1"), "user:1", 10)
				}
				worst := worstGap(r.server, []string{"user:1"})
				r.server.set(func() { t.Logf("%d refills, longest gap %s", len(r.server.applied["user:1"]), worst) })
				require.Less(t, worst, 2*time.Second)
				require.Less(t, worst, 11*oneWay, "longest gap between refills")
				for _, rep := range replicas {
					rep.stop()
				}
			})
		})
	}
}

// The pulse may return before the reply to a call for the claim has arrived.
func TestAClaimMakesNoStandbyRefill(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		a := r.startWith("a", true, 1, users(t, 1, policy.PerSecond(1)))
		a.stop()
		w := a.assign([]master{{}})[0]
		won := func() bool {
			applied := lua.RefillResult{Outcome: policy.Outcome{Status: policy.StatusApplied}}
			w.applyReply(w.sets.claim, &applied, &trip{sent: time.Now(), replied: time.Now()}, &notices{})
			return w.sets.held
		}
		w.pulse.state = silent
		require.True(t, won())
		beat := lua.PeekReply{Refilled: lua.Refilled{Version: policy.Version{Index: 7}}}
		w.applyPulse(beat, nil, time.Now(), time.Now())
		require.False(t, w.refills())
		require.False(t, w.sets.held)
		require.False(t, won())
	})
}

func TestCreditOfTemplatesIsExactWhileReplicasCrashAndPause(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set, keys := users(t, 1, policy.Rate{Tokens: 7, Per: 3 * time.Second}), userKeys(50)
		names := []string{"a", "b", "c"}
		replicas := map[string]*replica{}
		for _, n := range names {
			replicas[n] = r.startWith(n, false, 1, set)
		}
		taken, since := map[string]int64{}, map[string]time.Time{}
		take := func(key string, n int64) {
			b := r.server.takeTemplate(set.Of(key), key, n)
			if b.OK {
				taken[key] += n
			}
			if since[key].IsZero() {
				since[key] = time.Now()
			}
		}
		for range 60 {
			rep := replicas[names[r.rng.IntN(len(names))]]
			switch r.rng.IntN(3) {
			case 0:
				rep.stop()
				replicas[rep.name] = r.startWith(rep.name, false, 1, set)
			case 1:
				thaw := make(chan struct{})
				rep.set(func() { rep.thaw = thaw })
				time.Sleep(time.Duration(r.rng.IntN(4000)) * time.Millisecond)
				rep.set(func() { rep.thaw = nil })
				close(thaw)
			}
			time.Sleep(time.Duration(r.rng.IntN(3000)) * time.Millisecond)
			for range 20 {
				take(keys[r.rng.IntN(len(keys))], 1+r.rng.Int64N(30))
			}
		}
		time.Sleep(3 * time.Minute)
		for _, rep := range replicas {
			rep.stop()
		}
		for _, key := range keys {
			if since[key].IsZero() {
				continue
			}
			require.EqualValues(t, 60, *r.server.buckets[key].Tokens, "%s is full in the end", key)
			require.Equal(t, taken[key], r.server.added[key], "%s: refills added exactly the tokens that were taken", key)
			versions := map[policy.Version]bool{}
			for _, a := range r.server.applied[key] {
				require.False(t, versions[a.version], "%s: index %v was won twice", key, a.version)
				versions[a.version] = true
			}
			due := int64(float64(7) / 3 * time.Since(since[key]).Seconds())
			require.LessOrEqual(t, taken[key], 60+due+1, "%s: takes are within capacity and rate", key)
		}
		require.Empty(t, r.server.active)
	})
}

func TestLostActiveSetEntriesComeBackAndStrayNamesAreRemoved(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		a := r.startWith("a", false, 1, set)
		take := func(n int64) bool { return r.server.takeTemplate(set.Of("user:1"), "user:1", n).OK }
		require.True(t, take(20))
		time.Sleep(3 * time.Second)
		r.server.set(func() { clear(r.server.active) })
		time.Sleep(20 * time.Second)
		before := len(r.server.gaps("user:1"))
		require.True(t, take(20), "no replica refills the bucket")
		time.Sleep(3 * time.Second)
		require.Len(t, r.server.gaps("user:1"), before)
		require.False(t, take(59), "denied")
		time.Sleep(3 * time.Second)
		require.Greater(t, len(r.server.gaps("user:1")), before, "the bucket is refilled again")
		time.Sleep(90 * time.Second)
		require.True(t, take(60), "the bucket is full")
		time.Sleep(90 * time.Second)

		r.server.set(func() {
			shard := lua.ActiveShard("user:2")
			r.server.active[lua.Shard{Prefix: "user:", Number: shard}] = map[string]bool{"user:2": true, "other": true,
				"user:}": true}
			elsewhere := (lua.ActiveShard("user:3") + 1) % lua.ActiveShards
			r.server.active[lua.Shard{Prefix: "user:", Number: elsewhere}] = map[string]bool{"user:3": true}
		})
		time.Sleep(3 * time.Second)
		r.server.set(func() {
			require.Empty(t, r.server.active, "none of them is a bucket of the shard")
			require.Nil(t, r.server.bucket("user:2").Control, "no bucket was created")
		})
		a.stop()
	})
}

// Redis may lose an entry of a shard, and another bucket may enter the shard before the replica counts the names again.
// The same happens if Redis comes back with an older set.
func TestAnEntryThatComesForALostOneIsFound(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		keys := userKeys(2)
		for i := 2; lua.ActiveShard(keys[0]) != lua.ActiveShard(keys[1]); i++ {
			keys[1] = fmt.Sprintf("user:%d", i)
		}
		shard := lua.Shard{Prefix: "user:", Number: lua.ActiveShard(keys[0])}
		a := r.startWith("a", false, 1, set)
		var worst time.Duration
		for range 20 {
			require.True(t, r.server.takeTemplate(set.Of(keys[0]), keys[0], 50).OK)
			time.Sleep(3*time.Second + time.Duration(r.rng.IntN(1000))*time.Millisecond)
			r.server.set(func() {
				require.True(t, r.server.active[shard][keys[0]])
				r.server.leave(shard, keys[0])
				r.server.applied = map[string][]applied{}
			})
			require.True(t, r.server.takeTemplate(set.Of(keys[1]), keys[1], 50).OK)
			taken := time.Now()
			time.Sleep(4 * time.Second)
			r.server.set(func() {
				require.Equal(t, map[string]bool{keys[1]: true}, r.server.active[shard])
				require.NotEmpty(t, r.server.applied[keys[1]])
				worst = max(worst, r.server.applied[keys[1]][0].at.Sub(taken))
				require.LessOrEqual(t, worst, 3*time.Second)
				r.server.applied = map[string][]applied{}
			})
			r.server.set(func() { r.server.enter(shard, keys[0]) })
			time.Sleep(90 * time.Second)
		}
		t.Logf("longest time from the take to the first refill: %s", worst)
		a.stop()
	})
}

// A term may begin before, while or after the workers begin. The race detector would report an error.
func TestATermMayBeginWhileTheReplicaDoes(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		for i := range 200 {
			rep := r.startWith(strconv.Itoa(i), true, 1, set)
			for range r.rng.IntN(4) {
				runtime.Gosched()
			}
			resign := rep.lead()
			time.Sleep(5 * time.Second)
			require.True(t, rep.Stats().Leading)
			resign()
			rep.stop()
		}
	})
}

func TestElectedReplicasTakeTheActiveSetOver(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set, keys := users(t, 1, policy.PerSecond(1)), userKeys(100)
		busy := func() {
			for _, key := range keys {
				r.server.takeTemplate(set.Of(key), key, 6)
			}
		}
		names := []string{"a", "b", "c"}
		replicas := map[string]*replica{}
		start := func(n string) {
			replicas[n] = r.startWith(n, true, 1, set)
		}
		for _, n := range names {
			start(n)
		}
		leader := "a"
		resign := replicas[leader].lead()
		for _, key := range keys {
			r.server.takeTemplate(set.Of(key), key, 40)
		}
		var resigned, died time.Duration
		for range 20 {
			for range 3 {
				busy()
				time.Sleep(5 * time.Second)
			}
			for _, n := range names {
				held := replicas[n].Stats().Templates[0].Shards
				require.Equal(t, n == leader, held > 0, "%s: only the leader refills shards", n)
			}
			r.server.set(func() { r.server.applied = map[string][]applied{} })
			busy()
			time.Sleep(time.Second + time.Duration(r.rng.IntN(1000))*time.Millisecond)
			next := names[(slices.Index(names, leader)+1)%3]
			if r.rng.IntN(2) == 0 {
				resign()
				time.Sleep(15 * time.Millisecond)
				resign = replicas[next].lead()
				time.Sleep(4 * time.Second)
				resigned = max(resigned, worstGap(r.server, keys))
			} else { // its process has ended, but its lease has not
				replicas[leader].stop()
				time.Sleep(4 * time.Second)
				died = max(died, worstGap(r.server, keys))
				resign()
				start(leader)
				resign = replicas[next].lead()
				time.Sleep(time.Second)
			}
			leader = next
		}
		t.Logf("longest time without a refill: %s when leaders resign, %s when they die", resigned, died)
		require.Less(t, resigned, 1700*time.Millisecond)
		require.Less(t, died, 2160*time.Millisecond, "two intervals, the standbys' wait and the network delay")
		resign()
		for _, rep := range replicas {
			rep.stop()
		}
	})
}

func TestALaterVersionOfATemplateIsInForceWithTheNextRefill(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.PerSecond(1))
		a := r.startWith("a", false, 1, set)
		r.server.takeTemplate(set.Of("user:1"), "user:1", 60)
		time.Sleep(3 * time.Second)
		next := users(t, 2, policy.PerSecond(10))
		require.NoError(t, a.Update(nil, next, 2))
		time.Sleep(4 * time.Second)
		tokens := int64(0)
		r.server.set(func() { tokens = *r.server.buckets["user:1"].Tokens })
		require.Greater(t, tokens, int64(20), "the later rate of ten a second is used")
		require.NoError(t, a.Update(nil, nil, 3))
		r.server.takeTemplate(next.Of("user:1"), "user:1", tokens)
		time.Sleep(10 * time.Second)
		r.server.set(func() {
			require.LessOrEqual(t, *r.server.buckets["user:1"].Tokens, int64(10), "a bucket without a template is not refilled")
		})
		a.stop()
	})
}

func TestAnUnavailableServerIsPausedAndThenCaughtUp(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		var log lockedBuffer
		r.log = &log
		set, keys := users(t, 1, policy.PerSecond(1)), userKeys(100)
		a := r.startWith("a", false, 1, set)
		for _, key := range keys {
			r.server.takeTemplate(set.Of(key), key, 60)
		}
		time.Sleep(5500 * time.Millisecond)
		r.server.set(func() { r.server.away, r.server.polls = true, 0 })
		time.Sleep(3 * time.Second)
		r.server.set(func() { r.server.away = false })
		time.Sleep(4 * time.Second)
		for _, key := range keys {
			require.True(t, r.server.takeTemplate(set.Of(key), key, 10).OK, "%s: the gap was credited", key)
		}
		a.stop()
		require.Equal(t, 1, strings.Count(log.String(), "refills pause"))
		require.Equal(t, 1, strings.Count(log.String(), "refills go on"))
	})
}

// A reload may configure a bucket that a template matches. From then on the bucket is refilled under its own policy
// only. If both policies were sent under one version, the first one would stay in force.
func TestABucketThatIsConfiguredLeavesItsTemplate(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		keys := userKeys(20)
		set := users(t, 1, policy.PerSecond(1))
		a := r.startWith("a", false, 1, set)
		for _, key := range keys {
			r.server.takeTemplate(set.Of(key), key, 50)
		}
		time.Sleep(5*time.Second + time.Duration(r.rng.IntN(1000))*time.Millisecond)
		next, err := policy.NewTemplates(2, []policy.Template{{
			Prefix: "user:", Policy: policy.Policy{Capacity: 60, Rate: policy.PerSecond(1), Interval: time.Second},
		}}, keys)
		require.NoError(t, err)
		own := make([]Bucket, len(keys))
		for i, key := range keys {
			own[i] = Bucket{Key: key, Policy: policy.Policy{Capacity: 100, Rate: policy.PerSecond(2), Interval: time.Second}}
		}
		fence := func(f policy.Fence) {
			r.server.set(func() {
				for _, key := range keys {
					r.server.buckets[key].Control.Terms.Fence = f
				}
			})
		}
		fence(policy.Fence{Epoch: policy.OwnEpoch}) // an override counts
		require.NoError(t, a.Update(own, next, 2))
		time.Sleep(5 * time.Second)
		r.server.set(func() { require.Empty(t, r.server.active) })
		fence(policy.Fence{}) // it is unset
		time.Sleep(5 * time.Second)
		r.server.set(func() {
			for _, key := range keys {
				require.EqualValues(t, 100, r.server.buckets[key].Control.Terms.Capacity, key)
			}
		})
		a.stop()
	})
}

// A standby that raced gets a new configuration just after a leader has begun.
func TestAStandbyHoldsNoActiveSetsAfterAnUpdate(t *testing.T) {
	simulate(t, func(t *testing.T, r *rig) {
		set := users(t, 1, policy.Rate{Tokens: 1, Per: time.Minute})
		b, l := r.startWith("b", true, 1, set), r.startWith("l", true, 1, set)
		resign := b.lead()
		for _, key := range userKeys(20) {
			require.True(t, r.server.takeTemplate(set.Of(key), key, 50).OK)
		}
		time.Sleep(5 * time.Second)
		resign()
		time.Sleep(5 * time.Second)
		require.True(t, b.Stats().Racing && l.Stats().Racing)
		racer := b
		if l.Stats().Templates[0].Active > 0 {
			racer = l
		}
		require.EqualValues(t, 20, racer.Stats().Templates[0].Active)
		leader := r.startWith("leader", true, 1, set)
		time.Sleep(time.Second)
		resign = leader.lead()
		beats := func() (yes bool) {
			r.server.set(func() {
				list := r.server.applied[leader.pulse]
				yes = list[len(list)-1].by == "leader"
			})
			return yes
		}
		for !beats() {
			time.Sleep(time.Millisecond)
		}
		require.NoError(t, racer.Update(nil, set, 1))
		time.Sleep(time.Minute)
		require.False(t, racer.Stats().Racing)
		require.EqualValues(t, 20, leader.Stats().Templates[0].Active)
		require.Zero(t, racer.Stats().Templates[0].Active, "only the leader refills the buckets")
		require.Zero(t, racer.Stats().Templates[0].Shards)
		resign()
		leader.stop()
		l.stop()
		b.stop()
	})
}
