package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/pool"
)

// errUnconfirmed is returned if an operator doesn't confirm.
var errUnconfirmed = errors.New("not confirmed: nothing was changed")

// errNotDrained is returned if a region has not acknowledged its drain in time.
var errNotDrained = errors.New("the region has not acknowledged its drain")

// drainPace is the interval at which the pools are read during the wait for a drain.
const drainPace = 200 * time.Millisecond

// fencing is the fence or drain that an operator asks for.
type fencing struct {
	pools
	yes, drain bool
	wait       time.Duration
	reason     string
}

func poolFenceCommand(e env) *cobra.Command {
	f := fencing{pools: pools{connection: connection{env: e}}}
	cmd := &cobra.Command{
		Use:   "fence REGION",
		Short: "Exclude a region from all pools, so that other regions get its share",
		Long: `Exclude a region from all pools until "pool lift". The other regions get its shares, including its floors, at
once. Use this command for a region whose Redis was lost for good or is known to be down. If consumers of the region
still take tokens, the pools' rates are exceeded by up to the region's shares.

With --drain, the region itself gives up its shares before the other regions get them, so no rate is exceeded. Use
this to take a region out of service. The region must reach etcd to acknowledge the drain, which takes about a second.
From then on, its consumers are denied. If the region does not acknowledge the drain within the time of --wait, the
exit code is 1, and the drain stays requested.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("wait") && !f.drain {
				return cli.Usage(errors.New("--wait requires --drain"))
			}
			if f.wait < time.Second {
				return cli.Usage(fmt.Errorf("--wait %s: want 1s or more", f.wait))
			}
			return f.run(cmd, args[0])
		},
	}
	f.flags(cmd)
	cmd.Flags().BoolVarP(&f.yes, "yes", "y", false, "skip the prompt for confirmation")
	cmd.Flags().BoolVar(&f.drain, "drain", false, "let the region give up its share before the other regions get it")
	cmd.Flags().DurationVar(&f.wait, "wait", 10*time.Second,
		"time to wait for the region to acknowledge the drain, 1s or more")
	cmd.Flags().StringVar(&f.reason, "reason", "", "reason for the action, shown in the audit line and in the status")
	operatorFlag(cmd, &f.operator)
	return cmd
}

func (f *fencing) run(cmd *cobra.Command, region string) error {
	action := "pool fence"
	if f.drain {
		action += " --drain"
	}
	return f.act(cmd, action, region, f.reason, func(ctx context.Context, client *clientv3.Client, prefix string) error {
		s, err := pool.ReadLiveStatus(ctx, client, prefix, region)
		if err != nil {
			return err
		}
		width := terminal.Of(f.Stderr, f.Environ).Width()
		warnUnreadable(f.Stderr, width, s)
		if len(s.Pools) == 0 {
			return cli.Usage(fmt.Errorf("there are no pools below %s: check election.prefix and pool_registry.prefix", prefix))
		}
		if err := f.warn(f.Stderr, width, s, region); err != nil {
			return err
		}
		if !f.yes {
			fmt.Fprintf(f.Stderr, "Type the region's name to %s it: ", f.verb())
			answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n') // the last line may lack a line feed
			if strings.TrimSpace(answer) != region {
				return errUnconfirmed
			}
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), operateTimeout) // the time starts after the confirmation
		defer cancel()
		declaration := pool.Fencing{
			Operator: operatorOf(f.env, f.operator), Reason: f.reason, At: time.Now().UTC(), Drain: f.drain,
		}
		if err := pool.Fence(ctx, client, prefix, region, declaration); err != nil || !f.drain {
			return err
		}
		return f.await(cmd.Context(), client, prefix, region)
	})
}

func (f *fencing) verb() string {
	if f.drain {
		return "drain"
	}
	return "fence"
}

// warn writes how much fencing a region frees, and how it affects its consumers or the rates.
func (f *fencing) warn(w io.Writer, width int, s pool.Status, region string) error {
	write := func(text string) { _ = paragraph(w, width, text) }
	var known []string
	found, alive := false, false
	for _, p := range s.Pools {
		for _, r := range p.Regions {
			if !slices.Contains(known, r.Region) {
				known = append(known, r.Region)
			}
			if r.Region != region {
				continue
			}
			found = true
			alive = alive || r.Alive
			if !r.Known() {
				write(fmt.Sprintf("The state of %s in %s is not known. It may be using up to %s of %s, or an earlier grant until "+
					"that grant ends.",
					region, p.Name, perSecond(r.Claimed), p.Rate))
				continue
			}
			write(fmt.Sprintf("%s may be using %s of %s in %s.", region, perSecond(r.Claimed), p.Rate, p.Name))
		}
	}
	if !found {
		slices.Sort(known)
		return cli.Usage(fmt.Errorf("region %q is in no pool: want one of %s", region, strings.Join(known, ", ")))
	}
	switch {
	case f.drain && alive:
		write("When the region is drained, its consumers are denied.")
	case f.drain:
		write("CAUTION: the region is silent. It is drained only when it has read the request from etcd.")
	case alive:
		write("CAUTION: the region has just reported, so it is alive. Tokens that its consumers still take are added to " +
			"the pools' rates. With --drain, the region gives up its share first.")
	}
	return nil
}

// await waits until the region has acknowledged its drain in every pool.
func (f *fencing) await(ctx context.Context, client *clientv3.Client, prefix, region string) error {
	waiting, cancel := context.WithTimeout(ctx, f.wait)
	defer cancel()
	ticker := time.NewTicker(drainPace)
	defer ticker.Stop()
	var last pool.Status
	for {
		s, err := pool.ReadStatus(waiting, client, prefix)
		switch {
		case err == nil && len(undrained(s, region)) == 0:
			return nil
		case err == nil:
			last = s
		case waiting.Err() == nil:
			return err
		}
		select {
		case <-ticker.C:
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f.explain(undrained(last, region), region)
			return fmt.Errorf("%w within %s: %s", errNotDrained, f.wait, region)
		}
	}
}

// undrained lists the pools that the region may still be using. Each text has the rate that it may be using.
func undrained(s pool.Status, region string) (list []string) {
	for _, p := range s.Pools {
		for _, r := range p.Regions {
			if r.Region == region && !r.Idle() {
				r.Fenced, r.Alive = nil, true
				list = append(list, fmt.Sprintf("%s: at most %s in use; %s", p.Name, perSecond(r.Claimed), grant(r)))
			}
		}
	}
	return list
}

// maxListed is the largest number of pools that are listed one by one.
const maxListed = 10

// explain describes the state of a region that has not acknowledged its drain, and what an operator can do.
func (f *fencing) explain(undrained []string, region string) {
	for i, text := range undrained {
		if i == maxListed {
			fmt.Fprintf(f.Stderr, "and %d more pools\n", len(undrained)-i)
			break
		}
		fmt.Fprintln(f.Stderr, text)
	}
	fmt.Fprintf(f.Stderr, `The drain stays requested until %[1]s acknowledges it. Until then the other regions
do not get the floors of %[1]s. They get its grants when these end.
To withdraw the request, run "refiller pool lift %[1]s".
To give everything to the other regions at once, run "refiller pool fence %[1]s".
Tokens that consumers of %[1]s still take are then added to the pools' rates.
`, region)
}

func poolLiftCommand(e env) *cobra.Command {
	p := pools{connection: connection{env: e}}
	var reason string
	cmd := &cobra.Command{
		Use:   "lift REGION",
		Short: "End the fence or the drain of a region",
		Long: `End the fence or the drain of a region. The region gets its floors and shares again when the other regions
have given them up.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.act(cmd, "pool lift", args[0], reason,
				func(ctx context.Context, client *clientv3.Client, prefix string) error {
					return pool.Lift(ctx, client, prefix, args[0])
				})
		},
	}
	p.flags(cmd)
	cmd.Flags().StringVar(&reason, "reason", "", "reason for the action, shown in the audit line")
	operatorFlag(cmd, &p.operator)
	return cmd
}

// act calls do with a client of the pools' etcd and the pools' prefix. It writes an audit line about the region to the
// log, unless the error is wrong usage.
func (p *pools) act(cmd *cobra.Command, action, region, reason string,
	do func(context.Context, *clientv3.Client, string) error) error {
	client, cfg, err := p.open()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // the action is done or has failed, so the error doesn't matter
	ctx, cancel := context.WithTimeout(cmd.Context(), operateTimeout)
	defer cancel()
	err = withEtcdAddresses(do(ctx, client, cfg.PoolsPrefix()), cfg)
	log := auditLogger(p.env, cfg.Log)
	fields := []any{"action", action, "region", region, "operator", operatorOf(p.env, p.operator), "reason", reason,
		"etcd", strings.Join(cfg.PoolRegistry.Endpoints, ","), "prefix", cfg.PoolsPrefix()}
	var usage cli.UsageError
	switch {
	case errors.As(err, &usage):
		return err
	case err != nil:
		log.Error("operator action failed", append(fields, "error", err)...)
		return err
	}
	log.Info("operator action", fields...)
	_, err = fmt.Fprintf(p.Stdout, "%s: done for %s\n", action, region)
	return err
}
