package flow_test

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill/flow"
)

// sim is one divided bucket, its refiller and its clients in simulated time.
type sim struct {
	t        *testing.T
	rng      *rand.Rand
	now      int64 // µs
	events   events
	bucket   policy.Bucket
	division *oracle.Division
	flows    *policy.Flows
	about    flow.Bucket
	*replica          // that refills
	other    *replica // which races with it
	turns    float64  // the part of the refills that the other replica wins
	killEach int64    // µs; 0 for never
	killed   bool     // the refiller was killed
	patience int64    // µs that a successor waits longer
	dead     bool     // there is no refiller any more

	from     int64 // of what is measured
	got      map[string]int64
	asked    map[string]int64
	denied   map[string]int64
	first    map[string]bool // whether the first take of a flow was served
	all      int64
	atFrom   int64
	added    int64
	memories map[string]*memory
}

// replica is the state that a replica of the refiller has of the bucket's flows.
type replica struct {
	planner *flow.Planner
	next    policy.Plan // computed from what was asked for in the last period
	base    policy.Version
	whole   bool // the plan after next lists all flows
}

// memory is what a process remembers about a denial of a flow: takes of n tokens or more are not made until an instant.
type memory struct{ until, n int64 }

type event struct {
	at int64
	do func()
}

type events []event

func (e events) Len() int           { return len(e) }
func (e events) Less(i, j int) bool { return e[i].at < e[j].at }
func (e events) Swap(i, j int)      { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)        { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	*e = (*e)[:last]
	return x
}

// options of a simulation.
type options struct {
	capacity int64
	rate     policy.Rate
	interval time.Duration
	weights  map[string]int64
	most     int64
	turns    float64 // the part of the refills that another replica than the last one wins
	killEach time.Duration
	patience time.Duration
	measured time.Duration // after a start of settle
	settle   time.Duration
}

func second(n int64) policy.Rate { return policy.Rate{Tokens: n, Per: time.Second} }

// seedOf returns the seed of a test and prints it. If REFILLER_SEED is set, it returns that.
func seedOf(t *testing.T) uint64 {
	seed := rand.Uint64()
	if s := os.Getenv("REFILLER_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("REFILLER_SEED=%d", seed)
	return seed
}

func newSim(t *testing.T, o options) *sim {
	if o.capacity == 0 {
		o.capacity = 1000
	}
	if o.rate == (policy.Rate{}) {
		o.rate = second(1000)
	}
	if o.interval == 0 {
		o.interval = 100 * time.Millisecond
	}
	if o.settle == 0 {
		o.settle = 10 * time.Second
	}
	if o.most == 0 {
		o.most = policy.DefaultFlows
	}
	flows := &policy.Flows{Headroom: policy.DefaultHeadroom, Weights: o.weights, Most: o.most}
	p := policy.Policy{Capacity: o.capacity, Rate: o.rate, Interval: o.interval}
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{Epoch: 1})
	seed := seedOf(t)
	tokens := o.capacity
	index := int64(1)
	s := &sim{
		t: t, rng: rand.New(rand.NewPCG(seed, 1)), flows: flows, turns: o.turns,
		killEach: o.killEach.Microseconds(), patience: o.patience.Microseconds(),
		about:    flow.Bucket{Capacity: o.capacity, Rate: o.rate.PerSecond(), Interval: o.interval},
		bucket:   policy.Bucket{Tokens: &tokens, Index: &index, Control: &policy.Control{Terms: terms, Era: 1, Index: 1}},
		from:     o.settle.Microseconds(),
		got:      map[string]int64{},
		asked:    map[string]int64{},
		denied:   map[string]int64{},
		first:    map[string]bool{},
		memories: map[string]*memory{},
	}
	s.now = 1
	s.replica = s.successor()
	s.other = s.successor()
	s.at(terms.Interval/2+s.rng.Int64N(terms.Interval), s.tick)
	if s.killEach > 0 {
		s.at(s.killEach, s.kill)
	}
	s.at(s.from, func() { s.atFrom = s.all })
	return s
}

// successor returns a replica that has observed nothing.
func (s *sim) successor() *replica {
	r := &replica{planner: flow.New(s.flows), whole: true}
	r.next = r.planner.Plan(true, s.about)
	return r
}

func (s *sim) at(at int64, do func()) { heap.Push(&s.events, event{at, do}) }

// run runs until an instant.
func (s *sim) run(until time.Duration) {
	for len(s.events) > 0 && s.events[0].at <= until.Microseconds() {
		e := heap.Pop(&s.events).(event)
		s.now = max(s.now, e.at)
		e.do()
	}
	s.now = until.Microseconds()
}

// refill is one refill with its plan.
func (s *sim) refill() {
	if s.dead {
		return
	}
	if s.rng.Float64() < s.turns {
		s.replica, s.other = s.other, s.replica
	}
	before := policy.Version{Era: s.bucket.Control.Era, Index: s.bucket.Control.Index}
	o := s.bucket.Refill(policy.Call{Version: before}, s.now)
	require.True(s.t, o.Status.Wrote(), o.Status)
	s.added += o.Added
	s.next.Version = o.Version
	s.plan(o.Version)
	s.at(s.now+s.interval()+s.rng.Int64N(1000), s.tick) // 0 to 1 ms late
}

// plan writes the plan that goes with a refill.
func (s *sim) plan(version policy.Version) {
	d, use, ok := s.division.Apply(s.next, s.base, *s.bucket.Tokens, s.now)
	if ok {
		s.division = d
		s.base = version
	} else { // the other replica wrote the last plan
		s.whole = true
		s.planner.Missed(s.now, s.about)
	}
	if use.Covered > 0 {
		s.planner.Observe(use, s.now, s.about)
	}
	s.next = s.planner.Plan(s.whole, s.about)
	s.whole = s.next.Kept
}

func (s *sim) interval() int64 { return s.bucket.Control.Terms.Interval }

// tick refills the bucket, unless the refiller was killed. Then its successor refills the bucket after a longer wait.
func (s *sim) tick() {
	if !s.killed {
		s.refill()
		return
	}
	s.killed = false
	s.replica = s.successor()
	s.at(s.now+s.patience+s.interval()/20+s.rng.Int64N(s.interval()/10), s.refill)
}

// kill kills the refiller.
func (s *sim) kill() {
	s.killed = true
	s.at(s.now+s.killEach, s.kill)
}

// take takes n tokens for a flow; if upTo is set, up to n tokens. It returns how many the flow got, and the wait if the
// take was denied.
func (s *sim) take(name string, n int64, upTo bool) (got, wait int64) {
	run := policy.Run{N: n, Count: 1}
	if upTo {
		run = policy.Run{N: 1, Count: n, UpTo: true}
	}
	r := oracle.Divided(&s.bucket, s.division, []policy.FlowRun{{Flow: name, Run: run}}, false, s.now)[0]
	got = r.Taken * run.N
	s.all += got
	if _, seen := s.first[name]; !seen {
		s.first[name] = got > 0
	}
	if s.now >= s.from {
		s.got[name] += got
		s.asked[name] += n
		if got == 0 {
			s.denied[name]++
		}
	}
	return got, r.Wait
}

// rate is a number of tokens per second at an instant.
type rate func(at int64) float64

func steady(perSecond float64) rate { return func(int64) float64 { return perSecond } }

// bursts returns a rate that is above 0 only in the first part of each period, and is perSecond on average.
func bursts(perSecond float64, on, period time.Duration, phase int64) rate {
	return func(at int64) float64 {
		if (at+phase)%period.Microseconds() < on.Microseconds() {
			return perSecond * float64(period) / float64(on)
		}
		return 0
	}
}

// arrivals makes takes of n tokens at random instants.
func (s *sim) arrivals(of rate, n int64, do func()) {
	const check = 100_000 // µs between two checks while the rate is 0
	var next func()
	next = func() {
		r := of(s.now) / float64(n)
		if r <= 0 {
			s.at(s.now+check, next)
			return
		}
		wait := int64(s.rng.ExpFloat64() / r * 1e6)
		if wait > 20*check { // the rate may change
			s.at(s.now+20*check, next)
			return
		}
		s.at(s.now+wait, func() {
			if of(s.now) > 0 {
				do()
			}
			next()
		})
	}
	s.at(s.now+s.rng.Int64N(check), next)
}

// asks lets a flow ask for tokens at random instants. The flow doesn't remember denials.
func (s *sim) asks(name string, of rate, n int64) {
	s.arrivals(of, n, func() { s.take(name, n, false) })
}

// remembers lets a flow ask from within a process that remembers denials by flow.
func (s *sim) remembers(name string, of rate, n int64) {
	s.arrivals(of, n, func() {
		if m := s.memories[name]; m != nil && s.now < m.until && n >= m.n {
			if s.now >= s.from {
				s.asked[name] += n
				s.denied[name]++
			}
			return
		}
		if got, wait := s.take(name, n, false); got == 0 && wait > 0 {
			s.memories[name] = &memory{s.now + wait, n}
		}
	})
}

// loops lets a flow ask again as soon as it got tokens. After a denial the flow waits as long as the reply demands.
func (s *sim) loops(name string, n int64, think time.Duration) {
	var next func()
	next = func() {
		got, wait := s.take(name, n, false)
		if got > 0 {
			wait = 0
		}
		s.at(s.now+max(wait, 0)+think.Microseconds(), next)
	}
	s.at(s.now+s.rng.Int64N(100_000), next)
}

// rateOf returns how many tokens per second the flows with a prefix got on average.
func (s *sim) rateOf(prefix string) float64 {
	sum, n := int64(0), 0
	for name := range s.asked {
		if strings.HasPrefix(name, prefix) {
			sum += s.got[name]
			n++
		}
	}
	if n == 0 {
		return 0
	}
	return float64(sum) / float64(n) / s.measured()
}

func (s *sim) measured() float64 { return float64(s.now-s.from) / 1e6 }

// total returns how many tokens per second all flows together got.
func (s *sim) total() float64 { return float64(s.all-s.atFrom) / s.measured() }

// part returns the part of the demand that the flows with a prefix got.
func (s *sim) part(prefix string) float64 {
	var got, asked int64
	for name, n := range s.asked {
		if strings.HasPrefix(name, prefix) {
			got += s.got[name]
			asked += n
		}
	}
	return float64(got) / float64(asked)
}

// least returns the fewest tokens per second that one of the flows with a prefix got.
func (s *sim) least(prefix string) float64 {
	least := 1e18
	for name := range s.asked {
		if strings.HasPrefix(name, prefix) {
			least = min(least, float64(s.got[name])/s.measured())
		}
	}
	return least
}

// bounded checks that no more tokens were taken than the bucket held at first and was refilled with.
func (s *sim) bounded() {
	require.GreaterOrEqual(s.t, *s.bucket.Tokens, int64(0))
	require.Equal(s.t, s.about.Capacity+s.added, s.all+*s.bucket.Tokens, "every token is in the bucket or was taken")
	most := float64(s.about.Capacity) + s.about.Rate*(float64(s.now)/1e6+s.about.Interval.Seconds()) + 1
	require.LessOrEqual(s.t, float64(s.all), most)
}

// many lets n flows do something.
func many(n int, prefix string, do func(name string)) {
	for i := range n {
		do(fmt.Sprintf("%s%d", prefix, i))
	}
}

const loud = "loud"

// slow is the demand for a slow bucket, of ten tokens per second.
func slow(s *sim) {
	s.asks(loud, steady(25), 1)
	many(50, "quiet", func(n string) { s.asks(n, steady(.18), 1) })
}

func TestOneLoudFlowBesideQuietOnes(t *testing.T) {
	for _, c := range []struct {
		name        string
		options     options
		run         func(s *sim)
		check       func(t *testing.T, s *sim)
		description string
	}{
		{name: "fifty that ask 24", run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), 18.6)
			require.LessOrEqual(t, s.rateOf(loud), 80.)
			require.GreaterOrEqual(t, s.total(), 970.)
		}},
		{name: "fifty that ask 10", run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(10), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
			require.GreaterOrEqual(t, s.rateOf(loud), 475.)
		}},
		{name: "fifty by ten tokens", run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(10), 10) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
		}},
		{name: "fifty in bursts", run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			phase := int64(0) // about ten at a time: if twenty ask at once, not all can be served
			many(50, "quiet", func(n string) {
				s.asks(n, bursts(10, time.Second, 5*time.Second, phase+s.rng.Int64N(100_000)), 1)
				phase += 100_000
			})
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
		}},
		{name: "one process that remembers", run: func(s *sim) {
			s.remembers(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.remembers(n, steady(10), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
			require.GreaterOrEqual(t, s.rateOf(loud), 475.)
		}},
		{name: "a closed loop", run: func(s *sim) {
			for range 20 {
				s.loops(loud, 1, time.Millisecond)
			}
			many(50, "quiet", func(n string) { s.asks(n, steady(10), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
			require.GreaterOrEqual(t, s.total(), 970.)
		}},
		{name: "a thousand that ask 0.5", options: options{measured: 30 * time.Second}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(1000, "quiet", func(n string) { s.asks(n, steady(.5), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
			firsts := 0
			for name, ok := range s.first {
				if strings.HasPrefix(name, "quiet") && !ok {
					firsts++
				}
			}
			t.Logf("first takes denied: %d", firsts)
			require.Zero(t, firsts)
		}},
		{name: "a thousand that ask 1.2", options: options{measured: 30 * time.Second}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(1000, "quiet", func(n string) { s.asks(n, steady(1.2), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), .93)
		}},
		{name: "ten thousand that ask 0.05", options: options{measured: 20 * time.Second}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(10_000, "quiet", func(n string) { s.asks(n, steady(.05), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
		}},
		{name: "an interval of a second", options: options{interval: time.Second, capacity: 2000}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(18), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
		}},
		{name: "a capacity of 200", options: options{capacity: 200}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(18), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.part("quiet"), .95)
		}},
		{name: "none", run: func(s *sim) { s.asks(loud, steady(2500), 1) }, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf(loud), 970.)
		}},
		{name: "takes of 50 and of 1", options: options{measured: 30 * time.Second}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(26, "one", func(n string) { s.asks(n, steady(50), 1) })
			many(25, "fifty", func(n string) { s.asks(n, steady(50), 50) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("fifty"), 16.)
			require.GreaterOrEqual(t, s.rateOf("one"), 17.)
		}},
		{
			name:    "a slow bucket",
			options: options{rate: second(10), capacity: 100, settle: time.Minute, measured: 20 * time.Minute},
			run:     slow, check: func(t *testing.T, s *sim) {
				require.GreaterOrEqual(t, s.part("quiet"), .95)
			},
		},
		{name: "replicas that win refills in turn", options: options{turns: .5}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), 18.6)
			require.LessOrEqual(t, s.rateOf(loud), 80.)
		}},
		{
			name: "a slow bucket, and replicas that win refills in turn",
			options: options{
				rate: second(10), capacity: 100, settle: time.Minute, measured: 20 * time.Minute, turns: .5,
			},
			run: slow, check: func(t *testing.T, s *sim) {
				require.GreaterOrEqual(t, s.part("quiet"), .95)
			},
		},
		{
			name: "a slow bucket, and replicas that are killed",
			options: options{
				rate: second(10), capacity: 100, settle: time.Minute, measured: 20 * time.Minute, killEach: 20 * time.Second,
			},
			run: slow, check: func(t *testing.T, s *sim) {
				require.GreaterOrEqual(t, s.part("quiet"), .93)
			},
		},
		{name: "a team of new names", run: func(s *sim) {
			n := 0
			s.arrivals(steady(2500), 1, func() {
				n++
				s.take(fmt.Sprintf("strangers/%d", n), 1, false)
			})
			many(50, "team/quiet", func(n string) { s.asks(n, steady(24), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("team/"), 9.5)
			require.GreaterOrEqual(t, s.total(), 970.)
		}},
		{name: "killed each second", options: options{killEach: time.Second}, run: func(s *sim) {
			s.asks(loud, steady(2500), 1)
			many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), 17.5)
		}},
		{name: "killed each second, elected", options: options{killEach: time.Second, patience: 100 * time.Millisecond},
			run: func(s *sim) {
				s.asks(loud, steady(2500), 1)
				many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
			}, check: func(t *testing.T, s *sim) {
				require.GreaterOrEqual(t, s.rateOf("quiet"), 17.5)
			}},
		{name: "takes of ten", run: func(s *sim) {
			s.arrivals(steady(2500), 10, func() { s.take(loud, 10, false) })
			many(50, "quiet", func(n string) {
				s.arrivals(steady(24), 10, func() { s.take(n, 10, false) })
			})
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), 18.)
		}},
		{name: "takes of up to ten", run: func(s *sim) {
			s.arrivals(steady(2500), 10, func() { s.take(loud, 10, true) })
			many(50, "quiet", func(n string) {
				s.arrivals(steady(24), 10, func() { s.take(n, 10, true) })
			})
		}, check: func(t *testing.T, s *sim) {
			require.GreaterOrEqual(t, s.rateOf("quiet"), 18.)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSim(t, c.options)
			c.run(s)
			settle := time.Duration(s.from) * time.Microsecond
			measured := c.options.measured
			if measured == 0 {
				measured = 20 * time.Second
			}
			s.run(settle + measured)
			s.bounded()
			t.Logf("quiet %.2f/s, least %.2f/s, %.1f%% of what they ask; loud %.1f/s; all %.1f/s; level %.2f",
				s.rateOf("quiet"), s.least("quiet"), 100*s.part("quiet"), s.rateOf(loud), s.total(), s.planner.Level())
			if s.asked["fifty0"] > 0 {
				t.Logf("by 50 %.2f/s, by 1 %.2f/s", s.rateOf("fifty"), s.rateOf("one"))
			}
			if c.name == "a team of new names" {
				t.Logf("team %.2f/s", s.rateOf("team/"))
			}
			c.check(t, s)
		})
	}
}

func TestWeightsDivideInProportion(t *testing.T) {
	for name, ask := range map[string]func(*sim, string, rate, int64){
		"each take is made": (*sim).asks, "denials are remembered": (*sim).remembers,
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t, options{weights: map[string]int64{"b": 2, "c": 5}})
			for _, flow := range []string{"a", "b", "c"} {
				ask(s, flow, steady(900), 1)
			}
			s.run(30 * time.Second)
			s.bounded()
			t.Logf("weight 1: %.1f/s, 2: %.1f/s, 5: %.1f/s", s.rateOf("a"), s.rateOf("b"), s.rateOf("c"))
			require.InEpsilon(t, 2*s.rateOf("a"), s.rateOf("b"), .05)
			require.InEpsilon(t, 5*s.rateOf("a"), s.rateOf("c"), .05)
			require.GreaterOrEqual(t, s.total(), 970.)
		})
	}
}

// A flow that is alone may take all tokens, as from a bucket without flows.
func TestAFlowAloneUsesTheWholeBucket(t *testing.T) {
	for _, c := range []struct {
		capacity, perSecond, n int64
		each                   time.Duration
	}{
		{1000, 1000, 1000, 10 * time.Second}, {1000, 1000, 900, 3 * time.Second}, {1, 1, 1, 3 * time.Second},
		{3, 1, 2, 10 * time.Second}, {12, 10, 6, 3 * time.Second},
	} {
		t.Run(fmt.Sprintf("%d of %d each %v", c.n, c.capacity, c.each), func(t *testing.T) {
			s := newSim(t, options{capacity: c.capacity, rate: second(c.perSecond)})
			takes := 0
			var next func()
			next = func() {
				got, _ := s.take("only", c.n, false)
				require.Equal(t, c.n, got, "take %d, of %d tokens", takes, *s.bucket.Tokens)
				takes++
				s.at(s.now+c.each.Microseconds(), next)
			}
			s.at(5_000_000, next)
			s.run(10 * time.Minute)
			s.bounded()
			require.Greater(t, takes, 50)
		})
	}
}

func TestAFlowWithAWeightIsServedFarBelowItsPart(t *testing.T) {
	for _, c := range []struct {
		name     string
		weight   int64
		interval time.Duration
		asks     float64
	}{
		{"gold", 1000, 100 * time.Millisecond, 480}, {"gold", 50, 100 * time.Millisecond, 150},
		{"gold", 5, time.Second, 24}, {"gold/user", 5, time.Second, 24}, {"gold", 100, time.Second, 300},
	} {
		t.Run(fmt.Sprintf("%s of weight %d that asks %g, interval %v", c.name, c.weight, c.asks, c.interval),
			func(t *testing.T) {
				s := newSim(t, options{
					interval: c.interval, capacity: 2000, weights: map[string]int64{"gold": c.weight, "gold/": c.weight},
				})
				s.asks(c.name, steady(c.asks), 1)
				many(100, loud, func(n string) { s.asks(n, steady(25), 1) })
				s.run(time.Minute)
				s.bounded()
				t.Logf("gets %.1f of %.1f/s; all %.1f/s", s.rateOf("gold"), c.asks, s.total())
				require.GreaterOrEqual(t, s.part("gold"), .95)
				require.GreaterOrEqual(t, s.total(), 970.)
			})
	}
}

// After a failover to a server whose clock is behind, rights are earned as before.
func TestAClockThatIsSetBackFreezesNoRight(t *testing.T) {
	s := newSim(t, options{settle: 16 * time.Second})
	s.asks(loud, steady(2500), 1)
	many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
	s.at(15_000_000, func() { s.division.At += 300_000_000 })
	s.run(40 * time.Second)
	s.bounded()
	require.GreaterOrEqual(t, s.rateOf("quiet"), 18.6)
	require.LessOrEqual(t, s.rateOf(loud), 80.)
}

func TestDemandThatMovesIsServedWithinSeconds(t *testing.T) {
	s := newSim(t, options{settle: 23 * time.Second})
	const moves = 20_000_000
	s.asks(loud, func(at int64) float64 {
		if at < moves {
			return 2500
		}
		return 0
	}, 1)
	many(50, "quiet", func(n string) {
		s.asks(n, func(at int64) float64 {
			if at < moves {
				return 24
			}
			return 50
		}, 1)
	})
	s.run(30 * time.Second)
	s.bounded()
	t.Logf("quiet %.2f/s, all %.1f/s", s.rateOf("quiet"), s.total())
	require.GreaterOrEqual(t, s.total(), 950.)
}

func TestANewcomerIsServedAtOnce(t *testing.T) {
	s := newSim(t, options{})
	s.asks(loud, steady(2500), 1)
	many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
	const comes = 15_000_000
	for i := range 20 {
		s.asks(fmt.Sprintf("new%d", i), func(at int64) float64 {
			if at < comes+int64(i)*500_000 {
				return 0
			}
			return 5
		}, 1)
	}
	s.run(40 * time.Second)
	s.bounded()
	denied := 0
	for name, ok := range s.first {
		if strings.HasPrefix(name, "new") && !ok {
			denied++
		}
	}
	t.Logf("newcomers get %.1f%% of what they ask, first takes denied: %d of 20", 100*s.part("new"), denied)
	require.GreaterOrEqual(t, s.part("new"), .95)
	require.LessOrEqual(t, denied, 1)
}

func TestWithoutARefillerAPlanEnds(t *testing.T) {
	s := newSim(t, options{settle: 13 * time.Second})
	s.asks(loud, steady(500), 1)
	many(50, "quiet", func(n string) { s.asks(n, steady(24), 1) })
	s.run(10 * time.Second)
	s.dead = true
	// Consumers rescue the bucket: they refill it, without a plan.
	var rescue func()
	rescue = func() {
		v := policy.Version{Era: s.bucket.Control.Era, Index: s.bucket.Control.Index}
		s.added += s.bucket.Refill(policy.Call{Version: v}, s.now).Added
		s.at(s.now+100_000, rescue)
	}
	s.at(s.now+200_000, rescue)
	many(100, "new", func(n string) { s.asks(n, steady(12), 1) })
	s.run(23 * time.Second)
	s.bounded()
	each := s.total() / (500 + 50*24 + 100*12)
	t.Logf("loud %.1f%%, quiet %.1f%%, new %.1f%%, all %.1f%% of what they ask", 100*s.part(loud), 100*s.part("quiet"),
		100*s.part("new"), 100*each)
	for _, name := range []string{loud, "quiet", "new"} {
		require.InDelta(t, each, s.part(name), .03, "in the order in which they come, all get the same part")
	}
	require.GreaterOrEqual(t, s.total(), 970.)
}

func TestThreeLevelsOfNames(t *testing.T) {
	s := newSim(t, options{weights: map[string]int64{"big/": 3}})
	// big gets 750: big/a gets 375 for one user, and big/b gets 375 for ten users. small gets 250 for two users.
	s.asks("big/a/loud", steady(2500), 1)
	many(10, "big/b/user", func(n string) { s.asks(n, steady(100), 1) })
	s.asks("small/x", steady(500), 1)
	s.asks("small/y", steady(50), 1)
	s.run(30 * time.Second)
	s.bounded()
	t.Logf("big/a/loud %.1f/s, ten in big/b %.1f/s each, small/x %.1f/s, small/y %.1f/s, all %.1f/s",
		s.rateOf("big/a/"), s.rateOf("big/b/"), s.rateOf("small/x"), s.rateOf("small/y"), s.total())
	require.InDelta(t, 375, s.rateOf("big/a/"), 60)
	require.InDelta(t, 37.5, s.rateOf("big/b/"), 2)
	require.InDelta(t, 200, s.rateOf("small/x"), 60)
	require.GreaterOrEqual(t, s.part("small/y"), .95)
	require.GreaterOrEqual(t, s.total(), 970.)
}

func TestMoreNamesThanAreDistinguished(t *testing.T) {
	s := newSim(t, options{most: 100})
	s.asks(loud, steady(2500), 1)
	many(50, "team/quiet", func(n string) { s.asks(n, steady(9), 1) })
	n := 0
	s.arrivals(steady(10_000), 1, func() { // strangers belong to one team
		n++
		s.take(fmt.Sprintf("strangers/%d", n), 1, false)
	})
	s.run(25 * time.Second)
	s.bounded()
	known, listed := s.planner.Counts()
	t.Logf("%d names; %d known, %d listed; team %.2f/s each, loud %.1f/s, all %.1f/s", n, known, listed,
		s.rateOf("team/"), s.rateOf(loud), s.total())
	require.LessOrEqual(t, known, 100)
	require.GreaterOrEqual(t, s.total(), 970.)
	require.GreaterOrEqual(t, s.part("team/"), .6)
}

// A client that makes up a new team for each take gets more than its part, as with flows. But it does not fill the
// plan, Redis, or the memory of the refiller.
func TestTeamsThatAreMadeUp(t *testing.T) {
	const most = 500
	s := newSim(t, options{most: most})
	many(50, "team/quiet", func(n string) { s.asks(n, steady(9), 1) })
	n := 0
	largest := 0
	s.arrivals(steady(10_000), 1, func() {
		n++
		s.take([]string{fmt.Sprintf("new%d/user", n), fmt.Sprintf("new%d/a/user", n), fmt.Sprintf("a/new%d/user", n)}[n%3],
			1, false)
		if s.division != nil {
			largest = max(largest, len(s.division.Asked))
		}
	})
	s.run(13 * time.Second)
	s.bounded()
	known, listed := s.planner.Counts()
	planned := len(s.division.Teams)
	t.Logf("%d names: at most %d counted; %d flows and %d teams known, %d and %d planned; team %.2f/s each", n, largest,
		known, s.planner.Teams(), listed, planned, s.rateOf("team/"))
	require.LessOrEqual(t, largest, 2*most*11/10+60, "listed flows and teams of the plan come on top")
	require.LessOrEqual(t, s.planner.Teams(), 4*most, "each flow has two teams at most")
	require.LessOrEqual(t, planned, 10)
	require.GreaterOrEqual(t, s.total(), 970.)
}
