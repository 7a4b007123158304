package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/etcdconn"
	"github.com/tokenrefill/refiller/pool"
)

func poolCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Look at the pools that regions share, and operate them",
		Args:  usageArgs(cli.UnknownCommand),
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("pool: which command? status, fence or lift")}
		},
	}
	cmd.AddCommand(poolStatusCommand(e), poolFenceCommand(e), poolLiftCommand(e))
	return cmd
}

// pools is how a command reaches the pools in etcd.
type pools struct{ connection }

func (p *pools) flags(cmd *cobra.Command) { p.addFlags(cmd, "etcd", "pool-registry") }

// open connects to the pools' etcd.
func (p *pools) open() (*clientv3.Client, config.Config, error) {
	cfg, err := p.load()
	if err != nil {
		return nil, cfg, err
	}
	if len(cfg.PoolRegistry.Endpoints) == 0 {
		return nil, cfg, usageError{errors.New("where is etcd? give --config FILE or --etcd HOST:PORT")}
	}
	if o := p.laid; cfg.RegistryApart() && slices.ContainsFunc(o, func(o config.Override) bool { return strings.HasPrefix(o.Field, "election.") }) {
		return nil, cfg, usageError{errors.New("the pools have an etcd of their own: give --pool-registry, not --etcd")}
	}
	client, err := etcdconn.Open(cfg.PoolRegistry.Options)
	return client, cfg, err
}

// whereEtcdIs adds to an error for want of time, which says nothing else, where etcd was looked for.
func whereEtcdIs(err error, cfg config.Config) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("etcd at %s does not answer: %w", strings.Join(cfg.PoolRegistry.Endpoints, ","), err)
	}
	return err
}

func poolStatusCommand(e env) *cobra.Command {
	p := pools{connection{env: e}}
	var d display
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Tell how the regions share each pool, and who coordinates",
		Long: "Read the pools from etcd: what each region was granted, its floor and demand, what it may be using at most (claimed),\n" +
			"and its last report. Ages compare the clock of the region's Redis with the one here.",
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := d.validate(); err != nil {
				return err
			}
			client, cfg, err := p.open()
			if err != nil {
				return err
			}
			defer func() { _ = client.Close() }() // it has answered or not
			return d.show(cmd.Context(), e.stdout, func(ctx context.Context, w io.Writer) error {
				return whereEtcdIs(showPools(ctx, w, client, cfg.PoolsPrefix(), d.output), cfg)
			})
		},
	}
	p.flags(cmd)
	d.flags(cmd)
	return cmd
}

// showPools reads the pools and writes how they stand.
func showPools(ctx context.Context, w io.Writer, client *clientv3.Client, prefix, output string) error {
	ctx, cancel := context.WithTimeout(ctx, operateTimeout)
	defer cancel()
	s, err := pool.ReadStatus(ctx, client, prefix)
	if err != nil {
		return err
	}
	leader, err := leaderOf(ctx, client, prefix)
	if err != nil && !errors.Is(err, election.ErrNoLeader) {
		return err
	}
	answer := poolAnswer{Coordinator: leader.Identity, Epoch: leader.Epoch, Status: s}
	if output == "json" {
		return json.NewEncoder(w).Encode(answer)
	}
	return answer.write(w, time.Now())
}

// poolAnswer is what pool status tells.
type poolAnswer struct {
	Coordinator string `json:"coordinator"` // empty: nobody
	Epoch       int64  `json:"epoch"`
	pool.Status
}

func (a poolAnswer) write(w io.Writer, now time.Time) error {
	coordinator := "nobody: shares stay as they are, and grants end"
	if a.Coordinator != "" {
		coordinator = fmt.Sprintf("%s, epoch %d", a.Coordinator, a.Epoch)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "coordinator\t%s\npools\tversion %d\n", coordinator, a.Version)
	for _, p := range a.Pools {
		claimed := 0.0
		for _, r := range p.Regions {
			claimed += r.Claimed
		}
		rate := p.Rate + ", capacity " + fmt.Sprint(p.Capacity)
		if p.Rate == "" {
			rate = "no longer configured"
		}
		fmt.Fprintf(t, "\n%s\t%s; at most %s in use\n", p.Name, rate, perSecond(claimed))
		fmt.Fprintln(t, "REGION\tSHARE\tFLOOR\tDEMAND\tCLAIMED\tTOKENS\tGRANT AGE\tENDS IN\tLAST REPORT\t")
		for _, r := range p.Regions {
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%d/%d\t%s\t%s\t%s\t%s\n", r.Region, perSecond(r.Granted), perSecond(r.Floor), perSecond(r.Demand),
				perSecond(r.Claimed), r.Tokens, r.Capacity, seconds(r.Age), seconds(r.Remaining), reported(r, now), note(r))
		}
	}
	if len(a.Pools) == 0 {
		fmt.Fprintln(t, "\nno pools")
	}
	return t.Flush()
}

// note is what is special about a region.
func note(r pool.RegionStatus) string {
	switch {
	case r.Fenced != nil:
		return fmt.Sprintf("fenced by %s at %s: %s", r.Fenced.Operator, r.Fenced.At.UTC().Format(time.DateTime), r.Fenced.Reason)
	case !r.Configured:
		return "leaving"
	case !r.Reported:
		return "has never reported"
	case !r.Applied:
		return "has yet to acknowledge"
	case r.Remaining == 0:
		return "on its floor"
	}
	return ""
}

func perSecond(rate float64) string { return fmt.Sprintf("%.4g/s", rate) }

func seconds(s float64) string {
	if s == 0 {
		return "–"
	}
	return fmt.Sprintf("%.1f s", s)
}

func reported(r pool.RegionStatus, now time.Time) string {
	if r.At.IsZero() {
		return "never"
	}
	return fmt.Sprintf("%.1f s ago", max(0, now.Sub(r.At).Seconds()))
}

// errUnconfirmed is returned when an operator doesn't confirm.
var errUnconfirmed = errors.New("not confirmed: nothing was changed")

// alive is how old a report may be of a region that seems to be alive.
const alive = 10 * time.Second

func poolFenceCommand(e env) *cobra.Command {
	p := pools{connection{env: e}}
	var yes bool
	var reason string
	cmd := &cobra.Command{
		Use:   "fence REGION",
		Short: "Declare that a region uses nothing of any pool, so that others get its share and floor at once",
		Long: "Declare that a region uses nothing of any pool. What it had, its floors too, is free for the others at once, and it is\n" +
			"granted nothing until \"pool lift\". This is for a region whose Redis is gone for good, or known to be down: if its\n" +
			"consumers take on, the pools' rates are exceeded by what it had.",
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.act(cmd, "pool fence", args[0], reason, func(ctx context.Context, client *clientv3.Client, prefix string) error {
				s, err := pool.ReadStatus(ctx, client, prefix)
				if err != nil {
					return err
				}
				if err := warn(e.stderr, s, args[0], time.Now()); err != nil {
					return err
				}
				if !yes {
					fmt.Fprintf(e.stderr, "Type the region's name to fence it: ")
					answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n') // what there is counts
					if strings.TrimSpace(answer) != args[0] {
						return errUnconfirmed
					}
				}
				ctx, cancel := context.WithTimeout(cmd.Context(), operateTimeout) // people think for as long as they like
				defer cancel()
				return pool.Fence(ctx, client, prefix, args[0], pool.Fencing{Operator: operator(), Reason: reason, At: time.Now().UTC()})
			})
		},
	}
	p.flags(cmd)
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "don't ask for confirmation")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the audit line and for whoever looks at the status")
	return cmd
}

func poolLiftCommand(e env) *cobra.Command {
	p := pools{connection{env: e}}
	var reason string
	cmd := &cobra.Command{
		Use:   "lift REGION",
		Short: "End a region's fence",
		Args:  usageArgs(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return p.act(cmd, "pool lift", args[0], reason, func(ctx context.Context, client *clientv3.Client, prefix string) error {
				return pool.Lift(ctx, client, prefix, args[0])
			})
		},
	}
	p.flags(cmd)
	cmd.Flags().StringVar(&reason, "reason", "", "why, for the audit line")
	return cmd
}

// act does something with a region, and writes an audit line to the log.
func (p *pools) act(cmd *cobra.Command, action, region, reason string, do func(context.Context, *clientv3.Client, string) error) error {
	client, cfg, err := p.open()
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }() // the action is done or has failed
	ctx, cancel := context.WithTimeout(cmd.Context(), operateTimeout)
	defer cancel()
	err = whereEtcdIs(do(ctx, client, cfg.PoolsPrefix()), cfg)
	log := newLogger(p.env, config.Log{Level: "info"}).Named("audit")
	fields := []any{"action", action, "region", region, "operator", operator(), "reason", reason,
		"etcd", strings.Join(cfg.PoolRegistry.Endpoints, ","), "prefix", cfg.PoolsPrefix()}
	var usage usageError
	switch {
	case errors.As(err, &usage):
		return err
	case err != nil:
		log.Error("operator action failed", append(fields, "error", err)...)
		return err
	}
	log.Info("operator action", fields...)
	_, err = fmt.Fprintf(p.stdout, "%s: done for %s\n", action, region)
	return err
}

// warn tells what fencing a region sets free.
func warn(w io.Writer, s pool.Status, region string, now time.Time) error {
	var known []string
	found, last := false, time.Time{}
	for _, p := range s.Pools {
		for _, r := range p.Regions {
			if !slices.Contains(known, r.Region) {
				known = append(known, r.Region)
			}
			if r.Region != region {
				continue
			}
			found = true
			if r.At.After(last) {
				last = r.At
			}
			fmt.Fprintf(w, "%s may be using %s of %s in %s.\n", region, perSecond(r.Claimed), p.Rate, p.Name)
		}
	}
	if !found {
		slices.Sort(known)
		return usageError{fmt.Errorf("region %q is in no pool: regions are %s", region, strings.Join(known, ", "))}
	}
	if age := now.Sub(last); age < alive {
		fmt.Fprintf(w, "CAUTION: its last report is %.1f s old, so it seems to be alive. What its consumers take on would come on top of the pools' rates.\n", age.Seconds())
	}
	return nil
}
