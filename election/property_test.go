package election

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/timing"
)

// propertySeed returns the seed in REFILLER_SEED, or a random one. It logs the seed, so that a run can be repeated.
func propertySeed(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if v := os.Getenv("REFILLER_SEED"); v != "" {
		var err error
		seed, err = strconv.ParseUint(v, 10, 64)
		require.NoError(t, err, "REFILLER_SEED")
	}
	t.Logf("REFILLER_SEED=%d repeats this run", seed)
	return seed
}

// dice draws random numbers for one purpose. With separate dice, the order in which goroutines run doesn't change the
// numbers that each of them draws.
type dice struct {
	mu  sync.Mutex
	rng *rand.Rand
}

func newDice(seed uint64, purpose string) *dice {
	h := fnv.New64a()
	_, _ = h.Write([]byte(purpose)) // Write of a hash never fails
	return &dice{rng: rand.New(rand.NewPCG(seed, h.Sum64()))}
}

func (d *dice) float() float64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rng.Float64()
}

func (d *dice) upTo(most time.Duration) time.Duration {
	return time.Duration(d.float() * float64(most))
}

// badNetwork loses requests and answers and makes them slow, and cuts the candidate off now and then.
type badNetwork struct {
	seed uint64
	name string

	mu    sync.Mutex
	perOp map[string]*dice
	cut   bool
	calm  bool
}

func (n *badNetwork) set(cut, calm bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut, n.calm = cut, calm
}

func (n *badNetwork) plan(op string) call {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.calm {
		return call{}
	}
	if n.cut {
		return call{lostThere: true}
	}
	d := n.perOp[op]
	if d == nil {
		d = newDice(n.seed, n.name+op)
		n.perOp[op] = d
	}
	switch x := d.float(); {
	case x < 0.70:
		return call{there: d.upTo(20 * time.Millisecond), back: d.upTo(20 * time.Millisecond)}
	case x < 0.85:
		return call{there: d.upTo(2 * time.Second), back: d.upTo(2 * time.Second)}
	case x < 0.90:
		return call{back: d.upTo(2 * time.Second)}
	case x < 0.93:
		return call{lostThere: true}
	case x < 0.96:
		return call{lostBack: true}
	case x < 0.98:
		return call{refused: errRefused}
	default:
		return call{deafReader: true}
	}
}

// referee checks each term when it begins, and records the faults.
type referee struct {
	mu       sync.Mutex
	electors []*Elector
	terms    int
	epochs   int64 // the highest so far
	faults   []error
}

func (r *referee) fault(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults = append(r.faults, fmt.Errorf(format, args...))
}

// begins checks a term at its begin. Trust that is lost never returns. So if two terms are trusted at the same time,
// both are trusted when the later one begins, and no other instant has to be checked.
func (r *referee) begins(term Term) {
	var trusted []string
	for _, e := range r.electors {
		if s := e.State(); s.Role == RoleLeader {
			trusted = append(trusted, s.Term.Identity)
		}
	}
	if len(trusted) > 1 {
		r.fault("epoch %d begins while %v are trusted", term.Epoch, trusted)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if term.Epoch <= r.epochs {
		r.faults = append(r.faults, fmt.Errorf("epoch %d of %s after epoch %d", term.Epoch, term.Identity, r.epochs))
	}
	r.epochs = max(r.epochs, term.Epoch)
	r.terms++
}

func (r *referee) begun() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.terms
}

// Requests are slow, lost or refused, candidates are cut off, and leases end early by almost the margin, as if the
// server's clock ran fast. Even so, no two candidates trust their terms at the same time, and epochs increase.
func TestAtMostOneLeaderIsTrusted(t *testing.T) {
	t.Parallel()
	seed := propertySeed(t)
	for run := range uint64(30) {
		t.Run(strconv.FormatUint(run, 10), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { contend(t, seed+run) })
		})
	}
}

func contend(t *testing.T, seed uint64) {
	const (
		candidates = 4
		stormy     = 3 * time.Minute // the shortest time for which faults occur
		enough     = 5               // faults occur at least until this many terms have begun
		patience   = 3 * time.Hour   // the longest time for which faults occur
	)
	server := newFakeServer()
	server.fast = DefaultConfig().SafetyMargin * 9 / 10
	var members []*member
	var networks []*badNetwork
	referee := &referee{}
	for i := range candidates {
		name := string(rune('a' + i))
		network := &badNetwork{seed: seed, name: name, perOp: map[string]*dice{}}
		m := newMember(server, name)
		m.random = newDice(seed, name+"jitter").float
		m.store.setPlan(network.plan)
		members = append(members, m)
		networks = append(networks, network)
		referee.electors = append(referee.electors, m.Elector)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	for _, m := range members {
		leadDice := newDice(seed, m.store.name+"lead")
		running.Go(func() {
			err := m.Run(ctx, func(ctx context.Context, term Term) error {
				if term.Remaining(time.Now()) <= 0 {
					return errors.New("won too late")
				}
				referee.begins(term)
				if leadDice.float() < 0.5 {
					timing.Sleep(ctx.Done(), leadDice.upTo(30*time.Second)) // leads for a while and gives up
				} else {
					<-ctx.Done()
				}
				time.Sleep(leadDice.upTo(3 * time.Second)) // winds down slowly
				return nil
			})
			if err != nil {
				referee.fault("Run of %s: %w", m.store.name, err)
			}
		})
	}
	running.Go(func() { // cuts candidates off, one after the other
		d := newDice(seed, "cuts")
		for timing.Sleep(ctx.Done(), d.upTo(10*time.Second)) {
			network := networks[int(d.float()*candidates)]
			network.set(true, false)
			timing.Sleep(ctx.Done(), d.upTo(10*time.Second))
			network.set(false, false)
		}
	})

	begin := time.Now()
	for time.Since(begin) < stormy || referee.begun() < enough && time.Since(begin) < patience {
		time.Sleep(time.Second)
	}
	for _, n := range networks {
		n.set(false, true)
	}
	time.Sleep(30 * time.Second)
	cancel()
	running.Wait()
	require.Empty(t, referee.faults, "seed %d", seed)
	require.GreaterOrEqual(t, referee.terms, enough, "seed %d: too few terms in %s for a meaningful test", seed, patience)
}

// After any sequence of faults, a candidate leads again within a bound.
func TestALeaderIsElectedSoonAfterFaultsEnd(t *testing.T) {
	t.Parallel()
	seed := propertySeed(t)
	for run := range uint64(20) {
		t.Run(strconv.FormatUint(run, 10), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := newFakeServer()
				var members []*member
				var networks []*badNetwork
				for _, name := range []string{"a", "b", "c"} {
					network := &badNetwork{seed: seed + run, name: name, perOp: map[string]*dice{}}
					m := newMember(server, name)
					m.random = newDice(seed+run, name+"jitter").float
					m.store.setPlan(network.plan)
					members = append(members, m.startObedient(t))
					networks = append(networks, network)
				}
				time.Sleep(time.Minute)
				for _, n := range networks {
					n.set(false, true)
				}
				cfg := members[0].cfg
				// Allow for the longest pause with its jitter, for requests that are on their way, and for the lease of a key
				// that was left behind.
				time.Sleep(24*cfg.RetryInterval + 2*cfg.ResignTimeout + 3*cfg.TTL)
				leaders := 0
				for _, m := range members {
					if m.State().Role == RoleLeader {
						leaders++
					}
				}
				for _, m := range members {
					m.stop()
				}
				require.Equal(t, 1, leaders, "seed %d", seed+run)
			})
		})
	}
}
