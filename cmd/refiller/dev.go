package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/dev"
)

func devCommand(e env) *cobra.Command {
	var mode string
	var o dev.Options
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run everything here, with nothing installed: servers, three replicas, sample buckets, a consumer",
		Long: `Run a playground: an embedded store that speaks Redis, an embedded etcd, three replicas as processes of their
own, sample buckets and a demo consumer. It prints where everything is and what to try, then the state once a
second. Ctrl-C ends it and leaves nothing behind.

With --flows one loud user and ten quiet ones ask two buckets for the same. One of them has flows: there the quiet ones
get what they ask for.

With --regions it runs several regions instead, each with a store and replicas of its own, that share one pool: demand
shifts from one to the next, and shares follow. --cut cuts one region off, and shows what it still gets.

A Redis that is given keeps the sample buckets: checkout, mail, llm-tokens, digest and daily-report, or with --flows
in-order and divided.`,
		Example: `  refiller dev
  refiller dev --mode race --kill-leader-every 5s
  refiller dev --flows
  refiller dev --regions eu,us,ap --cut us --cut-after 10s
  refiller dev --redis redis://127.0.0.1:6379/9 --etcd http://127.0.0.1:2379`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			// The playground ends as after Ctrl-C if the terminal is closed or the reader of its output ends.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGPIPE)
			defer stop()
			if err := checkKind(cmd); err != nil {
				return err
			}
			o.Program = program
			o.GoRun = goRun(program, e.Environ["GOCACHE"])
			o.Environ = os.Environ()
			o.Out, o.Screen = e.Stdout, terminal.Of(e.Stdout, e.Environ)
			switch mode {
			case "etcd":
				o.Mode = config.ModeEtcd
			case "race":
				o.Mode = config.ModeRace
			default:
				return cli.Usage(fmt.Errorf("--mode %q: want etcd or race", mode))
			}
			return asUsage(dev.Run(ctx, o))
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "etcd", "etcd (a leader refills) or race (the first replica does)")
	cmd.Flags().StringVar(&o.Redis, "redis", "", "URL of a Redis to use instead of the embedded store")
	cmd.Flags().StringSliceVar(&o.Etcd, "etcd", nil, "endpoints of an etcd to use instead of the embedded one")
	cmd.Flags().DurationVar(&o.KillEvery, "kill-leader-every", 0,
		"how often to kill the replica that refills, and measure the gap; "+dev.MinKillEvery.String()+" or more, 0 for never")
	cmd.Flags().DurationVar(&o.Duration, "duration", 0, "how long to run; 0 until Ctrl-C")
	cmd.Flags().BoolVar(&o.Flows, "flows", false, "show a loud user and quiet ones, with flows and without, instead")
	cmd.Flags().StringSliceVar(&o.Regions, "regions", nil,
		"run these regions, such as eu,us,ap, which share one pool, instead")
	cmd.Flags().StringVar(&o.Cut, "cut", "", "region to cut off from etcd and the others")
	cmd.Flags().DurationVar(&o.CutAfter, "cut-after", 10*time.Second, "when to cut it off")
	cmd.Flags().DurationVar(&o.CutFor, "cut-for", 30*time.Second, "for how long; 0 for good")
	return cmd
}

// goRun reports whether go run started a program. go run puts programs into a temporary directory or the build cache.
func goRun(program, cache string) bool {
	built := func(dir string) bool { return strings.HasPrefix(dir, "go-build") }
	return slices.ContainsFunc(strings.Split(filepath.ToSlash(program), "/"), built) ||
		cache != "" && strings.HasPrefix(program, filepath.Clean(cache)+string(filepath.Separator))
}

// checkKind checks that the flags can be combined. With --regions other flags are allowed than without it.
func checkKind(cmd *cobra.Command) error {
	with := cmd.Flags().Changed("regions")
	others := []string{"cut", "cut-after", "cut-for"}
	if with {
		others = []string{"mode", "redis", "etcd", "kill-leader-every", "flows"}
	}
	for _, name := range others {
		switch {
		case !cmd.Flags().Changed(name):
		case with:
			return cli.Usage(fmt.Errorf("--%s doesn't go with --regions", name))
		default:
			return cli.Usage(fmt.Errorf("--%s goes with --regions", name))
		}
	}
	return nil
}

// asUsage marks an error about options as wrong usage, and returns other errors as they are.
func asUsage(err error) error {
	if errors.Is(err, dev.ErrOptions) {
		return cli.Usage(err)
	}
	return err
}
