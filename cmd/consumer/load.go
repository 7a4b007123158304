package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	maxLoadConcurrency = 10_000
	loadConnections    = 128 // more connections would only queue in the server
	progressEvery      = time.Second
	gapSample          = 50 * time.Millisecond  // how often the time of the bucket's last refill is read
	errorPause         = 100 * time.Millisecond // pause after an error, so that an unavailable server gets few calls
)

// load is a run of the load generator.
type load struct {
	key         string
	tokens      int64 // tokens of a take
	concurrency int
	rate        policy.Rate // takes per time; zero if there is no limit
	duration    time.Duration
	counts      counts
	flow        string     // the flow of all takes; empty if they have none
	flows       int64      // number of flows that make the takes, one after the other; 0 if there are none
	byFlow      loadByFlow // the takes of these flows
}

func newLoadCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	rate := ""
	progress := false
	l := load{tokens: 1, concurrency: 10, duration: 10 * time.Second}
	cmd := &cobra.Command{
		Use:   "load KEY",
		Short: "Put load on a bucket, and report latencies and admitted tokens",
		Long: `Take tokens from bucket KEY with many concurrent callers, and report latencies and the number of admitted
tokens. The tokens are really taken from the bucket.

The report compares the admitted tokens with a bound, which is the most that the bucket's policy allows:
capacity + rate × elapsed time + rate × longest time without a refill. The comparison is
meaningful only if nothing else takes, returns or grants tokens of the bucket during the run.

The SDK answers some takes from memory, for example because the bucket has just denied a take. The report has separate
numbers for takes that Redis answered and for takes that were answered from memory.

Without --rate, each caller begins its next take as soon as it has the result of the previous one. With --rate, takes
begin on a fixed schedule. The latency of a take then begins at its scheduled time, so it includes the time for which a
slow server delayed the take.

With --flows N, takes are made for the flows load-1 to load-N in turn, and the report has the least, mean and most
tokens per second that a flow got. To show how a bucket is divided between a busy flow and many quiet flows, run the
command twice at the same time: once with --flow loud, and once with --flows.

Ctrl-C ends the run early. The report is printed nevertheless.`,
		Example: "  consumer load checkout -c 50 --duration 30s\n  consumer load checkout --rate 2000/s -o json\n" +
			"  consumer load acme --rate 2500/s --flow loud &\n" +
			"  consumer load acme --rate 1200/s --flows 50",
		Args: oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			l.key = args[0]
			if err := l.check(rate); err != nil {
				return cli.Usage(err)
			}
			rdb, err := conn.open(min(l.concurrency, loadConnections))
			if err != nil {
				return err
			}
			defer rdb.Close()
			var live io.Writer
			if progress || terminal.Of(e.Stderr, e.Environ).Rewrites() {
				live = e.Stderr
			}
			report, err := l.run(cmd.Context(), rdb, live)
			if err != nil {
				return err
			}
			if err := out.print(e.Stdout, report.text(terminal.Of(e.Stdout, e.Environ).Width()), report); err != nil {
				return err
			}
			if report.Errors > 0 && report.Errors == report.Takes {
				return fmt.Errorf("every take failed: %w", l.counts.lastError())
			}
			return nil
		},
	}
	addTokensFlag(cmd, &l.tokens, "number of tokens per take")
	addFlowFlag(cmd, &l.flow)
	cmd.Flags().Var(cli.Whole("number", &l.flows, 1, policy.MaxFlows), "flows",
		"number of flows for which takes are made in turn; for buckets that have flows")
	cmd.Flags().IntVarP(&l.concurrency, "concurrency", "c", l.concurrency,
		fmt.Sprintf("number of concurrent callers, from 1 to %d", maxLoadConcurrency))
	cmd.Flags().StringVar(
		&rate, "rate", "", "rate at which takes begin, such as 500/s or 10/m (default: as soon as callers are free)")
	cmd.Flags().DurationVar(&l.duration, "duration", l.duration, "duration of the run")
	cmd.Flags().BoolVar(&progress, "progress", false, "show progress on stderr, even if stderr is not a terminal")
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}

// check parses the rate. If an argument or flag is wrong, check returns an error that names it.
func (l *load) check(rate string) (err error) {
	if l.concurrency < 1 || l.concurrency > maxLoadConcurrency {
		return fmt.Errorf("--concurrency %d: want 1 to %d", l.concurrency, maxLoadConcurrency)
	}
	if l.duration <= 0 {
		return fmt.Errorf("--duration %s: want more than 0", l.duration)
	}
	if l.flow != "" && l.flows > 0 {
		return errors.New("--flow and --flows can't be used together")
	}
	if err := lua.CheckKey(l.key); err != nil {
		return err
	}
	if rate == "" {
		return nil
	}
	l.rate, err = policy.ParseRate(rate)
	if err != nil {
		return fmt.Errorf("--rate: %w", err)
	}
	return nil
}

// run runs the callers until the duration is over or ctx ends. It waits for takes that have begun, so that every token
// taken is counted. It writes progress to live, unless live is nil.
func (l *load) run(ctx context.Context, rdb redis.UniversalClient, live io.Writer) (report, error) {
	client, err := fetch.New(rdb, fetch.WithTimeout(callDeadline), fetch.WithConcurrency(l.concurrency))
	if err != nil {
		return report{}, err
	}
	defer closeClient(client)
	l.byFlow = newLoadByFlow(l.flow, l.flows)
	connecting, cancel := context.WithTimeout(ctx, callDeadline)
	err = client.Ready(connecting)
	cancel()
	if err != nil {
		return report{}, err
	}
	began := time.Now()
	before, err := l.peek(ctx, client, rdb)
	if err != nil {
		return report{}, err
	}

	running, stop := context.WithTimeout(ctx, l.duration)
	defer stop()
	start := time.Now()
	var background sync.WaitGroup
	progressing, done := context.WithCancel(context.WithoutCancel(ctx))
	defer done()
	if live != nil {
		background.Go(func() { l.showProgress(progressing, live, start) })
	}
	gaps := longestGap{last: before.Last}
	background.Go(func() { l.watchGaps(progressing, rdb, &gaps) })
	var callers sync.WaitGroup
	var begun atomic.Int64
	for i := range l.concurrency {
		callers.Go(func() { l.take(running, client, i, start, &begun) })
	}
	callers.Wait()
	end := time.Now()
	done()
	background.Wait()

	r := l.report(end.Sub(start))
	r.Interrupted = ctx.Err() != nil
	after, err := l.peek(context.WithoutCancel(ctx), client, rdb)
	switch {
	case err != nil:
		r.BoundUnknown = "the bucket can no longer be read: " + err.Error()
	case before.Terms == nil || after.Terms == nil:
		r.BoundUnknown = "the bucket has no policy"
	case before.Terms.Fence != after.Terms.Fence && *before.Terms != *after.Terms:
		r.BoundUnknown = "the policy changed during the run"
	default:
		gaps.refilled(after.Last)
		r.setBound(before, end.Sub(began), gaps.longest)
	}
	return r, nil
}

// peek reads the bucket with its policy, which the SDK's Peek doesn't return. It calls the SDK's Peek first. That call
// doesn't wait on a socket after the end of ctx, and it returns the same errors as the other commands. Two kinds of
// buckets have no policy in Redis: a lazy bucket of a template, and a template's bucket before its first take.
func (l *load) peek(ctx context.Context, client *fetch.Client, rdb redis.UniversalClient) (lua.PeekReply, error) {
	if _, err := client.Peek(ctx, l.key); err != nil {
		return lua.PeekReply{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, callDeadline)
	defer cancel()
	p, err := lua.Peek(ctx, rdb, l.key, 1)
	if errors.Is(err, lua.ErrUnknownBucket) {
		err = nil
	}
	return p, err
}

// take makes takes until ctx ends, one after the other. run calls it for each caller. begun counts the takes that all
// callers have begun.
func (l *load) take(ctx context.Context, client *fetch.Client, caller int, start time.Time, begun *atomic.Int64) {
	for ctx.Err() == nil {
		from, turn := time.Now(), begun.Add(1)-1
		if l.rate.Tokens > 0 {
			after := float64(turn) * float64(l.rate.Per) / float64(l.rate.Tokens)
			if after > float64(l.duration) { // it may also exceed the range of a time.Duration
				<-ctx.Done()
				return
			}
			from = start.Add(time.Duration(after))
			if !timing.Sleep(ctx.Done(), time.Until(from)) {
				return
			}
		}
		r, err := client.Take(context.WithoutCancel(ctx), l.key, l.tokens, l.byFlow.options(turn)...)
		l.byFlow.add(turn, r)
		l.counts.add(caller, r, err, time.Since(from))
		if err != nil && !timing.Sleep(ctx.Done(), errorPause) {
			return
		}
	}
}

// longestGap has the longest time that may have passed between two refills. The time of the last refill is only read at
// intervals, so some refills may be missed.
type longestGap struct {
	last    int64 // the time of the last refill that was read, in µs on Redis' clock
	longest time.Duration
}

// refilled records the time of a refill.
func (g *longestGap) refilled(at int64) {
	g.longest = max(g.longest, micro(at-g.last))
	g.last = at
}

// watchGaps reads the time of the bucket's last refill repeatedly until ctx ends. If a reading fails, the gap appears
// longer than it is. The computed bound is then too high, never too low.
func (l *load) watchGaps(ctx context.Context, rdb redis.UniversalClient, gaps *longestGap) {
	for timing.Sleep(ctx.Done(), gapSample) {
		if p, err := lua.Peek(ctx, rdb, l.key, 1); err == nil {
			gaps.refilled(p.Last)
		}
	}
}

// showProgress writes a line about the takes so far to w every second until ctx ends.
func (l *load) showProgress(ctx context.Context, w io.Writer, start time.Time) {
	ticker := time.NewTicker(progressEvery)
	defer ticker.Stop()
	var last int64
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		s := l.counts.snapshot()
		text := fmt.Sprintf("%d takes/s  admitted %d  denied %d  errors %d  redis p99 %s", s.takes-last,
			s.redis.admitted+s.memory.admitted, s.redis.denied+s.memory.denied, s.errors,
			micros(s.redis.latency.ValueAtQuantile(99)))
		const indent = 7
		lines := terminal.Wrap(text, max(0, terminal.Of(w, nil).Width()-indent))
		fmt.Fprintf(w, "%4.0fs  %s\n", time.Since(start).Seconds(), strings.Join(lines, "\n"+strings.Repeat(" ", indent)))
		last = s.takes
	}
}
