package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/operate/drift"
)

// diffTimeout bounds a comparison. A comparison reads every bucket.
const diffTimeout = 2 * time.Minute

// errDifferent ends a command that has written differences to stdout.
var errDifferent = errors.New("there are differences")

func diffCommand(e env) *cobra.Command {
	var output, shared string
	conn := connection{env: e}
	cmd := &cobra.Command{
		Use:   "diff FILE|-",
		Short: "Show what a configuration file would change",
		Long: `Compare a configuration file with the policies in force in the Redis and the etcd that it names. The command
writes nothing. Use it to review a change before you roll it out. If FILE is -, it reads stdin.

The output lists each bucket, template or pool that differs. It is added (+), changed (~), removed (-) or in conflict
(!). In a conflict, the file has another policy, but its version is not higher than the one in force. Replicas would
ignore such a policy.

The exit code is 0 if nothing would change, 3 if something would change, 2 if the file is invalid, and 1 if Redis or
etcd can't be read.

With --shared DOC, the fields of the document DOC replace those of the file if the version of DOC is higher. The
command "run --config-etcd" does the same with the document in etcd.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := loadFile(e, args[0], shared, conn.fromFlags)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), diffTimeout)
			defer cancel()
			report, err := compare(ctx, cfg)
			if err != nil {
				return err
			}
			if output == "json" {
				err = cli.WriteJSON(e.Stdout, report, "")
			} else {
				err = writeDiff(e.Stdout, report)
			}
			if err == nil && len(report.Changes) > 0 {
				err = errDifferent
			}
			return err
		},
	}
	conn.addServerFlags(cmd, "redis", "etcd", "pool-registry")
	cmd.Flags().StringVar(&shared, "shared", "", sharedUsage)
	cli.OutputFlag(cmd, &output)
	return cmd
}

// compare compares a configuration with the policies in force in the Redis and etcd that it names.
func compare(ctx context.Context, cfg config.Config) (drift.Report, error) {
	rdb, err := redisconn.Open(cfg.Redis)
	if err != nil {
		return drift.Report{}, err
	}
	defer func() { _ = rdb.Close() }() // nothing is written to Redis, so the error doesn't matter
	var etcd *clientv3.Client
	if cfg.Pooled() {
		etcd, err = etcdconn.Open(cfg.PoolRegistry.Options)
		if err != nil {
			return drift.Report{}, err
		}
		defer func() { _ = etcd.Close() }() // nothing is written to etcd, so the error doesn't matter
	}
	return drift.Read(ctx, cfg, rdb, etcd)
}

// writeDiff writes the changes, or "no change" if there are none. The other lines of the report follow.
func writeDiff(w io.Writer, r drift.Report) error {
	text := describeChanges(r.Changes)
	if len(r.Changes) == 0 {
		text = "no change\n"
	}
	for _, n := range r.Notes {
		text += fmt.Sprintf("note: %s\n", n)
	}
	_, err := io.WriteString(w, text)
	return err
}

// describeChanges returns a line for each change and a line for each of its fields. A change of a version has no lines
// for fields.
func describeChanges(changes []drift.Change) string {
	var b strings.Builder
	signs := map[string]string{drift.Added: "+", drift.Changed: "~", drift.Removed: "-", drift.Conflict: "!"}
	for _, c := range changes {
		fmt.Fprintf(&b, "%s %s", signs[c.Change], c.What)
		if c.What == "version" || c.What == "pools_version" {
			fmt.Fprintf(&b, " %s → %s", c.Fields[0].InForce, c.Fields[0].File)
			c.Fields = nil
		} else {
			fmt.Fprintf(&b, " %q %s", c.Name, c.Change)
		}
		if c.Change == drift.Removed && c.What == "bucket" {
			b.WriteString(": consumers can use it until you delete it (refiller delete)")
		}
		if c.Change == drift.Conflict {
			fmt.Fprintf(&b, ": replicas would ignore it, because version %d is in force: raise the version", c.Version)
		}
		b.WriteByte('\n')
		for _, f := range c.Fields {
			fmt.Fprintf(&b, "    %s: %s → %s\n", f.Field, orNone(f.InForce), orNone(f.File))
		}
	}
	return b.String()
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}
