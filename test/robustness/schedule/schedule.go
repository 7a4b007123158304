// Package schedule plans runs from seeds, and carries them out. A run starts a system and traffic, and makes one fault
// after the other. The package is for the robustness tests only. Package limit/schedule is a limiter.
package schedule

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tokenrefill/refiller/test/robustness/deck"
	"github.com/tokenrefill/refiller/test/robustness/faults"
	"github.com/tokenrefill/refiller/test/robustness/record"
	"github.com/tokenrefill/refiller/test/robustness/system"
	"github.com/tokenrefill/refiller/test/robustness/traffic"
)

// Plan is the plan of a run.
type Plan struct {
	Name   string
	Seed   uint64
	Card   deck.Card // nil unless the plan is random
	Spec   system.Spec
	Phases [][]faults.Fault // the faults of one phase last at the same time
	Pace   time.Duration    // mean pause between two calls of a consumer
}

// String returns the plan in one line.
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
	return fmt.Sprintf("[%s] %s, etcd %d, %d replicas, versions %v, buckets %s: %s", p.Card, servers, p.Spec.Etcd,
		p.Spec.Replicas, p.Spec.Versions, strings.Join(buckets, " "), strings.Join(phases, ", "))
}

// Fixed returns a plan of named faults. Each name is a phase; a name such as "a+b" is a phase with two faults. If the
// spec has no buckets, the plan gets random ones that exist for faults. Buckets that exist for operations of consumers
// or operators are only in plans that name them.
func Fixed(name string, seed uint64, spec system.Spec, names ...string) (Plan, error) {
	p := Plan{Name: name, Seed: seed, Spec: spec, Pace: 8 * time.Millisecond}
	if p.Spec.Servers == "" {
		p.Spec.Servers = system.Single
	}
	if p.Spec.Buckets == nil {
		p.Spec.Buckets = drawBuckets(p.Spec, forFaults(), rand.New(rand.NewPCG(seed, 4)))
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

// Random returns the plan of a seed. The deployment is the seed's card, and everything else is random. If embedded is
// set, the plan is for the embedded store, which is a single server.
func Random(seed uint64, embedded bool) Plan {
	rng := rand.New(rand.NewPCG(seed, 1))
	p := Plan{Name: fmt.Sprintf("seed-%d", seed), Seed: seed, Card: deck.Of(seed), Pace: 8 * time.Millisecond}
	if embedded {
		p.Card = slices.Clone(p.Card)
		p.Card[deck.Redis] = deck.Dimensions[deck.Redis].Values[rng.IntN(2)]
	}
	var lastFault string
	p.Spec, lastFault = deployment(p.Card, rng)
	p.Spec.Embedded = embedded
	if p.Spec.Servers == system.Single && !embedded {
		p.Spec.Durable = rng.IntN(3) == 0
		p.Spec.Slow = p.Spec.Durable && rng.IntN(4) > 0
		p.Spec.Clock = rng.IntN(4) == 0
	}
	p.Spec.Buckets = drawThroughSDK(p.Spec, rand.New(rand.NewPCG(seed, 4)))
	if p.Spec.Later > 0 {
		p.Phases = append(p.Phases, []faults.Fault{faults.Must("replica-reads-a-later-file")})
	}
	for range 1 + rng.IntN(2) {
		phase := []faults.Fault{draw(p.Spec, rng, "")}
		if rng.IntN(100) < 45 {
			phase = append(phase, draw(p.Spec, rng, phase[0].Group))
		}
		if last := len(phase) - 1; phase[last].Group == faults.Etcd { // begins first: the other fault may stop Redis
			slices.Reverse(phase)
		}
		p.Phases = append(p.Phases, phase)
	}
	if lastFault == "redis-kill" && p.Spec.Durable {
		lastFault = "redis-kill-keeps-data"
	}
	p.Phases = append(p.Phases, []faults.Fault{faults.Must(lastFault)})
	return p
}

// serverFaults has the servers and the fault for each value of the dimension Redis.
var serverFaults = map[string]struct{ servers, fault string }{
	"single killed":   {system.Single, "redis-kill"},
	"single frozen":   {system.Single, "redis-pause"},
	"sentinel killed": {system.Sentinel, "redis-failover-to-lagging-replica"},
	"sentinel frozen": {system.Sentinel, "redis-failover-from-frozen-master"},
	"cluster killed":  {system.Replicated, "cluster-master-killed"},
	"cluster frozen":  {system.Replicated, "cluster-master-frozen"},
	"cluster moved":   {system.Cluster, "cluster-reshard"},
}

// deployment returns the system of a card, and the name of the fault that strikes its servers.
func deployment(card deck.Card, rng *rand.Rand) (spec system.Spec, fault string) {
	servers := serverFaults[card[deck.Redis]]
	spec = system.Spec{Servers: servers.servers, Consumers: card[deck.Consumers]}
	spec.Distance, _ = time.ParseDuration(card[deck.Distance]) // all values of the dimension are durations
	spec.Replicas, _ = strconv.Atoi(card[deck.Replicas])
	if card[deck.Election] == deck.Elected {
		spec.Etcd = []int{1, 1, 3}[rng.IntN(3)]
	}
	first, others := 1, 1
	switch card[deck.Files] {
	case deck.Older:
		others = 2
		spec.InOrder = true
	case deck.Newer:
		spec.Later = 2 // the buckets' second policy
	case deck.Raised:
		first, others = 2, 2
		spec.Later = 3 // the policies are the same as in version 2
	}
	spec.Versions = []int{first}
	for range spec.Replicas - 1 {
		spec.Versions = append(spec.Versions, others)
	}
	return spec, servers.fault
}

// draw picks a random fault that can strike the system and isn't of the group not.
func draw(spec system.Spec, rng *rand.Rand, not string) faults.Fault {
	for {
		f := faults.All[rng.IntN(len(faults.All))]
		if f.Group != not && f.Goes(spec) && !f.Once {
			return f
		}
	}
}

// least is the shortest duration of a run.
const least = 5 * time.Second

// Run carries out a plan and leaves its record in dir.
func Run(t testing.TB, dir string, p Plan) {
	t.Helper()
	meta := record.Meta{Name: p.Name, Seed: p.Seed, Deployment: p.Card}
	for _, phase := range p.Phases {
		for _, f := range phase {
			meta.Faults = append(meta.Faults, f.Name)
		}
	}
	s := system.Start(t, dir, meta, p.Spec)
	start := time.Now()
	calls, err := traffic.Start(t.Context(), traffic.Config{
		Dir: dir, Dial: s.Dial, Direct: s.Direct, Buckets: s.Record(), Callers: s.Callers, Seed: p.Seed,
		Pace: p.Pace, Distance: p.Spec.Distance, Sidecar: s.Sidecar(),
	})
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(p.Seed, 3))
	wait(t, 500*time.Millisecond)
	for _, phase := range p.Phases {
		var active []*faults.Active
		hold := time.Duration(0)
		for _, f := range phase {
			active = append(active, f.Strike(s, rng))
			hold = max(hold, f.Hold)
		}
		wait(t, hold/2+time.Duration(rng.Int64N(int64(hold))))
		for _, f := range slices.Backward(active) { // a fault that began later may block what an earlier one needs to heal
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

// wait lets a run go on for d.
func wait(t testing.TB, d time.Duration) {
	if d <= 0 {
		return
	}
	select {
	case <-t.Context().Done():
	case <-time.After(d):
	}
}
