package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/mattn/go-isatty"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/dev"
)

func devCommand(e env) *cobra.Command {
	var mode, url string
	var endpoints []string
	var killEvery, duration time.Duration
	regions := dev.RegionOptions{}
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run everything here, with nothing installed: servers, three replicas, sample buckets, a consumer",
		Long: "Run a playground: an embedded store that speaks Redis, an embedded etcd, three replicas as processes of their own,\n" +
			"sample buckets and a demo consumer. It prints where everything is and what to try, then how it stands once a second.\n" +
			"Ctrl-C ends it and leaves nothing behind.\n\n" +
			"With --regions it runs several regions instead, each with a store and replicas of its own, that share one pool: demand\n" +
			"shifts from one to the next, and shares follow. --cut shows what a region gets that is cut off.\n\n" +
			"A Redis that is given keeps the sample buckets: checkout, mail, llm-tokens, digest and daily-report.",
		Example: "  refiller dev\n  refiller dev --mode race --kill-leader-every 5s\n  refiller dev --regions eu,us,ap --cut us --cut-after 10s\n  refiller dev --redis redis://127.0.0.1:6379/9 --etcd http://127.0.0.1:2379",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			// A terminal that closes, and a reader of the output that goes away, end the playground as Ctrl-C does.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGPIPE)
			defer stop()
			terminal, color := isTerminal(e.stdout) && e.environ["TERM"] != "dumb", e.environ["NO_COLOR"] == ""
			if err := regionsAlone(cmd); err != nil {
				return err
			}
			if cmd.Flags().Changed("regions") {
				regions.Program, regions.Environ, regions.Duration = program, os.Environ(), duration
				regions.Out, regions.Terminal, regions.Color = e.stdout, terminal, color
				return asUsage(dev.RunRegions(ctx, regions))
			}
			o := dev.Options{
				Program: program, Environ: os.Environ(), Redis: url, Etcd: endpoints, KillEvery: killEvery, Duration: duration,
				Out: e.stdout, Terminal: terminal, Color: color,
			}
			switch mode {
			case "etcd":
				o.Mode = config.ModeEtcd
			case "race":
				o.Mode = config.ModeRace
			default:
				return usageError{fmt.Errorf("--mode %q: want etcd or race", mode)}
			}
			return asUsage(dev.Run(ctx, o))
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "etcd", "etcd (a leader refills) or race (whoever comes first does)")
	cmd.Flags().StringVar(&url, "redis", "", "URL of a Redis to use instead of the embedded store")
	cmd.Flags().StringSliceVar(&endpoints, "etcd", nil, "endpoints of an etcd to use instead of the embedded one")
	cmd.Flags().DurationVar(&killEvery, "kill-leader-every", 0, "how often to kill the replica that refills, and measure the gap; "+dev.MinKillEvery.String()+" or more, 0 for never")
	cmd.Flags().DurationVar(&duration, "duration", 0, "how long to run; 0 until Ctrl-C")
	cmd.Flags().StringSliceVar(&regions.Regions, "regions", nil, "run these regions, such as eu,us,ap, which share one pool, instead")
	cmd.Flags().StringVar(&regions.Cut, "cut", "", "region to cut off from etcd and the others")
	cmd.Flags().DurationVar(&regions.CutAfter, "cut-after", 10*time.Second, "when to cut it off")
	cmd.Flags().DurationVar(&regions.CutFor, "cut-for", 30*time.Second, "for how long; 0 for good")
	return cmd
}

// regionsAlone refuses flags of the other kind of playground.
func regionsAlone(cmd *cobra.Command) error {
	with := cmd.Flags().Changed("regions")
	others := []string{"cut", "cut-after", "cut-for"}
	if with {
		others = []string{"mode", "redis", "etcd", "kill-leader-every"}
	}
	for _, name := range others {
		switch {
		case !cmd.Flags().Changed(name):
		case with:
			return usageError{fmt.Errorf("--%s doesn't go with --regions", name)}
		default:
			return usageError{fmt.Errorf("--%s goes with --regions", name)}
		}
	}
	return nil
}

// asUsage marks an error about options as wrong usage.
func asUsage(err error) error {
	if errors.Is(err, dev.ErrOptions) {
		return usageError{err}
	}
	return err
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
