package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/doctor"
	"github.com/tokenrefill/refiller/internal/etcdconn"
	"github.com/tokenrefill/refiller/internal/redisconn"
)

// examineTimeout bounds the whole examination.
const examineTimeout = 20 * time.Second

var errUnwell = errors.New("something would keep a refiller from working: see above")

func doctorCommand(e env) *cobra.Command {
	conn := connection{env: e}
	var output string
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Examine Redis and etcd, and tell what to do",
		Long: "Examine what a refiller depends on: whether Redis and etcd answer, whether scripts run with the user's rights, what\n" +
			"evicts or forgets buckets, and whether the clock is sane. It also prints the rights that a Redis user needs. The exit\n" +
			"code is 0, or 1 if something would keep a refiller from working. It writes one bucket, refiller:doctor, and deletes it\n" +
			"if it may.",
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			cfg, err := conn.load()
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), examineTimeout)
			defer cancel()
			rdb, err := redisconn.Open(cfg.Redis)
			if err != nil {
				return err
			}
			defer func() { _ = rdb.Close() }() // the examination is over
			findings := doctor.Redis(ctx, rdb)
			if len(cfg.Election.Endpoints) > 0 {
				findings = append(findings, examineEtcd(ctx, cfg.Election.Etcd, cfg.RefillPrefix()))
			}
			if cfg.RegistryApart() {
				findings = append(findings, examineEtcd(ctx, cfg.PoolRegistry, cfg.PoolsPrefix()))
			}
			acl := doctor.ACL("refiller", cfg.Redis.URL.Kind == redisconn.Cluster)
			return tell(e.stdout, output, findings, acl)
		},
	}
	conn.addFlags(cmd, "redis", "etcd", "pool-registry")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

func examineEtcd(ctx context.Context, e config.Etcd, prefix string) doctor.Finding {
	client, err := etcdconn.Open(e.Options)
	if err != nil {
		return doctor.Etcd("", false, err)
	}
	defer func() { _ = client.Close() }() // the examination is over
	ctx, cancel := context.WithTimeout(ctx, operateTimeout)
	defer cancel()
	leader, err := leaderOf(ctx, client, prefix)
	return doctor.Etcd(leader.Identity, errors.Is(err, election.ErrNoLeader), err)
}

// tell writes the findings; the error says that one of them is a failure.
func tell(w io.Writer, output string, findings []doctor.Finding, acl string) error {
	var result error
	for _, f := range findings {
		if f.Level == doctor.Failure {
			result = errUnwell
		}
	}
	if output == "json" {
		return errors.Join(json.NewEncoder(w).Encode(map[string]any{"ok": result == nil, "findings": findings, "acl": acl}), result)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, f := range findings {
		fmt.Fprintf(t, "%s\t%s\t%s\n", f.Level, f.Check, f.Detail)
		if f.Advice != "" {
			fmt.Fprintf(t, "\t\t→ %s\n", f.Advice)
		}
	}
	fmt.Fprintf(t, "\nThe least rights for refillers and consumers (add >PASSWORD):\n%s\n", acl)
	return errors.Join(t.Flush(), result)
}
