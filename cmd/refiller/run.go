package main

import (
	"context"
	"errors"
	"sync"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/build"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/history"
	"github.com/tokenrefill/refiller/internal/redisconn"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/refill"
)

func runCommand(e env) *cobra.Command {
	conn := connection{env: e}
	var identity, record string
	var inEtcd bool
	cmd := &cobra.Command{
		Use:   "run --config FILE",
		Short: "Run one replica",
		Long: "Run one refiller replica until SIGINT or SIGTERM. Any number of replicas may run beside each other.\n" +
			"A flag beats the environment (REFILLER_ variables), which beats the file.\n\n" +
			"A change of the file is put in force while running, within a second; SIGHUP has it read again too. Buckets, policies,\n" +
			"version and log level change at once, the rest at the next start. A file with a problem, with a lower version, or with\n" +
			"another policy under the same version is refused and reported (log, /status, /metrics): the old one stays in force.\n\n" +
			"With --config-etcd a document at <election.prefix>/config in etcd (with pools, /regions/<region>/config) changes all replicas at\n" +
			"once: its version, buckets, pools and refill_interval stand instead of the file's if its version is above the file's.",
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if conn.path == "" {
				return usageError{errors.New("run: which configuration? give --config FILE")}
			}
			source := configSource{Source: config.Source{Path: conn.path, Env: e.environ, Flags: conn.laid}}
			cfg, err := source.load()
			if err != nil {
				return err
			}
			log := newLogger(e, cfg.Log)
			redisconn.SetLogger(log.Named("redis"))
			if identity == "" {
				identity = e.environ["REFILLER_IDENTITY"]
			}
			if inEtcd {
				closeEtcd, err := source.follow(cfg, log.Named("reload"))
				if err != nil {
					return err
				}
				defer func() { _ = closeEtcd() }() // it was only read
			}
			reloads, err := newReloader(conn.path, source.shared, log.Named("reload"))
			if err != nil {
				return err
			}
			defer reloads.close()
			asked := make(chan string, 1)
			cfg, wrong, err := source.first(cmd.Context()) // once more: the file is watched now
			if err != nil {
				return err
			}
			if wrong != nil {
				log.Warn("starting with the file alone", "error", wrong)
				asked <- "start" // reports it
			}
			options := replica.Options{Identity: identity, Build: build.Version(), Logger: log, Load: source.load, Reload: asked}
			if record != "" {
				w, openErr := history.Open(record)
				if openErr != nil {
					return openErr
				}
				defer func() { err = errors.Join(err, w.Close()) }()
				options.Observe = func(e refill.Event) { w.Add(history.OfEvent(e)) }
			}
			r, err := replica.New(cfg, options)
			if err != nil {
				return err
			}
			ctx, stop := context.WithCancel(cmd.Context())
			var wg sync.WaitGroup
			wg.Go(func() { reloads.run(ctx, asked) })
			err = r.Run(ctx)
			stop()
			wg.Wait()
			return err
		},
	}
	conn.addFlags(cmd, "region", "redis", "election", "etcd", "pool-registry", "listen", "log")
	cmd.Flags().Lookup("config").Usage = "configuration file (required)"
	cmd.Flags().StringVar(&identity, "identity", "", "name of this replica (default: host name and process number; $REFILLER_IDENTITY)")
	cmd.Flags().StringVar(&record, "history", "", "file to append every refill call and its answer to, as JSON lines (some 500 bytes a call; never rotated)")
	cmd.Flags().BoolVar(&inEtcd, "config-etcd", false, "follow a document in etcd too, at the config key below election.prefix")
	return cmd
}

func newLogger(e env, l config.Log) hclog.Logger {
	return hclog.New(&hclog.LoggerOptions{
		Name: "refiller", Output: e.stderr, Level: hclog.LevelFromString(l.Level), JSONFormat: l.JSON,
	})
}
