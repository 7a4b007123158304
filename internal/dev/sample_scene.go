package dev

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// watched is the sample bucket whose admitted tokens are compared with the bound. It is the first of samples.
	watched = "checkout"
	// anyUser is a bucket of the sample template. Every such name is a bucket.
	anyUser = "user:42"
)

// sampleDemands ask for 600 tokens/s of checkout, 20 % more than it gives, and for a little of other buckets, so that
// their numbers change.
var sampleDemands = []demand{
	{key: watched, tokens: 3, wanted: func() float64 { return 600 }},
	{key: "llm-tokens", tokens: 2500, wanted: func() float64 { return 1250 }},
	{key: "digest", tokens: 1, wanted: func() float64 { return 0.7 }},
}

// sampleScene has one region with sample buckets. If the options say so, it kills the replica that refills.
type sampleScene struct {
	*playground
	followed []*refills // the first one is of the watched bucket
	gaps     gaps
	active   atomic.Pointer[replica] // the replica with the most refills before the last reading; nil if there were none
	killed   atomic.Int64            // the process that the playground killed last

	// Results of the last reading:
	reports  []report
	activity activity
	levels   []level
	index    int64 // of the watched bucket
	store    error // why the store could not be read
}

// level is the fill of a bucket.
type level struct {
	key              string
	tokens, capacity int64
}

func (s *sampleScene) title() string {
	return "Three replicas keep sample buckets full, and a demo consumer takes tokens from them."
}

func (s *sampleScene) demands(int) []demand { return sampleDemands }

func (s *sampleScene) buckets() []config.Bucket { return s.regions[0].cfg.Buckets }

// begin waits until a replica refills.
func (s *sampleScene) begin(ctx context.Context) (about, try []string, err error) {
	active, err := s.firstActive(ctx)
	if err != nil {
		return nil, nil, err
	}
	for _, b := range s.buckets() {
		if b.Policy.Steps == nil {
			s.followed = append(s.followed, &refills{key: b.Key})
		}
	}
	return s.about(s.screen.width()), s.try(active), nil
}

// about returns a description of the buckets.
func (s *sampleScene) about(width int) []string {
	t := terminal.NewTable(terminal.Column{Name: "  BUCKET", Text: true}, number("CAPACITY"),
		terminal.Column{Name: "REFILL", Text: true}, number("DEMAND"))
	for _, b := range s.buckets() {
		demand := ""
		if b.Key == watched {
			demand = fmt.Sprintf("%.0f/s", sampleDemands[0].wanted())
		}
		t.Row("  "+b.Key, b.Policy.Capacity, schedule(b.Policy), demand)
	}
	lines := tableLines(t, width)
	if s.opts.KillEvery > 0 {
		text := fmt.Sprintf("Every %s the replica that refills is killed. The gap is the time from its last "+
			"refill to the next one, on the clock of the store.", s.opts.KillEvery)
		lines = append(append(lines, ""), terminal.Wrap(text, width)...)
	}
	return lines
}

// try returns commands for a second terminal. The replica to kill is the one that refills.
func (s *sampleScene) try(victim *replica) []string {
	to, dim := " --redis "+s.regions[0].cfg.Redis.String(), s.screen.style.dim
	take := "  " + s.opts.program("consumer") + " take "
	return []string{
		take + "mail -n 5" + to,
		take + watched + to,
		"  " + dim("# a bucket of a template: every other user has one, too"),
		take + anyUser + to,
		"  " + s.opts.program("refiller") + " status --addr " + s.replicas()[0].url(),
		"  " + dim("# kill the replica that refills: another one continues"),
		fmt.Sprintf("  kill -9 %d", victim.pid()),
	}
}

// schedule describes the rate or the schedule of a bucket.
func schedule(p policy.Policy) string {
	switch steps := p.Steps.(type) {
	case nil:
		return p.Rate.String()
	case policy.Every:
		return fmt.Sprintf("%d %s", p.StepTokens, steps)
	default:
		return fmt.Sprintf("%d at %s (cron)", p.StepTokens, steps)
	}
}

func (s *sampleScene) acts() []func(context.Context) {
	if s.opts.KillEvery > 0 {
		return []func(context.Context){s.follow, s.killActive}
	}
	return []func(context.Context){s.follow}
}

func (s *sampleScene) refresh(ctx context.Context) {
	s.observe(ask(ctx, s.replicas()))
	s.levels, s.store = nil, nil
	for _, b := range s.buckets() {
		r, err := s.regions[0].peek(ctx, b.Key)
		if err != nil && !errors.Is(err, lua.ErrUnknownBucket) {
			s.store = err
		}
		s.levels = append(s.levels, level{key: b.Key, tokens: r.Tokens, capacity: b.Policy.Capacity})
		if b.Key == watched {
			s.index = r.Version.Index
		}
	}
}

func (s *sampleScene) summary() string {
	if s.gaps.String() != "" {
		return s.held(s.screen.style) + "; refill gap: " + s.gaps.String()
	}
	return s.held(s.screen.style)
}

// bound returns the largest number of tokens that a bucket can admit within elapsed if it is refilled with such gaps.
func bound(p policy.Policy, elapsed, gap time.Duration) int64 {
	return p.Capacity + p.Rate.Over(elapsed) + 1 + p.Rate.Over(max(gap, p.Interval))
}
