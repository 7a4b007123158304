package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/devserver"
	"github.com/tokenrefill/refiller/internal/faultproxy"
	"github.com/tokenrefill/refiller/internal/terminal"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

const (
	perRegion   = 2                     // replicas
	sharedPool  = "payments"            // the pool's name
	sharedRate  = 1000                  // tokens per second of all regions
	sharedStock = 3000                  // tokens that all regions' buckets hold
	busy, calm  = 900, 150              // tokens per second that consumers of a region want, in turn
	shiftEvery  = 15 * time.Second      // when another region's consumers are busy
	oneWay      = 20 * time.Millisecond // from a region to etcd, give or take a quarter
	takeEvery   = 20 * time.Millisecond
	maxRegions  = 6
)

// RegionOptions says which regions to run and how to show them.
type RegionOptions struct {
	// Program, Environ, Duration, Out and Screen are as in Options.
	Program  string
	Environ  []string
	Duration time.Duration
	Out      io.Writer
	Screen   terminal.Screen
	// Regions by name, two or more.
	Regions []string
	// Cut is the region to cut off from etcd; empty for none.
	Cut string
	// CutAfter is how long after the start Cut is cut off, and CutFor for how long; 0 means for good.
	CutAfter, CutFor time.Duration
}

// Validate reports what is wrong with the options, as ErrOptions.
func (o RegionOptions) Validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrOptions, fmt.Sprintf(format, args...))
	}
	if len(o.Regions) < 2 || len(o.Regions) > maxRegions {
		return bad("--regions %s: want 2 to %d names, such as eu,us,ap", strings.Join(o.Regions, ","), maxRegions)
	}
	for i, r := range o.Regions {
		if slices.Contains(o.Regions[:i], r) {
			return bad("--regions: %q is there twice", r)
		}
	}
	for _, r := range o.Regions {
		var problems config.Problems
		if _, err := config.Parse([]byte(regionText(o.Regions, r, "redis://127.0.0.1:1", "127.0.0.1:1", "127.0.0.1:0"))); errors.As(err, &problems) {
			return bad("--regions: %s", problems[0].Msg)
		}
	}
	switch {
	case o.Program == "" || o.Out == nil:
		return bad("Program and Out are required")
	case o.Duration < 0:
		return bad("--duration %s: want more than 0, or 0 for no end", o.Duration)
	case o.Cut != "" && !slices.Contains(o.Regions, o.Cut):
		return bad("--cut %s: it is none of the regions %s", o.Cut, strings.Join(o.Regions, ","))
	case o.CutAfter < 0 || o.CutFor < 0:
		return bad("--cut-after %s, --cut-for %s: want 0 or more", o.CutAfter, o.CutFor)
	}
	return nil
}

// regionText is the content of the configuration file of a region's replicas.
func regionText(regions []string, own, redis, etcd, listen string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "region: %s\nredis: {url: %s}\nversion: %d\n", strconv.Quote(own), strconv.Quote(redis), sampleVersion)
	fmt.Fprintf(&b, "election: {prefix: %s, ttl: 2s, endpoints: [%s]}\n", electionPrefix, strconv.Quote(etcd))
	fmt.Fprintf(&b, "pools:\n  - name: %s\n    rate: %d/s\n    capacity: %d\n    regions:\n", sharedPool, sharedRate, sharedStock)
	for _, r := range regions {
		fmt.Fprintf(&b, "      %s: {weight: 1}\n", strconv.Quote(r))
	}
	fmt.Fprintf(&b, "listen: %s\n", strconv.Quote(listen))
	return b.String()
}

// regions is what runs.
type regions struct {
	opts     RegionOptions
	dir      string
	screen   *screen
	list     []*region
	started  time.Time // of the consumers
	stopping atomic.Bool
}

// region is one region: a store, a way to etcd that can be cut, replicas and consumers.
type region struct {
	name     string
	url      string // of its store
	store    redis.UniversalClient
	etcd     *faultproxy.Proxy
	replicas []*replica
	client   *fetch.Client
	counts   counters
	wants    atomic.Int64 // tokens per second
	isCut    atomic.Bool
}

// RunRegions runs a playground of several regions that share a pool, until ctx or the duration ends, and returns nil
// then.
func RunRegions(ctx context.Context, o RegionOptions) (err error) {
	if err := o.Validate(); err != nil {
		return err
	}
	asked := ctx
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	p := &regions{opts: o}
	p.screen = newScreen(o.Out, o.Screen, cancel)
	if p.dir, err = os.MkdirTemp("", "refiller-dev-"); err != nil {
		return fmt.Errorf("dev: make a directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(p.dir)) }()
	err = p.run(ctx, cancel)
	if asked.Err() != nil || errors.Is(err, errEnough) {
		return nil // what failed meanwhile is of no interest any more
	}
	return err
}

func (p *regions) run(ctx context.Context, cancel context.CancelCauseFunc) error {
	p.screen.println(fmt.Sprintf("refiller dev: %d regions with a store each share the pool %s, %d/s. Starting …", len(p.opts.Regions), sharedPool, sharedRate))
	closeServers, err := p.startServers(ctx)
	defer closeServers()
	if err != nil {
		return err
	}
	// Replicas outlive what watches them, so that nothing sees them stop.
	replicas, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	up := p.makeReplicas()
	g, replicas := errgroup.WithContext(replicas)
	for _, r := range p.list {
		for _, one := range r.replicas {
			g.Go(func() error {
				err := one.run(replicas)
				if err != nil {
					cancel(err)
				}
				return err
			})
		}
	}
	err = p.watchThem(ctx, cancel, up)
	p.stopping.Store(true)
	p.screen.clear()
	if !p.started.IsZero() {
		p.screen.println("", p.summary())
	}
	stop()
	_ = g.Wait() // its error is the cause of ctx's end
	return err
}

// startServers starts etcd, and for each region a store and a slow way to etcd. It returns how to end them, also with an
// error.
func (p *regions) startServers(ctx context.Context) (closeAll func(), err error) {
	var closers []func()
	closeAll = func() {
		for i := len(closers) - 1; i >= 0; i-- {
			closers[i]()
		}
	}
	etcd, err := devserver.StartEtcd(ctx, 0, p.dir)
	if err != nil {
		return closeAll, fmt.Errorf("dev: regions need the embedded servers: %w", err)
	}
	closers = append(closers, etcd.Close)
	for _, name := range p.opts.Regions {
		store, err := devserver.StartRedis(0)
		if err != nil {
			return closeAll, err
		}
		closers = append(closers, store.Close)
		proxy, err := faultproxy.New(etcd.Addr(), faultproxy.Options{})
		if err == nil {
			closers = append(closers, func() { _ = proxy.Close() }) // nobody needs it any more
			err = proxy.Delay(faultproxy.Both, oneWay, oneWay/4)
		}
		if err != nil {
			return closeAll, err
		}
		rdb := redis.NewClient(&redis.Options{Addr: store.Addr(), ContextTimeoutEnabled: true})
		closers = append(closers, func() { _ = rdb.Close() }) // nothing is under way
		r := &region{name: name, url: "redis://" + store.Addr(), store: rdb, etcd: proxy}
		if r.client, err = fetch.New(rdb, fetch.WithDeadline(takeDeadline)); err != nil {
			return closeAll, fmt.Errorf("dev: demo consumer: %w", err)
		}
		p.list = append(p.list, r)
	}
	return closeAll, nil
}

// makeReplicas makes the replicas; the channel tells of each that has got ready, once.
func (p *regions) makeReplicas() <-chan struct{} {
	up := make(chan struct{}, perRegion*len(p.list))
	for _, r := range p.list {
		for i := range perRegion {
			var once sync.Once
			r.replicas = append(r.replicas, &replica{
				name: r.name + "-" + strconv.Itoa(i+1), program: p.opts.Program, environ: environ(p.opts.Environ, false, false), dir: p.dir,
				config: func(listen string) string { return regionText(p.opts.Regions, r.name, r.url, r.etcd.Addr(), listen) },
				ended:  func(e end) { p.say(e.replica.name + " ended: " + e.how) },
				warn:   func(name, message string) { p.say(p.screen.style.dim(name + ": " + message)) },
				ready:  func(*replica) { once.Do(func() { up <- struct{}{} }) },
			})
		}
	}
	return up
}

func (p *regions) say(line string) {
	if !p.stopping.Load() {
		p.screen.println(line)
	}
}

// watchThem waits until the pool is shared, and then runs everything else until ctx ends.
func (p *regions) watchThem(ctx context.Context, cancel context.CancelCauseFunc, up <-chan struct{}) error {
	for range perRegion * len(p.list) {
		select {
		case <-up:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	for !p.shared(ctx) {
		if pause(ctx, pollEvery); ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	p.introduce()
	if p.opts.Duration > 0 {
		timer := time.AfterFunc(p.opts.Duration, func() { cancel(errEnough) })
		defer timer.Stop()
	}
	p.started = time.Now()
	var all sync.WaitGroup
	for _, r := range p.list {
		all.Go(func() { r.consume(ctx) })
	}
	all.Go(func() { p.shift(ctx) })
	all.Go(func() { p.show(ctx) })
	if p.opts.Cut != "" {
		all.Go(func() { p.cut(ctx) })
	}
	all.Wait()
	return context.Cause(ctx)
}

// shared reports whether every region has its first grant.
func (p *regions) shared(ctx context.Context) bool {
	for _, r := range p.list {
		if s := r.look(ctx); s.left == 0 {
			return false
		}
	}
	return true
}

// shift has the consumers of one region after the other be busy.
func (p *regions) shift(ctx context.Context) {
	for turn := 0; ctx.Err() == nil; turn++ {
		for i, r := range p.list {
			r.wants.Store(calm)
			if i == turn%len(p.list) {
				r.wants.Store(busy)
				p.say(p.screen.style.bold(fmt.Sprintf("%s  demand shifts to %s", seconds(time.Since(p.started)), r.name)))
			}
		}
		pause(ctx, shiftEvery)
	}
}

// cut cuts a region off from etcd, and heals that.
func (p *regions) cut(ctx context.Context) {
	r := p.list[slices.Index(p.opts.Regions, p.opts.Cut)]
	if pause(ctx, p.opts.CutAfter); ctx.Err() != nil {
		return
	}
	r.isCut.Store(true)
	r.etcd.Cut()
	p.say(p.screen.style.red(fmt.Sprintf("%s  %s is cut off from etcd and the other regions: its grant ends in %s, then it has its floor", seconds(time.Since(p.started)), r.name,
		pool.ForTTL(2*time.Second).Lease)))
	if p.opts.CutFor == 0 {
		return
	}
	if pause(ctx, p.opts.CutFor); ctx.Err() != nil {
		return
	}
	if err := r.etcd.Heal(); err != nil {
		p.say(p.screen.style.red(err.Error()))
		return
	}
	r.isCut.Store(false)
	p.say(p.screen.style.green(fmt.Sprintf("%s  %s is connected again", seconds(time.Since(p.started)), r.name)))
}

// consume takes three tokens at a time, so often as the region's consumers want, until ctx ends.
func (r *region) consume(ctx context.Context) {
	const tokens = 3
	ticker := time.NewTicker(takeEvery)
	defer ticker.Stop()
	owed := 0.0
	for {
		select {
		case <-ctx.Done():
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeDeadline)
			_ = r.client.Close(closing) // what still hangs has no owner but the process, which ends
			cancel()
			return
		case <-ticker.C:
		}
		for owed += float64(r.wants.Load()) * takeEvery.Seconds(); owed >= tokens; owed -= tokens {
			// A take that has begun is finished, so that its tokens are counted.
			switch result, err := r.client.Take(context.WithoutCancel(ctx), sharedPool, tokens); {
			case err != nil:
				r.counts.failed.Add(1)
			case result.OK:
				r.counts.admitted.Add(tokens)
			default:
				r.counts.denied.Add(tokens)
			}
		}
	}
}

// share is what a region's store says of its share.
type share struct {
	rate, floor float64 // tokens per second in force
	left        time.Duration
	tokens      int64
	capacity    int64
	err         error
}

func (r *region) look(ctx context.Context) share {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	p, err := lua.Peek(ctx, r.store, sharedPool, 1)
	if err != nil || p.Terms == nil {
		return share{err: err}
	}
	t := p.Terms
	perSecond := func(n int64) float64 { return float64(n) * 1e6 / float64(t.Per) }
	s := share{rate: perSecond(t.Tokens), floor: perSecond(t.Tokens), tokens: p.Tokens, capacity: t.Capacity}
	if t.Granted(p.Version.Era, p.Now) {
		s.rate, s.left = perSecond(t.GrantTokens), time.Duration(t.GrantEnd-p.Now)*time.Microsecond
	}
	return s
}

// show shows how the regions stand, once a second.
func (p *regions) show(ctx context.Context) {
	ticker := time.NewTicker(showEvery)
	defer ticker.Stop()
	before, at := p.counted(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		v := regionsView{elapsed: time.Since(p.started), coordinator: p.coordinator(ctx)}
		now := p.counted()
		for i, r := range p.list {
			v.regions = append(v.regions, regionView{
				name: r.name, wants: r.wants.Load(), cut: r.isCut.Load(), share: r.look(ctx), lately: now[i].per(before[i], time.Since(at)),
			})
			v.admitted += now[i].admitted
		}
		v.bound = p.bound()
		before, at = now, time.Now()
		if ctx.Err() == nil {
			p.screen.show(at, v.lines(p.screen.style, p.screen.width()), v.short())
		}
	}
}

func (p *regions) counted() []taken {
	list := make([]taken, len(p.list))
	for i, r := range p.list {
		list[i] = taken{r.counts.admitted.Load(), r.counts.denied.Load(), r.counts.failed.Load()}
	}
	return list
}

// bound is the most that all regions may have admitted: what the buckets held, what fell due, and what full buckets
// were credited for the time before they were first taken from.
func (p *regions) bound() int64 {
	elapsed := time.Since(p.started)
	return sharedStock + int64(math.Ceil(sharedRate*(elapsed+policy.DefaultInterval).Seconds()))
}

// coordinator is who coordinates, as any replica says; empty if none knows.
func (p *regions) coordinator(ctx context.Context) string {
	for _, r := range p.list {
		if r.isCut.Load() {
			continue
		}
		for _, report := range ask(ctx, r.replicas) {
			if s := report.status; s != nil && s.Pools != nil && s.Pools.Coordinator != nil {
				return s.Pools.Coordinator.Identity
			}
		}
	}
	return ""
}

// summary is the last word.
func (p *regions) summary() string {
	admitted := int64(0)
	for _, t := range p.counted() {
		admitted += t.admitted
	}
	return fmt.Sprintf("Stopping after %s: %s tokens admitted in all regions, of at most %s.", seconds(time.Since(p.started)), thousands(admitted), thousands(p.bound()))
}
