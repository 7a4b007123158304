package dev

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/devserver"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
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
	maxRegions  = 6
)

// regionText is the content of the configuration file of a region's replicas.
func regionText(regions []string, own, redis, etcd, listen string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "region: %s\nredis: {url: %s}\nversion: %d\n", strconv.Quote(own), strconv.Quote(redis), sampleVersion)
	fmt.Fprintf(&b, "election: {prefix: %s, ttl: 2s, endpoints: [%s]}\n", electionPrefix, strconv.Quote(etcd))
	fmt.Fprintf(&b, "pools:\n  - name: %s\n    rate: %d/s\n    capacity: %d\n    regions:\n", sharedPool, sharedRate,
		sharedStock)
	for _, r := range regions {
		fmt.Fprintf(&b, "      %s: {weight: 1}\n", strconv.Quote(r))
	}
	fmt.Fprintf(&b, "listen: %s\n", strconv.Quote(listen))
	return b.String()
}

// poolScene is several regions that share a pool, while demand moves from one to the next and, if it is asked for, one
// is cut off.
type poolScene struct {
	*playground
	busy atomic.Int64 // the region whose consumers are busy
}

func (s *poolScene) title() string {
	return fmt.Sprintf("refiller dev: %d regions with a store each share the pool %s, %d/s.", len(s.opts.Regions),
		sharedPool, sharedRate)
}

// open starts etcd, and for each region a store and a slow way to etcd.
func (s *poolScene) open(ctx context.Context) error {
	etcd, err := devserver.StartEtcd(ctx, 0, s.dir)
	if err != nil {
		return fmt.Errorf("dev: regions need the embedded servers: %w", err)
	}
	s.atEnd(etcd.Close)
	for i, name := range s.opts.Regions {
		if err := s.openRegion(int64(i), name, etcd.Addr()); err != nil {
			return err
		}
	}
	return nil
}

func (s *poolScene) openRegion(i int64, name, etcd string) error {
	server, err := devserver.StartRedis(0)
	if err != nil {
		return err
	}
	s.atEnd(server.Close)
	proxy, err := faultproxy.New(etcd, faultproxy.Options{})
	if err != nil {
		return err
	}
	s.atEnd(func() { _ = proxy.Close() }) // nobody needs it any more
	if err := proxy.Delay(faultproxy.Both, oneWay, oneWay/4); err != nil {
		return err
	}
	store := redis.NewClient(&redis.Options{Addr: server.Addr(), ContextTimeoutEnabled: true})
	s.atEnd(func() { _ = store.Close() }) // nothing is under way
	r := &region{name: name, url: "redis://" + server.Addr(), store: store, etcd: proxy,
		demands: []demand{{key: sharedPool, tokens: 3, wanted: func() float64 { return s.wanted(i) }}}}
	for n := range perRegion {
		r.replicas = append(r.replicas, s.newReplica(name+"-"+strconv.Itoa(n+1), 0,
			func(listen string) string { return regionText(s.opts.Regions, name, r.url, proxy.Addr(), listen) }))
	}
	s.regions = append(s.regions, r)
	return nil
}

// wanted is how many tokens per second the consumers of region i want.
func (s *poolScene) wanted(i int64) float64 {
	if s.busy.Load() == i {
		return busy
	}
	return calm
}

// begin waits until every region has its first grant.
func (s *poolScene) begin(ctx context.Context) error {
	for _, r := range s.regions {
		for r.share(ctx).left == 0 {
			if pause(ctx, pollEvery); ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
	}
	s.introduce()
	return nil
}

func (s *poolScene) acts() []func(context.Context) {
	if s.opts.Cut != "" {
		return []func(context.Context){s.shift, s.cut}
	}
	return []func(context.Context){s.shift}
}

func (s *poolScene) ended(e end) { s.say(e.replica.name + " ended: " + e.how) }

// tell tells of an event, with its time.
func (s *poolScene) tell(style func(string) string, format string, args ...any) {
	s.say(style(seconds(time.Since(s.started)) + "  " + fmt.Sprintf(format, args...)))
}

// shift has the consumers of one region after the other be busy.
func (s *poolScene) shift(ctx context.Context) {
	for turn := 0; ctx.Err() == nil; turn++ {
		i := turn % len(s.regions)
		s.busy.Store(int64(i))
		s.tell(s.screen.style.bold, "demand shifts to %s", s.regions[i].name)
		pause(ctx, shiftEvery)
	}
}

// cut cuts a region off from etcd, and heals that.
func (s *poolScene) cut(ctx context.Context) {
	r := s.regions[slices.Index(s.opts.Regions, s.opts.Cut)]
	if pause(ctx, s.opts.CutAfter); ctx.Err() != nil {
		return
	}
	r.isCut.Store(true)
	r.etcd.Cut()
	s.tell(s.screen.style.red,
		"%s is cut off from etcd and the other regions: its grant ends in %s, then it has its floor", r.name,
		pool.ForTTL(2*time.Second).Lease)
	if s.opts.CutFor == 0 {
		return
	}
	if pause(ctx, s.opts.CutFor); ctx.Err() != nil {
		return
	}
	if err := r.etcd.Heal(); err != nil {
		s.tell(s.screen.style.red, "%v", err)
		return
	}
	r.isCut.Store(false)
	s.tell(s.screen.style.green, "%s is connected again", r.name)
}

// share is what a region's store says of its share.
type share struct {
	rate, floor float64 // tokens per second in force
	left        time.Duration
	tokens      int64
	capacity    int64
	err         error
}

func (r *region) share(ctx context.Context) share {
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

func (s *poolScene) look(ctx context.Context, m moment) view {
	v := poolView{elapsed: m.elapsed, coordinator: s.coordinator(ctx), bound: s.bound(m)}
	for i, r := range s.regions {
		v.regions = append(v.regions, regionView{name: r.name, wants: int64(s.wanted(int64(i))), cut: r.isCut.Load(),
			share: r.share(ctx), lately: m.lately[i]})
		v.admitted += m.total[i].admitted
	}
	return v
}

// bound is the most that all regions may have admitted: what the buckets held, what fell due, and what full buckets
// were credited for the time before they were first taken from.
func (s *poolScene) bound(m moment) int64 {
	return sharedStock + int64(math.Ceil(sharedRate*(m.elapsed+policy.DefaultInterval).Seconds()))
}

// coordinator is who coordinates, as any replica says; empty if none knows.
func (s *poolScene) coordinator(ctx context.Context) string {
	for _, r := range s.regions {
		if r.isCut.Load() {
			continue
		}
		for _, report := range ask(ctx, r.replicas) {
			if st := report.status; st != nil && st.Pools != nil && st.Pools.Coordinator != nil {
				return st.Pools.Coordinator.Identity
			}
		}
	}
	return ""
}

func (s *poolScene) summary(m moment) string {
	admitted := int64(0)
	for _, t := range m.total {
		admitted += t.admitted
	}
	return fmt.Sprintf("%s tokens admitted in all regions, of at most %s", thousands(admitted), thousands(s.bound(m)))
}
