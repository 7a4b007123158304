package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/filewatch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/operate/history"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/refill"
)

// maxIdentity bounds the name of a replica, in characters.
const maxIdentity = 128

// runner runs one replica. It has the values of the command line, and the resources that are opened for the replica.
type runner struct {
	connection
	identity string
	record   string // file of the history; empty if there is none
	inEtcd   bool

	source  configSource
	log     hclog.Logger
	reloads *filewatch.Reload
	asked   chan string // causes of reloads that the replica should do
	replica *replica.Replica
	history <-chan struct{} // closed when nothing is recorded any more; nil if there is no history
	opened  []func() error  // functions for close, which calls the last one first
}

func runCommand(e env) *cobra.Command {
	r := runner{connection: connection{env: e}, asked: make(chan string, 1)}
	cmd := &cobra.Command{
		Use:   "run --config FILE",
		Short: "Run a replica, which refills the buckets",
		Long: `Run one replica, which refills the buckets, until it receives SIGINT or SIGTERM. You can run any number of
replicas side by side. Environment variables (REFILLER_...) override the file, and flags override both.

The replica watches the file and applies a change within a second. SIGHUP makes it read the file, too. Changes of
buckets, policies, the version and the log level take effect at once, and other changes at the next start. The replica
refuses a file that is invalid, that has a lower version, or that has another policy under the same version. The old
configuration then stays in force, and the log, /status and /metrics report the problem.

With --config-etcd, the replica also follows a document in etcd, so that one write changes all replicas. The key of
the document is <election.prefix>/config, or with pools <election.prefix>/regions/<region>/config. If the version in
the document is above the version in the file, the fields of the document replace those of the file. Such fields are
version, pools_version, refill_interval, buckets, templates and pools.`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := r.check(); err != nil {
				return err
			}
			err := r.open(cmd)
			if err == nil {
				err = r.run(cmd.Context())
			}
			return errors.Join(err, r.close())
		},
	}
	r.addFlags(cmd)
	return cmd
}

func (r *runner) addFlags(cmd *cobra.Command) {
	r.connection.addFlags(cmd, "region", "redis", "election", "etcd", "pool-registry", "listen", "log")
	cmd.Flags().Lookup("config").Usage = "configuration file (required)"
	cmd.Flags().StringVar(&r.identity, "identity", "",
		"name of this replica, up to 128 characters (default: host name and process number) ($REFILLER_IDENTITY)")
	cmd.Flags().StringVar(&r.record, "history", "",
		"file to which each refill call and its reply are appended as JSON, about 500 bytes per call; it is never rotated")
	cmd.Flags().BoolVar(&r.inEtcd, "config-etcd", false,
		"also read a configuration document in etcd, and follow its changes")
	cli.Group(cmd, "the pool registry", "pool-registry")
	cli.Group(cmd, "logs", "history", "log-format", "log-level")
}

// check checks the command line.
func (r *runner) check() error {
	if r.path == "" {
		return cli.Usage(errors.New("run: no configuration was given: want --config FILE"))
	}
	from := "--identity"
	if r.identity == "" {
		r.identity, from = r.Environ["REFILLER_IDENTITY"], "REFILLER_IDENTITY"
	}
	n, unprintable := utf8.RuneCountInString(r.identity), func(c rune) bool { return !unicode.IsPrint(c) }
	if n > maxIdentity || !utf8.ValidString(r.identity) || strings.ContainsFunc(r.identity, unprintable) {
		return cli.Usage(fmt.Errorf("run: %s %s: want 1 to %d printable characters", from, fields.Quote(r.identity),
			maxIdentity))
	}
	return nil
}

// open reads the configuration, begins to watch its sources, and makes the replica.
func (r *runner) open(cmd *cobra.Command) error {
	r.source = configSource{Source: config.Source{Path: r.path, Env: r.Environ, Flags: r.fromFlags}}
	cfg, err := r.source.load()
	if err != nil {
		return err
	}
	r.log = cli.QueuedLogger(cmd, loggerOptions(r.env, cfg.Log))
	redisconn.SetLogger(r.log.Named("redis"))
	if r.inEtcd {
		closeEtcd, sharedErr := r.source.openShared(cfg, r.log.Named("reload"))
		if sharedErr != nil {
			return sharedErr
		}
		r.opened = append(r.opened, func() error {
			_ = closeEtcd() // nothing was written to etcd, so the error doesn't matter
			return nil
		})
	}
	r.reloads = filewatch.NewReload()
	r.opened = append(r.opened, r.reloads.Close)
	if err := r.reloads.Watch(r.path, filewatch.Options{Logger: r.log.Named("reload")}); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if shared := r.source.shared; shared != nil {
		r.reloads.Follow(shared.Name()+" changed in etcd", shared.Run)
	}
	// It is read again, because it may have changed before it was watched.
	cfg, wrong, err := r.source.loadAtStart(cmd.Context())
	if err != nil {
		return err
	}
	if wrong != nil {
		r.log.Warn("starting with the file alone", "error", wrong)
		r.asked <- "start" // makes the replica report the error
	}
	options := replica.Options{Identity: r.identity, Build: cli.Version(), Logger: r.log, Load: r.source.load,
		Reload: r.asked}
	if r.record != "" {
		w, openErr := history.Open(r.record)
		if openErr != nil {
			return openErr
		}
		r.opened, r.history = append(r.opened, w.Close), w.Failed()
		options.Observe = func(e refill.Event) { w.Add(history.OfEvent(e)) }
	}
	r.replica, err = replica.New(cfg, options)
	return err
}

// run runs the replica until ctx ends or the replica fails. It passes the causes of reloads to the replica.
func (r *runner) run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		r.reloads.Run(ctx, func(cause string) {
			select {
			case <-ctx.Done():
			case r.asked <- cause:
			}
		})
	})
	wg.Go(func() {
		select {
		case <-ctx.Done():
		case <-r.history: // close returns the error when the command ends
			r.log.Error("history can't be written: nothing is recorded any more", "file", r.record)
		}
	})
	err := r.replica.Run(ctx)
	stop()
	wg.Wait()
	return err
}

// close closes the resources that open opened.
func (r *runner) close() error {
	var errs []error
	for _, c := range slices.Backward(r.opened) {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

func loggerOptions(e env, l config.Log) hclog.LoggerOptions {
	return hclog.LoggerOptions{
		Name: "refiller", Output: e.Stderr, Level: hclog.LevelFromString(l.Level), JSONFormat: l.JSON,
	}
}

func newLogger(e env, l config.Log) hclog.Logger {
	options := loggerOptions(e, l)
	return hclog.New(&options)
}
