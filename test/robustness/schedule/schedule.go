// Package schedule plans runs from seeds and carries them out: a system, traffic, and faults one after the other.
package schedule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tokenrefill/refiller/test/robustness/faults"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/system"
	"github.com/tokenrefill/refiller/test/robustness/traffic"
)

// Plan is a run before it is run.
type Plan struct {
	Name   string
	Seed   uint64
	Spec   system.Spec
	Phases [][]faults.Fault // the faults of one phase are there at the same time
	Pace   time.Duration
}

// String is the plan in one line.
func (p Plan) String() string {
	var phases []string
	for _, phase := range p.Phases {
		var names []string
		for _, f := range phase {
			names = append(names, f.Name)
		}
		phases = append(phases, strings.Join(names, "+"))
	}
	var buckets []string
	for _, b := range p.Spec.Buckets {
		buckets = append(buckets, b.Key)
	}
	servers := p.Spec.Servers
	if p.Spec.Embedded {
		servers = "embedded"
	}
	return fmt.Sprintf("%s, etcd %d, %d replicas, versions %v, buckets %s: %s", servers, p.Spec.Etcd,
		p.Spec.Replicas, p.Spec.Versions, strings.Join(buckets, " "), strings.Join(phases, ", "))
}

// Fixed is a plan of named faults, each in a phase of its own. Unless the spec names buckets, the seed draws them.
func Fixed(name string, seed uint64, spec system.Spec, names ...string) (Plan, error) {
	p := Plan{Name: name, Seed: seed, Spec: spec, Pace: 8 * time.Millisecond}
	if p.Spec.Servers == "" {
		p.Spec.Servers = system.Single
	}
	if p.Spec.Buckets == nil {
		p.Spec.Buckets = drawBuckets(p.Spec, rand.New(rand.NewPCG(seed, 4)))
	}
	for _, group := range names {
		var phase []faults.Fault
		for n := range strings.SplitSeq(group, "+") {
			f, err := faults.Named(n)
			if err != nil {
				return Plan{}, err
			}
			p.Spec.Durable = p.Spec.Durable || f.Durable
			p.Spec.Slow = p.Spec.Slow || f.Slow
			p.Spec.Clock = p.Spec.Clock || f.Clock
			if !f.Goes(p.Spec) {
				return Plan{}, fmt.Errorf("schedule: %s can't strike this system", n)
			}
			phase = append(phase, f)
		}
		p.Phases = append(p.Phases, phase)
	}
	return p, nil
}

// Random is the plan of a seed, on the embedded store if that is asked for.
func Random(seed uint64, embedded bool) Plan {
	rng := rand.New(rand.NewPCG(seed, 1))
	p := Plan{Name: fmt.Sprintf("seed-%d", seed), Seed: seed, Pace: 8 * time.Millisecond}
	p.Spec = system.Spec{Replicas: 2 + rng.IntN(4), Embedded: embedded}
	switch n := rng.IntN(100); {
	case embedded:
		p.Spec.Servers = system.Single
	case n < 75:
		p.Spec.Servers = system.Single
		p.Spec.Durable = rng.IntN(3) == 0
		p.Spec.Slow = p.Spec.Durable && rng.IntN(2) == 0
		p.Spec.Clock = rng.IntN(4) == 0
	case n < 88:
		p.Spec.Servers = system.Cluster
	default:
		p.Spec.Servers = system.Sentinel
	}
	if rng.IntN(100) < 40 {
		p.Spec.Etcd = []int{1, 3}[rng.IntN(2)]
	}
	if rng.IntN(100) < 20 {
		for range p.Spec.Replicas {
			p.Spec.Versions = append(p.Spec.Versions, 1+rng.IntN(2))
		}
	}
	if rng.IntN(100) < 4 && !embedded { // which is slow
		p.Spec.Replicas = 20 + rng.IntN(31)
	}
	p.Spec.Buckets = drawBuckets(p.Spec, rand.New(rand.NewPCG(seed, 4)))
	for range 2 + rng.IntN(2) {
		phase := []faults.Fault{draw(p.Spec, rng, "")}
		if rng.IntN(100) < 45 {
			phase = append(phase, draw(p.Spec, rng, phase[0].Group))
		}
		if last := len(phase) - 1; phase[last].Group == faults.Etcd { // which may call a server that the other one stops
			slices.Reverse(phase)
		}
		p.Phases = append(p.Phases, phase)
	}
	if p.Spec.Servers == system.Sentinel { // what Sentinel is there for
		f, err := faults.Named("redis-failover-to-lagging-replica")
		if err == nil {
			p.Phases[len(p.Phases)-1] = []faults.Fault{f}
		}
	}
	return p
}

// draw picks a fault that can strike the system, of any group but one.
func draw(spec system.Spec, rng *rand.Rand, not string) faults.Fault {
	for {
		f := faults.All[rng.IntN(len(faults.All))]
		if f.Group != not && f.Goes(spec) && f.Name != "redis-failover-to-lagging-replica" {
			return f
		}
	}
}

// least is how long a run takes at least.
const least = 5 * time.Second

// Run carries out a plan and leaves its record in dir.
func Run(t testing.TB, dir string, p Plan) {
	t.Helper()
	meta := record.Meta{Name: p.Name, Seed: p.Seed}
	for _, phase := range p.Phases {
		for _, f := range phase {
			meta.Faults = append(meta.Faults, f.Name)
		}
	}
	s := system.Start(t, dir, meta, p.Spec)
	start := time.Now()
	calls, err := traffic.Start(t.Context(), traffic.Config{
		Dir: dir, Dial: s.Dial, Look: s.Direct, Buckets: s.Record(), Callers: 2, Seed: p.Seed, Pace: p.Pace,
	})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(p.Seed, 3))
	wait(t, 500*time.Millisecond)
	for _, phase := range p.Phases {
		var struck []*faults.Struck
		hold := time.Duration(0)
		for _, f := range phase {
			struck = append(struck, f.Strike(s, rng))
			hold = max(hold, f.Hold)
		}
		wait(t, hold/2+time.Duration(rng.Int64N(int64(hold))))
		for _, f := range slices.Backward(struck) { // what was struck first may need what the others withhold
			f.Heal()
		}
		s.Check("after " + phase[len(phase)-1].Name)
		wait(t, time.Duration(200+rng.IntN(400))*time.Millisecond)
	}
	wait(t, least-time.Since(start))
	calls.AwaitEnough(t.Context())
	s.Check("at the end")
	if err := calls.Stop(); err != nil {
		t.Error(err)
	}
	s.Finish()
}

// wait lets a run go on for d. Nothing is waited for: the time itself is what is tested.
func wait(t testing.TB, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-t.Context().Done():
	case <-time.After(d):
	}
}
