package dev

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

const (
	sharedPool  = "payments"       // the pool's name
	sharedRate  = 1000             // tokens per second of all regions
	sharedStock = 3000             // capacity of all regions' buckets together
	busy, calm  = 900, 150         // tokens per second that the consumers of a region want when busy and otherwise
	shiftEvery  = 15 * time.Second // after this time another region's consumers are busy
	maxRegions  = 6
)

// poolScene has several regions that share a pool, while demand moves from one region to the next. If the options say
// so, one region is cut off.
type poolScene struct {
	*playground
	busy        atomic.Int64 // the region whose consumers are busy
	coordinator string       // at the last reading; empty if none is known
}

func (s *poolScene) title() string {
	return fmt.Sprintf("%d regions, each with its own store, share the pool %s, which has %d/s.", len(s.opts.Regions),
		sharedPool, sharedRate)
}

func (s *poolScene) demands(region int) []demand {
	return []demand{{key: sharedPool, tokens: 3, wanted: func() float64 { return s.wanted(region) }}}
}

// wanted returns the rate that the consumers of a region want, in tokens per second.
func (s *poolScene) wanted(region int) float64 {
	if s.busy.Load() == int64(region) {
		return busy
	}
	return calm
}

// begin waits until every region has its first grant.
func (s *poolScene) begin(ctx context.Context) (about, try []string, err error) {
	for _, r := range s.regions {
		for r.readShare(ctx).left == 0 {
			timing.Sleep(ctx.Done(), pollEvery)
			if ctx.Err() != nil {
				return nil, nil, context.Cause(ctx)
			}
		}
	}
	text := fmt.Sprintf("In turn, the consumers of one region want %d/s, while those of each other region want %d/s. "+
		"A round trip from a region to etcd takes about %s.", busy, calm, 2*oneWay)
	first := s.regions[0]
	return terminal.Wrap(text, s.screen.width()), []string{
		"  " + s.opts.program("refiller") + " pool status --etcd-prefix " + electionPrefix + " --etcd " + first.etcd.Addr(),
		"  " + s.opts.program("consumer") + " take " + sharedPool + " -n 5 --redis " + first.cfg.Redis.String(),
	}, nil
}

func (s *poolScene) acts() []func(context.Context) {
	if s.opts.Cut != "" {
		return []func(context.Context){s.shift, s.cut}
	}
	return []func(context.Context){s.shift}
}

func (s *poolScene) ended(r *replica, _ int, how string) { s.say(r.name + " ended: " + how) }

// report shows an event with its time.
func (s *poolScene) report(style func(string) string, format string, args ...any) {
	s.say(style(seconds(time.Since(s.started)) + "  " + fmt.Sprintf(format, args...)))
}

// shift makes the consumers of one region after the other busy.
func (s *poolScene) shift(ctx context.Context) {
	for turn := 0; ctx.Err() == nil; turn++ {
		i := turn % len(s.regions)
		s.busy.Store(int64(i))
		s.report(s.screen.style.bold, "demand shifts to %s", s.regions[i].name)
		timing.Sleep(ctx.Done(), shiftEvery)
	}
}

// cut cuts a region off from etcd, and connects it again.
func (s *poolScene) cut(ctx context.Context) {
	r := s.regions[slices.Index(s.opts.Regions, s.opts.Cut)]
	timing.Sleep(ctx.Done(), s.opts.CutAfter)
	if ctx.Err() != nil {
		return
	}
	r.isCut.Store(true)
	r.etcd.Cut()
	s.report(s.screen.style.red,
		"%s is cut off from etcd and the other regions: its grant ends within %s, and then it has only its floor", r.name,
		pool.ForTTL(electionTTL).Lease)
	if s.opts.CutFor == 0 {
		return
	}
	timing.Sleep(ctx.Done(), s.opts.CutFor)
	if ctx.Err() != nil {
		return
	}
	if err := r.etcd.Heal(); err != nil {
		s.report(s.screen.style.red, "%v", err)
		return
	}
	r.isCut.Store(false)
	s.report(s.screen.style.green, "%s is connected again", r.name)
}

// share is a region's share, as its store has it.
type share struct {
	rate   float64       // tokens per second in force
	left   time.Duration // until the end of its grant; 0 if it has only its floor
	tokens int64
	err    error
}

func (r *region) readShare(ctx context.Context) share {
	p, err := r.peek(ctx, sharedPool)
	if err != nil || p.Terms == nil {
		return share{err: err}
	}
	t := p.Terms
	perSecond := func(n int64) float64 { return float64(n) * 1e6 / float64(t.Per) }
	s := share{rate: perSecond(t.Tokens), tokens: p.Tokens}
	if t.Granted(p.Version.Era, p.Now) {
		s.rate, s.left = perSecond(t.GrantTokens), time.Duration(t.GrantEnd-p.Now)*time.Microsecond
	}
	return s
}

func (s *poolScene) refresh(ctx context.Context) {
	s.coordinator = s.askCoordinator(ctx)
	for _, r := range s.regions {
		r.share = r.readShare(ctx)
	}
}

// bound returns the largest number of tokens that all regions may have admitted. It is the sum of the tokens that the
// buckets held, the tokens that have fallen due since, and the tokens that a refill may credit for the time before the
// first take.
func (s *poolScene) bound() int64 {
	return sharedStock + int64(math.Ceil(sharedRate*(s.elapsed+policy.DefaultInterval).Seconds()))
}

// askCoordinator asks the replicas for the coordinator. It returns "" if none of them knows it.
func (s *poolScene) askCoordinator(ctx context.Context) string {
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

// held compares the admitted tokens with the bound.
func (s *poolScene) held(where string) string {
	admitted := int64(0)
	for _, r := range s.regions {
		admitted += r.total.admitted
	}
	return fmt.Sprintf("%s of at most %s tokens admitted%s", thousands(admitted), thousands(s.bound()), where)
}

func (s *poolScene) summary() string { return s.held(" in all regions") }
