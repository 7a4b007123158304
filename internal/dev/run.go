package dev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
)

const (
	showEvery    = time.Second
	callTimeout  = 2 * time.Second
	reachTimeout = 5 * time.Second // for a given server to answer
)

// errEnough ends a run after its duration.
var errEnough = errors.New("dev: the duration is over")

// scene is what a playground shows: one store whose leader is killed, or regions that share a pool.
type scene interface {
	title() string
	// open starts the servers and makes the regions.
	open(ctx context.Context) error
	// begin waits until there is something to see, and introduces it.
	begin(ctx context.Context) error
	// acts run until ctx ends.
	acts() []func(ctx context.Context)
	// ended is told of a replica's end that nobody asked for.
	ended(e end)
	// look is how things stand.
	look(ctx context.Context, m moment) view
	// summary is the last word.
	summary(m moment) string
}

// view is how things stand, in some lines for a terminal with so many columns, or in a short one.
type view interface {
	lines(s style, width int) []string
	short() string
}

// moment is what the consumers were told of the bucket that is watched, region by region.
type moment struct {
	elapsed time.Duration // since they started; read after the counts, so that a bound is for no less time than it took
	total   []taken
	lately  []taken // per second, since the moment before
}

// playground is what runs.
type playground struct {
	opts     Options
	dir      string
	screen   *screen
	environ  []string
	cancel   context.CancelCauseFunc
	scene    scene
	regions  []*region
	closers  []func()
	up       chan struct{} // one for each replica that got ready for the first time
	started  time.Time     // of the consumers
	stopping atomic.Bool
	tasks    sync.WaitGroup // end soon after stopping
}

// region is a store with its replicas and its consumer.
type region struct {
	name     string // empty if there is only one
	url      string // of its store
	store    redis.UniversalClient
	etcd     *faultproxy.Proxy // its way to etcd; nil if that can't be cut
	isCut    atomic.Bool
	replicas []*replica
	demands  []demand
	consumer *consumer
}

// Run runs the playground until ctx or the duration ends, and returns nil then.
func Run(ctx context.Context, o Options) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &playground{opts: o, environ: environ(o.Environ, o.Redis != "", len(o.Etcd) > 0), cancel: cancel}
	p.screen = newScreen(o.Out, o.Screen, cancel)
	p.scene = &sampleScene{playground: p}
	if o.Regions != nil {
		p.scene = &poolScene{playground: p}
	}
	if p.dir, err = os.MkdirTemp("", "refiller-dev-"); err != nil {
		return fmt.Errorf("dev: make a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.dir)) }()
	defer func() {
		for i := len(p.closers) - 1; i >= 0; i-- {
			p.closers[i]()
		}
	}()
	err = p.run(ctx)
	if asked.Err() != nil || errors.Is(err, errEnough) {
		return nil // what failed meanwhile is of no interest any more
	}
	return err
}

func (p *playground) run(ctx context.Context) error {
	p.screen.println(p.scene.title() + " Starting …")
	if err := p.scene.open(ctx); err != nil {
		return err
	}
	// Replicas outlive what watches them, so that nothing sees them stop.
	replicas, stopReplicas := context.WithCancel(context.WithoutCancel(ctx))
	defer stopReplicas()
	g, replicas := errgroup.WithContext(replicas)
	p.up = make(chan struct{}, len(p.replicas()))
	for _, r := range p.replicas() {
		g.Go(func() error {
			err := r.run(replicas)
			if err != nil {
				p.cancel(err)
			}
			return err
		})
	}
	err := p.watchThem(ctx)
	p.stopping.Store(true)
	p.screen.clear()
	if !p.started.IsZero() {
		m := p.moment(moment{}, time.Now())
		p.screen.println("", fmt.Sprintf("Stopping after %s: %s.", seconds(m.elapsed), p.scene.summary(m)))
	}
	stopReplicas()
	_ = g.Wait() // its error is the cause of ctx's end
	p.tasks.Wait()
	return err
}

// watchThem waits until the replicas do what the scene is about, and then runs everything else until ctx ends.
func (p *playground) watchThem(ctx context.Context) (err error) {
	for range p.replicas() {
		select {
		case <-p.up:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	if err := p.scene.begin(ctx); err != nil {
		return err
	}
	for _, r := range p.regions {
		if r.consumer, err = newConsumer(r.store, r.demands); err != nil {
			return err
		}
	}
	if p.opts.Duration > 0 {
		timer := time.AfterFunc(p.opts.Duration, func() { p.cancel(errEnough) })
		defer timer.Stop()
	}
	p.started = time.Now()
	var all sync.WaitGroup
	for _, r := range p.regions {
		all.Go(func() { r.consumer.run(ctx) })
	}
	for _, act := range p.scene.acts() {
		all.Go(func() { act(ctx) })
	}
	all.Go(func() { p.show(ctx) })
	all.Wait()
	return context.Cause(ctx)
}

// show shows how things stand, once a second.
func (p *playground) show(ctx context.Context) {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	last, at := p.moment(moment{}, time.Now()), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		last, at = p.moment(last, at), time.Now()
		if v := p.scene.look(ctx, last); ctx.Err() == nil {
			p.screen.show(at, v.lines(p.screen.style, p.screen.width()), v.short())
		}
	}
}

// moment is how the consumers stand now, after the moment before, which was at that time.
func (p *playground) moment(before moment, at time.Time) moment {
	m := moment{total: make([]taken, len(p.regions)), lately: make([]taken, len(p.regions))}
	for i, r := range p.regions {
		m.total[i] = r.consumer.taken()
		if before.total != nil {
			m.lately[i] = m.total[i].per(before.total[i], time.Since(at))
		}
	}
	m.elapsed = time.Since(p.started)
	return m
}

// newReplica makes a replica, which run starts, with this content of its configuration file.
func (p *playground) newReplica(name string, port int, config func(listen string) string) *replica {
	return &replica{
		name: name, port: port, program: p.opts.Program, environ: p.environ, dir: p.dir, config: config,
		ended: func(e end) {
			if !p.stopping.Load() {
				p.scene.ended(e)
			}
		},
		warn: func(name, message string) { p.say(p.screen.style.yellow(name + ": " + message)) },
		ready: func(r *replica, again bool) {
			if again {
				p.say(fmt.Sprintf("%s is back: %s, pid %d", r.name, r.url(), r.pid()))
			} else {
				p.up <- struct{}{}
			}
		},
	}
}

func (p *playground) replicas() (all []*replica) {
	for _, r := range p.regions {
		all = append(all, r.replicas...)
	}
	return all
}

// say tells of an event, unless everything stops.
func (p *playground) say(line string) {
	if !p.stopping.Load() {
		p.screen.println(line)
	}
}

// atEnd has the end of the run call f, after it has closed what is opened later.
func (p *playground) atEnd(f func()) { p.closers = append(p.closers, f) }

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
