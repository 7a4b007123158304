package dev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const (
	electionTTL  = 2 * time.Second
	showEvery    = time.Second
	callTimeout  = 2 * time.Second
	reachTimeout = 5 * time.Second // for a given server until it answers
)

// errEnough ends a run after its duration.
var errEnough = errors.New("dev: the duration is over")

// scene defines what a playground shows: one region whose leader is killed, users of two buckets, or regions that share
// a pool.
type scene interface {
	title() string
	// begin waits until there is something to show. about describes it, and try lists commands for the user.
	begin(ctx context.Context) (about, try []string, err error)
	// demands returns the demands of a region's consumer. The first one is for the watched bucket.
	demands(region int) []demand
	// acts are the scene's loops. Each runs until ctx ends.
	acts() []func(ctx context.Context)
	// ended is called when a replica ended without a request.
	ended(r *replica, pid int, how string)
	// refresh reads the state. lines and short return it as text: lines for a terminal of the given width, and short in
	// one line.
	refresh(ctx context.Context)
	lines(s style, width int) []string
	short() string
	// summary returns the text at the end of the run.
	summary() string
}

// playground is the state of a run.
type playground struct {
	opts     Options
	dir      string
	screen   *screen
	environ  []string
	cancel   context.CancelCauseFunc
	scene    scene
	regions  []*region
	closers  []func()
	ready    chan struct{} // one for each replica that got ready for the first time
	started  time.Time     // when the consumers started
	elapsed  time.Duration // from started to the last count
	stopping atomic.Bool
	tasks    sync.WaitGroup // end soon after stopping
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
	switch {
	case o.Flows:
		p.scene = &flowScene{sampleScene: &sampleScene{playground: p}}
	case o.Regions != nil:
		p.scene = &poolScene{playground: p}
	}
	p.dir, err = os.MkdirTemp("", "refiller-dev-")
	if err != nil {
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
		return nil // errors while the run ends are expected
	}
	return err
}

func (p *playground) run(ctx context.Context) error {
	p.screen.println(p.scene.title() + " Starting …")
	if err := p.open(ctx); err != nil {
		return err
	}
	// Replicas are stopped after the loops that watch them. Otherwise their stop would be shown as an event.
	replicas, stopReplicas := context.WithCancel(context.WithoutCancel(ctx))
	defer stopReplicas()
	var running sync.WaitGroup
	p.ready = make(chan struct{}, len(p.replicas()))
	for _, r := range p.replicas() {
		running.Go(func() {
			if err := r.run(replicas); err != nil {
				p.cancel(err)
			}
		})
	}
	err := p.watch(ctx)
	p.stopping.Store(true)
	p.screen.clear()
	if !p.started.IsZero() {
		p.count()
		p.screen.println("", fmt.Sprintf("Stopping after %s: %s.", seconds(p.elapsed), p.scene.summary()))
	}
	stopReplicas()
	running.Wait()
	p.tasks.Wait()
	return err
}

// watch waits until the scene can begin, and then runs everything else until ctx ends.
func (p *playground) watch(ctx context.Context) error {
	for range p.replicas() {
		select {
		case <-p.ready:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	about, try, err := p.scene.begin(ctx)
	if err != nil {
		return err
	}
	p.screen.println(p.introduction(about, try, p.screen.style, p.screen.width())...)
	for i, r := range p.regions {
		r.consumer, err = newConsumer(r.store, p.scene.demands(i))
		if err != nil {
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
	for _, act := range append(p.scene.acts(), p.show) {
		all.Go(func() { act(ctx) })
	}
	all.Wait()
	return context.Cause(ctx)
}

// introduction returns the text that is shown once everything runs, for a terminal with width columns.
func (p *playground) introduction(about, try []string, s style, width int) []string {
	origin := map[bool]string{true: "embedded", false: "yours"}
	t := terminal.NewTable(terminal.Column{}, terminal.Column{}, terminal.Column{Text: true})
	for _, r := range p.regions {
		t.Row("  "+cmp.Or(r.name, "store"), r.cfg.Redis, origin[p.opts.Redis == ""])
		if p.opts.elects() && r.name == "" {
			t.Row("  etcd", strings.Join(r.cfg.Election.Endpoints, ","), origin[len(p.opts.Etcd) == 0]+", elects the leader")
		}
		for _, one := range r.replicas {
			t.Row("  "+one.name, one.url(), fmt.Sprintf("pid %d", one.pid()))
		}
	}
	lines := append(append([]string{""}, tableLines(t, width)...), "  logs  "+p.dir, "")
	lines = append(append(lines, about...), "", s.bold("In a second terminal, try"))
	return append(append(lines, try...), "", s.bold("Ctrl-C")+" stops everything and removes its files.", "")
}

// show shows the state, once a second.
func (p *playground) show(ctx context.Context) {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		p.count()
		p.scene.refresh(ctx)
		if ctx.Err() == nil {
			p.screen.show(time.Now(), p.scene.lines(p.screen.style, p.screen.width()), p.scene.short())
		}
	}
}

// count adds up the results of the consumers' takes. It reads the time afterwards, so that a bound is computed for at
// least the time in which they were made.
func (p *playground) count() {
	last := p.elapsed
	for _, r := range p.regions {
		before := r.total
		r.total = r.consumer.taken()
		r.lately = r.total.per(before, time.Since(p.started)-last)
	}
	p.elapsed = time.Since(p.started)
}

func (p *playground) replicas() (all []*replica) {
	for _, r := range p.regions {
		all = append(all, r.replicas...)
	}
	return all
}

// say shows an event, unless the run is about to end.
func (p *playground) say(line string) {
	if !p.stopping.Load() {
		p.screen.println(line)
	}
}

// atEnd makes the run call f at its end, after everything that is opened later was closed.
func (p *playground) atEnd(f func()) { p.closers = append(p.closers, f) }
