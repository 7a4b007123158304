package flows

import (
	"cmp"
	"flag"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

var all = flag.Bool("rows", false, "run every row of the table")

const usual = "capacity: 1000\nrate: 1000/s\nflows: {}"

// row is a row of the table: groups of flows that take from a bucket, and a check of the tokens that they get.
type row struct {
	name   string
	bucket string // configuration of the bucket; empty: usual
	groups func(w *world) [][]*asker
	settle time.Duration           // time before the measurement; 0: longer than the usual half-life of demand
	then   func(groups [][]*asker) // called after settle, to change the demand; may be nil
	takes  time.Duration           // duration of the measurement; 0: the usual time
	check  func(t assert.TestingT, sums []sum)
}

// beside returns a row with one loud flow and n quiet flows. Each quiet flow asks for perSecond tokens per second, by
// takes of size tokens.
func beside(n int, perSecond float64, size int64, check func(t assert.TestingT, sums []sum)) row {
	return row{
		name: fmt.Sprintf("%d flows that ask %g per s by %d", n, perSecond, size), check: check,
		groups: func(w *world) [][]*asker {
			return [][]*asker{w.loud(2500), w.many(n, "quiet-", perSecond, size)}
		},
	}
}

// under returns the row with another bucket.
func (r row) under(bucket string) row {
	r.bucket = bucket
	r.name += ", " + bucket
	return r
}

// part returns a check that the flows of the last group get, on average, at least a part of the tokens that they ask
// for.
func part(least float64) func(t assert.TestingT, sums []sum) {
	return func(t assert.TestingT, sums []sum) {
		last := sums[len(sums)-1]
		assert.GreaterOrEqual(t, last.got/last.asked, least)
	}
}

// each returns a check of tokens per second: the flows of the last group get at least least on average, and the first
// group gets at most loudAtMost.
func each(least, loudAtMost float64) func(t assert.TestingT, sums []sum) {
	return func(t assert.TestingT, sums []sum) {
		last := sums[len(sums)-1]
		assert.GreaterOrEqual(t, last.got/float64(last.flows), least)
		assert.LessOrEqual(t, sums[0].got, loudAtMost)
	}
}

var rows = []row{
	beside(50, 24, 1, func(t assert.TestingT, sums []sum) {
		each(18.6, 80)(t, sums)
		assert.GreaterOrEqual(t, sums[0].got+sums[1].got, 970.)
	}),
	beside(50, 10, 1, func(t assert.TestingT, sums []sum) {
		part(.95)(t, sums)
		assert.GreaterOrEqual(t, sums[0].got, 475.)
	}),
	beside(50, 10, 10, part(.95)),
	{
		name: "fifty flows that ask 10 per s in bursts",
		groups: func(w *world) [][]*asker {
			quiet := w.many(50, "quiet-", 10, 1)
			for i, a := range quiet {
				a.bursts = true
				a.phase = time.Duration(i) * 100 * time.Millisecond
			}
			return [][]*asker{w.loud(2500), quiet}
		},
		check: part(.95),
	},
	beside(1000, .5, 1, func(t assert.TestingT, sums []sum) {
		part(.95)(t, sums)
		assert.Zero(t, sums[1].denied, "no first take is denied")
	}),
	beside(1000, 1.2, 1, each(.93, 80)),
	beside(10_000, .05, 1, part(.95)),
	beside(50, 18, 1, part(.95)).under("capacity: 2000\nrate: 1000/s\ninterval: 1s\nflows: {}"),
	beside(50, 18, 1, part(.95)).under("capacity: 200\nrate: 1000/s\nflows: {}"),
	{
		name: "fifty flows that ask 10 per s in the process of the loud flow",
		groups: func(w *world) [][]*asker {
			c := w.client()
			return [][]*asker{{newAsker(c, "loud", 2500, 1)}, w.many(50, "quiet-", 10, 1, c)}
		},
		check: part(.95),
	},
	{
		name:   "none",
		groups: func(w *world) [][]*asker { return [][]*asker{w.loud(2500)} },
		check:  func(t assert.TestingT, sums []sum) { assert.GreaterOrEqual(t, sums[0].got, 970.) },
	},
	{
		name: "weights of 1, 2 and 5", bucket: "capacity: 1000\nrate: 1000/s\nflows: {weights: {b: 2, c: 5}}",
		groups: func(w *world) [][]*asker {
			ask := func(name string) []*asker { return []*asker{newAsker(w.client(), name, 900, 1)} }
			return [][]*asker{ask("a"), ask("b"), ask("c")}
		},
		check: func(t assert.TestingT, sums []sum) {
			total := sums[0].got + sums[1].got + sums[2].got
			for i, weight := range []float64{1, 2, 5} {
				fair := total * weight / 8
				assert.GreaterOrEqual(t, sums[i].got, .95*fair)
				assert.LessOrEqual(t, sums[i].got, fair+.06*total)
			}
		},
	},
	{
		name: "51 flows that ask 50 per s, 25 of them by 50",
		groups: func(w *world) [][]*asker {
			return [][]*asker{w.many(26, "one-", 50, 1), w.many(25, "fifty-", 50, 50)}
		},
		check: func(t assert.TestingT, sums []sum) { assert.GreaterOrEqual(t, sums[1].got/25, 16.) },
	},
	{
		name: "a slow bucket", bucket: "capacity: 100\nrate: 10/s\nflows: {}",
		groups: func(w *world) [][]*asker {
			return [][]*asker{w.loud(25), w.many(50, "quiet-", .18, 1)}
		},
		settle: time.Minute, takes: 5 * time.Minute,
		check: part(.95),
	},
	{
		name: "the loud flow falls silent and fifty flows ask 50 per s",
		groups: func(w *world) [][]*asker {
			return [][]*asker{w.loud(2500), w.many(50, "quiet-", 24, 1)}
		},
		settle: 20 * time.Second,
		then: func(groups [][]*asker) {
			groups[0][0].ask(0)
			for _, a := range groups[1] {
				a.ask(50)
			}
			time.Sleep(3 * time.Second) // the time in which the division must adapt
		},
		check: func(t assert.TestingT, sums []sum) { assert.GreaterOrEqual(t, sums[1].got, 950.) },
	},
	{
		name: "a team of new names beside a team of fifty",
		groups: func(w *world) [][]*asker {
			strangers := newAsker(w.client(), "strangers/", 2500, 1)
			strangers.fresh = true
			return [][]*asker{{strangers}, w.many(50, "team/", 24, 1)}
		},
		check: each(9.5, 1000),
	},
}

// rounds is how often a row is measured at most. A busy machine may have no processor time for askers or refillers.
const rounds = 3

// missed collects the checks that fail in a round.
type missed []string

func (m *missed) Errorf(format string, args ...any) { *m = append(*m, fmt.Sprintf(format, args...)) }

// TestTable measures how a bucket of 1,000 tokens per second is divided. One round has to pass all checks of the row.
// Without -rows it runs only the first row.
func TestTable(t *testing.T) {
	chosen := rows
	if !*all {
		chosen = rows[:1]
	}
	for _, r := range chosen {
		t.Run(r.name, func(t *testing.T) {
			bucket := r.bucket
			if bucket == "" {
				bucket = usual
			}
			w := newWorld(t, bucket)
			w.refill()
			w.refill()
			w.ready()
			groups := r.groups(w)
			w.start(groups...)
			time.Sleep(cmp.Or(r.settle, 8*time.Second)) // until demand has been steady for longer than its half-life
			if r.then != nil {
				r.then(groups)
			}
			for range rounds {
				sums := measure(cmp.Or(r.takes, 10*time.Second), groups...)
				report(t, sums)
				var m missed
				r.check(&m, sums)
				if len(m) == 0 {
					return
				}
				t.Log(m)
			}
			t.Error("no round passes all checks")
		})
	}
}

// report prints how many tokens each group asked for and got. It fails the test if a take failed.
func report(t *testing.T, sums []sum) {
	t.Helper()
	total := 0.
	for _, s := range sums {
		t.Logf("%d flows that ask %7.2f/s each get %7.2f/s each (%5.1f %%); errors: %d", s.flows,
			s.asked/float64(s.flows), s.got/float64(s.flows), 100*s.got/max(1e-9, s.asked), s.failed)
		total += s.got
		assert.Zero(t, s.failed, "no take fails")
	}
	t.Logf("all get %.1f/s", total)
}

// TestRefillersThatDieEachSecond starts a replica and kills the one that started first, once a second. With an
// election, the killed replica is the leader, or the candidate that would lead when the dead leader's lease ends. No
// take may fail, and no more than the capacity and the rate may be taken. Without -rows there are only a few deaths.
func TestRefillersThatDieEachSecond(t *testing.T) {
	deployments := []deployment{{}}
	if *all {
		deployments = append(deployments, deployment{elected: true}, deployment{cluster: true},
			deployment{cluster: true, elected: true})
	}
	for _, d := range deployments {
		t.Run(d.String(), func(t *testing.T) { dieEachSecond(t, d) })
	}
}

func dieEachSecond(t *testing.T, d deployment) {
	t.Helper()
	before, during := 2, 3
	if *all {
		before, during = 8, 10
	}
	w := newWorldOf(t, d, usual)
	w.refill()
	w.refill()
	w.ready()
	loud := w.loud(2500)
	quiet := w.many(50, "quiet-", 24, 1)
	w.start(loud, quiet)
	die := func(times int) {
		for range times {
			time.Sleep(time.Second)
			w.refill()
			w.kill()
		}
	}
	die(before)
	over := make(chan struct{})
	go func() {
		defer close(over)
		die(during)
	}()
	span := time.Duration(during) * time.Second
	sums := measure(span, loud, quiet)
	<-over
	report(t, sums)
	require.LessOrEqual(t, (sums[0].got+sums[1].got)*span.Seconds(), 1000*span.Seconds()+1000)
	if *all {
		require.GreaterOrEqual(t, sums[1].got/50, 17.5)
	}
}

// TestWithoutRefillersABucketIsServedInOrder kills the only replica, and then starts a hundred new flows. When the last
// plan has ended, takes are served in the order in which they come.
func TestWithoutRefillersABucketIsServedInOrder(t *testing.T) {
	w := newWorld(t, usual)
	w.refill()
	w.ready()
	loud := w.loud(1500)
	w.start(loud)
	time.Sleep(5 * time.Second) // until the loud flow is listed
	w.kill()
	fresh := w.many(100, "new-", 12, 1)
	w.start(fresh)
	time.Sleep(4 * time.Second) // until the plan has ended
	sums := measure(5*time.Second, loud, fresh)
	report(t, sums)
	// With a plan, the loud flow would get less than one percent of the tokens that it asks for. Without a plan, a slow
	// machine may serve it less than the others, because its takes come in larger batches. But it gets far more than one
	// percent.
	require.Greater(t, sums[0].got/sums[0].asked, sums[1].got/sums[1].asked/3,
		"the loud flow gets far more than one percent")
	require.Greater(t, sums[0].got+sums[1].got, 900.)
}

// TestFlowsComeAndGoWithAVersion turns flows on and off with new versions of the configuration.
func TestFlowsComeAndGoWithAVersion(t *testing.T) {
	const plain = "capacity: 400\nrate: 400/s" // so little that the loud flow uses it up even on a busy machine
	w := newWorld(t, plain)
	p := w.refill()
	w.ready()
	loud := w.loud(2500)
	quiet := w.many(20, "quiet-", 5, 1)
	w.start(loud, quiet)
	served := func() float64 {
		s := measure(time.Second, quiet)[0]
		return s.got / s.asked
	}
	require.Less(t, served(), .9, "the quiet flows are denied without flows")
	change := func(version int, bucket string) {
		w.configure(version, bucket)
		w.reload(p)
	}
	change(2, plain+"\nflows: {}")
	require.Eventually(t, func() bool { return served() > .95 }, patience, time.Millisecond,
		"the quiet flows get what they ask for with flows")
	change(3, plain)
	require.Eventually(t, func() bool { return served() < .9 }, patience, time.Millisecond,
		"the quiet flows are denied without flows again")
}

// TestTheBucketsOfTemplatesAndPoolsAreDivided runs one loud flow and twenty quiet flows on the bucket of a template,
// and on the bucket of a pool.
func TestTheBucketsOfTemplatesAndPoolsAreDivided(t *testing.T) {
	for name, config := range map[string]func(t *testing.T) string{
		"template": func(*testing.T) string {
			return "templates:\n  - {prefix: ac, capacity: 300, rate: 300/s, flows: {}}\n"
		},
		"pool": func(t *testing.T) string {
			etcd := testenv.Etcd(t, 1)
			return fmt.Sprintf("region: here\nelection: {endpoints: [%s]}\npools:\n"+
				"  - {name: %s, rate: 300/s, capacity: 300, regions: {here: {}}, flows: {}}\n",
				strings.Join(etcd.Endpoints(), ", "), key)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, usual)
			w.write("version: 1\n" + config(t))
			w.refill()
			w.refill()
			first := w.client()
			require.Eventually(t, func() bool {
				r, err := first.Take(t.Context(), key, 1)
				return err == nil && r.OK
			}, patience, 10*time.Millisecond, "consumers get tokens from the bucket")
			loud := w.loud(600)
			quiet := w.many(20, "quiet-", 10, 1)
			w.start(loud, quiet)
			require.Eventually(t, func() bool {
				sums := measure(2*time.Second, loud, quiet)
				return sums[1].got > .95*sums[1].asked && sums[0].got+sums[1].got > 270
			}, patience, time.Millisecond, "the quiet flows get what they ask for")
		})
	}
}
