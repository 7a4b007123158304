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
	"github.com/tokenrefill/refiller/internal/redisconn"
)

func devCommand(e env) *cobra.Command {
	var mode, url string
	var endpoints []string
	var killEvery, duration time.Duration
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run everything here, with nothing installed: servers, three replicas, sample buckets, a consumer",
		Long: "Run a playground: an embedded store that speaks Redis, an embedded etcd, three replicas as processes of their own,\n" +
			"sample buckets and a demo consumer. It prints where everything is and what to try, then how it stands once a second.\n" +
			"Ctrl-C ends it and leaves nothing behind.\n\n" +
			"A Redis that is given keeps the sample buckets: checkout, mail, llm-tokens, digest and daily-report.",
		Example: "  refiller dev\n  refiller dev --mode race --kill-leader-every 5s\n  refiller dev --redis redis://127.0.0.1:6379/9 --etcd http://127.0.0.1:2379",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			program, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			o := dev.Options{
				Program: program, Environ: os.Environ(), Redis: url, Etcd: endpoints, KillEvery: killEvery, Duration: duration,
				Out: e.stdout, Terminal: isTerminal(e.stdout) && e.getenv("TERM") != "dumb", Color: e.getenv("NO_COLOR") == "",
			}
			switch mode {
			case "etcd":
				o.Mode = config.ModeEtcd
			case "race":
				o.Mode = config.ModeRace
			default:
				return usageError{fmt.Errorf("--mode %q: want etcd or race", mode)}
			}
			redisconn.SetLogger(nil) // what matters comes back as errors
			// A terminal that closes, and a reader of the output that goes away, end the playground as Ctrl-C does.
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGHUP, syscall.SIGPIPE)
			defer stop()
			err = dev.Run(ctx, o)
			if errors.Is(err, dev.ErrOptions) {
				return usageError{err}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&mode, "mode", "etcd", "etcd (a leader refills) or race (whoever comes first does)")
	cmd.Flags().StringVar(&url, "redis", "", "URL of a Redis to use instead of the embedded store")
	cmd.Flags().StringSliceVar(&endpoints, "etcd", nil, "endpoints of an etcd to use instead of the embedded one")
	cmd.Flags().DurationVar(&killEvery, "kill-leader-every", 0, "how often to kill the replica that refills, and measure the gap; "+dev.MinKillEvery.String()+" or more, 0 for never")
	cmd.Flags().DurationVar(&duration, "duration", 0, "how long to run; 0 until Ctrl-C")
	return cmd
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd())
}
