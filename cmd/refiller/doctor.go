package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/operate/doctor"
)

// examineTimeout bounds the whole examination.
const examineTimeout = 20 * time.Second

// errUnwell ends a command that has reported failures.
var errUnwell = errors.New("a refiller would not work: see the failures above")

func doctorCommand(e env) *cobra.Command {
	conn := connection{env: e}
	var output string
	role := doctor.Refiller
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check Redis and etcd, and print advice",
		Long: `Check the servers that a refiller needs. The doctor checks whether Redis and etcd reply, whether the Redis
user may run the scripts, whether settings of Redis can evict or lose buckets, and whether the clock of Redis is
right. It writes only test buckets, whose names begin with refiller:doctor. It deletes them if its user may delete
keys. The exit code is 1 if a refiller would not work, and 0 otherwise.

The doctor also prints the least rights of two Redis users: one for refillers and the commands of operators, and one
for consumers. With --config, these rights are only for the keys of the buckets in that file. With --role consumer,
the doctor checks Redis with the user of consumers. Give its name and password with --redis-username and
--redis-password-file.`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
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
			defer func() { _ = rdb.Close() }() // the examination is over, so the error doesn't matter
			names := doctor.NamesOf(cfg, cfg.Redis.URL.Kind == redisconn.Cluster)
			names.Any = conn.path == ""
			findings := doctor.Redis(ctx, rdb, role, names)
			if keys := examined(cfg); len(keys) > 0 && findings[0].Level != doctor.Failure {
				findings = append(findings, doctor.Buckets(ctx, rdb, keys))
			}
			if role == doctor.Refiller {
				for _, e := range elections(cfg, conn.path != "") {
					findings = append(findings, e.examine(ctx)...)
				}
			}
			return writeFindings(e.Stdout, terminal.Of(e.Stdout, e.Environ).Width(), output, findings, names)
		},
	}
	cmd.Flags().Var(cli.NewValue("string", string(role), func(text string) error {
		role = doctor.Role(text)
		if role != doctor.Refiller && role != doctor.Consumer {
			return fmt.Errorf("want %s or %s", doctor.Refiller, doctor.Consumer)
		}
		return nil
	}), "role", "role of the Redis user to check: refiller or consumer")
	conn.addFlags(cmd, "redis", "etcd", "pool-registry")
	cli.OutputFlag(cmd, &output)
	return cmd
}

// rights has the smallest rights of the users of Redis, in the format of users.acl.
type rights struct {
	Refiller string `json:"refiller"`
	Consumer string `json:"consumer"`
	Limiters string `json:"limiters"` // further commands for a consumer with limiters
}

func rightsOf(names doctor.Names) rights {
	return rights{
		Refiller: doctor.RightsOf(doctor.Refiller, names).ACL("refiller"),
		Consumer: doctor.RightsOf(doctor.Consumer, names).ACL("consumer"),
		Limiters: "+" + strings.Join(doctor.LimiterCommands(), " +"),
	}
}

// text returns the rights with explanations.
func (r rights) text(names doctor.Names) string {
	text := `
Least rights of the Redis user of refillers and of these commands (add >PASSWORD):
` + r.Refiller + `

Least rights of the Redis user of consumers (add >PASSWORD):
` + r.Consumer + `

A consumer with limiters of package limit, such as a sidecar with --limits, also needs ~KEY ~{KEY}* for each key of the
limiters, and these commands: ` + r.Limiters
	if names.Any {
		text += "\n\n~* means every key. With --config FILE, the rights are only for the keys of the buckets in that file."
	}
	return text
}

// configuredKeys returns the keys of the configuration's buckets, also of those of its pools.
func configuredKeys(cfg config.Config) []string {
	var keys []string
	for _, b := range cfg.Buckets {
		keys = append(keys, b.Key)
	}
	for _, p := range cfg.OwnPools() {
		keys = append(keys, p.Name)
	}
	return keys
}

// examined returns the keys of the configuration's buckets. For each template it adds a key to which the template
// applies.
func examined(cfg config.Config) []string {
	keys := configuredKeys(cfg)
	for _, t := range cfg.Templates.All() {
		keys = append(keys, t.Prefix+"doctor")
	}
	return keys
}

// elected is an election that is examined, with its etcd.
type elected struct {
	config.Etcd
	section, prefix string
	does            string // the role of the elected replica; empty if no replica is elected
}

// elections returns the elections of a configuration. Without a file, the mode is unknown, and elections assumes that
// replicas elect a leader.
func elections(cfg config.Config, file bool) (list []elected) {
	pools := elected{cfg.PoolRegistry, "pool_registry", cfg.PoolsPrefix(), "coordinates the pools"}
	switch e := (elected{cfg.Election.Etcd, "election", cfg.RefillPrefix(), "leads"}); {
	case len(e.Endpoints) == 0:
	case cfg.Election.Mode == config.ModeEtcd || !file:
		list = append(list, e)
	case cfg.Pooled() && !cfg.HasSeparateRegistry():
		e.prefix, e.does = pools.prefix, pools.does
		list = append(list, e)
	default:
		e.does = ""
		list = append(list, e)
	}
	if cfg.HasSeparateRegistry() {
		list = append(list, pools)
	}
	return list
}

// examine checks the etcd of an election, and reads which replica is elected.
func (e elected) examine(ctx context.Context) []doctor.Finding {
	client, err := etcdconn.Open(e.Options)
	if err != nil {
		return []doctor.Finding{doctor.Etcd(e.section, "", err)}
	}
	defer func() { _ = client.Close() }() // the examination is over, so the error doesn't matter
	ctx, cancel := context.WithTimeout(ctx, operateTimeout)
	defer cancel()
	leader, err := leaderOf(ctx, client, e.prefix)
	result := leader.Identity + " " + e.does
	if none := errors.Is(err, election.ErrNoLeader); none && e.does == "" {
		result, err = "mode race has no election", nil
	} else if none {
		result, err = "no replica "+e.does+" yet", nil
	}
	findings := []doctor.Finding{doctor.Etcd(e.section, result, err)}
	if findings[0].Level == doctor.OK {
		endpoints, alive := doctor.EtcdEndpoints(ctx, client, e.Endpoints)
		findings = append(findings, endpoints, doctor.EtcdSpace(ctx, client, alive),
			doctor.EtcdCompaction(ctx, client, e.prefix))
	}
	return findings
}

// writeFindings writes the findings in lines of at most width columns. If a finding is a failure, it returns errUnwell.
func writeFindings(w io.Writer, width int, output string, findings []doctor.Finding, names doctor.Names) error {
	var result error
	for _, f := range findings {
		if f.Level == doctor.Failure {
			result = errUnwell
		}
	}
	if output == "json" {
		answer := map[string]any{"ok": result == nil, "findings": findings, "acl": rightsOf(names)}
		return errors.Join(cli.WriteJSON(w, answer, ""), result)
	}
	var pairs []terminal.Pair
	for _, f := range findings {
		pairs = append(pairs, terminal.Pair{Name: fmt.Sprintf("%-7s  %s", f.Level, f.Check), Text: f.Detail})
		if f.Advice != "" {
			pairs = append(pairs, terminal.Pair{Text: "→ " + f.Advice})
		}
	}
	return errors.Join(terminal.WritePairs(w, width, pairs), line(w, rightsOf(names).text(names)), result)
}
