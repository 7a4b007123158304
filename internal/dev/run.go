package dev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/redisconn"
)

const (
	replicaCount = 3
	showEvery    = time.Second
	callTimeout  = 2 * time.Second
	reachTimeout = 5 * time.Second // for a given server to answer
	electTimeout = 5 * time.Second // for the leader to refill, before any other replica will do
	gapTimeout   = 10 * time.Second
)

// errEnough ends a run after its duration.
var errEnough = errors.New("dev: the duration is over")

// playground is what runs.
type playground struct {
	opts     Options
	dir      string
	screen   *screen
	environ  []string
	claimed  bool // the well-known ports are ours
	settings settings
	cfg      config.Config
	store    redis.UniversalClient
	replicas []*replica
	followed []*followed
	gaps     gaps
	consumer *consumer

	stopping  atomic.Bool
	active    atomic.Pointer[string] // the replica that refilled most in the last second
	killed    atomic.Int64           // the process that the playground killed last
	measuring sync.WaitGroup
}

// Run runs the playground until ctx or the duration ends, and returns nil then.
func Run(ctx context.Context, o Options) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &playground{opts: o, environ: environ(o.Environ, o.Redis != "", len(o.Etcd) > 0)}
	p.screen = newScreen(o.Out, o.Screen, cancel)
	if p.dir, err = os.MkdirTemp("", "refiller-dev-"); err != nil {
		return fmt.Errorf("dev: make a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.dir)) }()
	defer p.claimPorts()()

	err = p.run(ctx, cancel)
	if asked.Err() != nil || errors.Is(err, errEnough) {
		return nil // what failed meanwhile is of no interest any more
	}
	return err
}

func (p *playground) run(ctx context.Context, cancel context.CancelCauseFunc) error {
	p.screen.println("refiller dev: three replicas keep a few buckets full, and a demo consumer takes from them. Starting …")
	closeServers, err := p.startServers(ctx)
	defer closeServers()
	if err != nil {
		return err
	}
	for _, b := range p.cfg.Buckets {
		if b.Policy.Steps == nil {
			p.followed = append(p.followed, &followed{key: b.Key})
		}
	}
	if p.store, err = redisconn.Open(p.cfg.Redis); err != nil {
		return fmt.Errorf("dev: store: %w", err)
	}
	defer func() { _ = p.store.Close() }() // nothing is under way
	if err := p.check(ctx); err != nil {
		return err
	}

	// Replicas outlive what watches them, so that nothing sees them stop.
	replicas, stopReplicas := context.WithCancel(context.WithoutCancel(ctx))
	defer stopReplicas()
	up := p.makeReplicas()
	g, replicas := errgroup.WithContext(replicas)
	for _, r := range p.replicas {
		g.Go(func() error {
			err := r.run(replicas)
			if err != nil {
				cancel(err)
			}
			return err
		})
	}
	err = p.watchThem(ctx, cancel, up)
	p.stopping.Store(true)
	p.screen.clear()
	if p.consumer != nil {
		p.screen.println("", p.summary())
	}
	stopReplicas()
	_ = g.Wait() // its error is the cause of ctx's end
	p.measuring.Wait()
	return err
}

// makeReplicas makes the replicas; the channel tells of each that has got ready, once.
func (p *playground) makeReplicas() <-chan *replica {
	up := make(chan *replica, replicaCount)
	for i := range replicaCount {
		var once sync.Once
		p.replicas = append(p.replicas, &replica{
			name: "replica-" + strconv.Itoa(i+1), port: p.port(adminPort + i), program: p.opts.Program, environ: p.environ, dir: p.dir,
			config: func(listen string) string {
				s := p.settings
				s.listen = listen
				return configText(s)
			},
			ended: p.onEnd,
			warn: func(name, message string) {
				if !p.stopping.Load() {
					p.screen.println(p.screen.style.yellow(name + ": " + message))
				}
			},
			ready: func(r *replica) {
				again := true
				once.Do(func() { up <- r; again = false })
				if again && !p.stopping.Load() {
					p.screen.println(fmt.Sprintf("%s is back: %s, pid %d", r.name, r.url(), r.pid()))
				}
			},
		})
	}
	return up
}

// watchThem waits until the replicas refill, and then runs everything else until ctx ends.
func (p *playground) watchThem(ctx context.Context, cancel context.CancelCauseFunc, up <-chan *replica) error {
	for range replicaCount {
		select {
		case <-up:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	first, err := p.firstActive(ctx)
	if err != nil {
		return err
	}
	p.introduce(first)
	if p.opts.Duration > 0 {
		timer := time.AfterFunc(p.opts.Duration, func() { cancel(errEnough) })
		defer timer.Stop()
	}
	if p.consumer, err = newConsumer(p.store); err != nil {
		return err
	}
	var all sync.WaitGroup
	all.Go(func() { p.consumer.run(ctx) })
	all.Go(func() { p.look(ctx) })
	all.Go(func() { p.show(ctx) })
	if p.opts.KillEvery > 0 {
		all.Go(func() { p.killActive(ctx) })
	}
	all.Wait()
	return context.Cause(ctx)
}

func (p *playground) introduce(active *replica) {
	p.active.Store(&active.name)
	i := introduction{
		redis: p.cfg.Redis.String(), embeddedRedis: p.opts.Redis == "", embeddedEtcd: len(p.opts.Etcd) == 0,
		logs: p.dir, buckets: p.cfg.Buckets, victim: active.pid(), killEvery: p.opts.KillEvery,
	}
	if p.opts.Mode == config.ModeEtcd {
		i.etcd = p.cfg.Election.Endpoints
	}
	for _, r := range p.replicas {
		i.replicas = append(i.replicas, replicaLine{r.name, r.url(), r.pid()})
	}
	p.screen.println(i.lines(p.screen.style, p.screen.width())...)
}

// summary is the last word.
func (p *playground) summary() string {
	b := p.cfg.Buckets[0]
	total := p.consumer.taken()
	v := view{total: total, bound: bound(b.Policy, time.Since(p.consumer.started), p.longestGap())}
	text := fmt.Sprintf("Stopping after %s: %s", seconds(time.Since(p.consumer.started)), v.held(p.screen.style))
	if p50, longest, n := p.gaps.summary(); n > 0 {
		text += "; refill gap: " + gapSummary(p50, longest, n)
	}
	return text + "."
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
