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
		Short: "Run a playground: embedded servers, three replicas, sample buckets and a consumer",
		Long: `Run a playground on this machine: an embedded store that speaks the Redis protocol, an embedded etcd, three
replicas as separate processes, sample buckets and a demo consumer. The command prints the addresses and some commands
to try. Then it shows the state once a second. Ctrl-C stops everything and removes its files.

With --flows, one loud user and ten quiet users send the same requests to two buckets. Only one bucket has flows. In
that bucket the quiet users get all tokens that they ask for.

With --regions, the command runs several regions that share one pool. Each region has its own store and replicas. The
demand moves from one region to the next, and the shares of the pool follow. With --cut, one region is cut off, and
you see which rate it still gets.

With --redis, the buckets stay in that Redis after the run. They are checkout, mail, llm-tokens, digest and
daily-report. With --flows, they are the buckets in-order and divided instead.`,
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
			// If the terminal is closed or the reader of the output ends, the playground ends as it does after Ctrl-C.
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
	cmd.Flags().StringVar(&mode, "mode", "etcd",
		"election mode: etcd (a leader refills) or race (the first replica refills)")
	cmd.Flags().StringVar(&o.Redis, "redis", "", "URL of a Redis to use instead of the embedded store")
	cmd.Flags().StringSliceVar(&o.Etcd, "etcd", nil,
		"etcd addresses to use instead of the embedded etcd, separated by commas")
	cmd.Flags().DurationVar(&o.KillEvery, "kill-leader-every", 0,
		"interval at which the replica that refills is killed, "+dev.MinKillEvery.String()+
			" or more, or 0 for never; the gap between refills at each kill is measured")
	cmd.Flags().DurationVar(&o.Duration, "duration", 0, "length of the run; 0 means until Ctrl-C")
	cmd.Flags().BoolVar(&o.Flows, "flows", false,
		"show how flows protect quiet users from a loud one, instead of the sample buckets")
	cmd.Flags().StringSliceVar(&o.Regions, "regions", nil,
		"names of regions to run, separated by commas, such as eu,us,ap; they share one pool")
	cmd.Flags().StringVar(&o.Cut, "cut", "", "region to cut off from etcd and the other regions; requires --regions")
	cmd.Flags().DurationVar(&o.CutAfter, "cut-after", 10*time.Second, "time from the start until the region is cut off")
	cmd.Flags().DurationVar(&o.CutFor, "cut-for", 30*time.Second, "length of the cut; 0 means until the end of the run")
	return cmd
}

// goRun reports whether go run started a program. go run puts programs into a temporary directory or the build cache.
func goRun(program, cache string) bool {
	built := func(dir string) bool { return strings.HasPrefix(dir, "go-build") }
	return slices.ContainsFunc(strings.Split(filepath.ToSlash(program), "/"), built) ||
		cache != "" && strings.HasPrefix(program, filepath.Clean(cache)+string(filepath.Separator))
}

// checkKind checks that the flags can be combined. Some flags require --regions, and others can't be used with it.
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
			return cli.Usage(fmt.Errorf("--%s can't be used with --regions", name))
		default:
			return cli.Usage(fmt.Errorf("--%s requires --regions", name))
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
