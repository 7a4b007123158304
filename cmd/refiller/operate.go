package main

import (
	"context"
	"fmt"
	"os/user"
	"slices"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// operateTimeout bounds an operator's action: the operator waits for it.
const operateTimeout = 5 * time.Second

func grantCommand(e env) *cobra.Command {
	n := int64(1)
	op := operation{connection: connection{env: e}, verb: "grant"}
	cmd := &cobra.Command{
		Use:   "grant KEY -n TOKENS",
		Short: "Add tokens to a bucket, up to its capacity",
		Args:  cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			act := func(ctx context.Context, rdb redis.UniversalClient) (lua.OperatorReply, error) {
				return lua.Grant(ctx, rdb, args[0], n)
			}
			return op.run(cmd.Context(), args[0], n, act)
		},
	}
	op.flags(cmd)
	cmd.Flags().VarP(cli.Whole("tokens", &n, 1, policy.MaxTokens), "tokens", "n", "tokens to add")
	return cmd
}

func resetCommand(e env) *cobra.Command {
	n := int64(-1) // the capacity
	op := operation{connection: connection{env: e}, verb: "reset"}
	cmd := &cobra.Command{
		Use:   "reset KEY [-n TOKENS]",
		Short: "Set a bucket's tokens (default: its capacity) and drop the credit of the time up to now",
		Args:  cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			act := func(ctx context.Context, rdb redis.UniversalClient) (lua.OperatorReply, error) {
				return reset(ctx, rdb, args[0], n)
			}
			return op.run(cmd.Context(), args[0], n, act)
		},
	}
	op.flags(cmd)
	cmd.Flags().VarP(cli.Whole("tokens", &n, 0, policy.MaxTokens), "tokens", "n", "tokens to hold; default its capacity")
	return cmd
}

// reset sets a bucket's tokens, and has it refilled if it is of a template.
func reset(ctx context.Context, rdb redis.UniversalClient, key string, n int64) (lua.OperatorReply, error) {
	published, _, _ := lua.ReadTemplates(ctx, rdb, "") // without them its next take has it refilled
	reply, err := lua.Reset(ctx, rdb, key, n)
	if rule := published.Of(key); err == nil && rule != nil && rule.Enforce == policy.EnforceRefilled {
		_, cluster := rdb.(*redis.ClusterClient)
		err = lua.NewTemplate(rule, cluster).Open(ctx, rdb, key)
	}
	return reply, err
}

// operation is an operator's action on one bucket.
type operation struct {
	connection
	verb           string
	output, reason string
	operator       string
	logged         config.Log // of the configuration
}

func (o *operation) flags(cmd *cobra.Command) {
	o.connectFlags(cmd)
	cmd.Flags().StringVar(&o.reason, "reason", "", "why, for the audit line")
	operatorFlag(cmd, &o.operator)
}

func operatorFlag(cmd *cobra.Command, operator *string) {
	cmd.Flags().StringVar(operator, "operator", "",
		"who, for the audit line (default: $"+operatorVariable+", or the user that runs this)")
}

func (o *operation) connectFlags(cmd *cobra.Command) {
	o.addFlags(cmd, "redis")
	cli.OutputFlag(cmd, &o.output)
}

// connect reaches Redis, and names it without secrets.
func (o *operation) connect() (redis.UniversalClient, string, error) {
	cfg, err := o.load()
	if err != nil {
		return nil, "", err
	}
	o.logged = cfg.Log
	rdb, err := redisconn.Open(cfg.Redis)
	return rdb, cfg.Redis.String(), err
}

// reach connects to Redis for what act does.
func (o *operation) reach(ctx context.Context, timeout time.Duration,
	act func(ctx context.Context, rdb redis.UniversalClient, server string) error) error {
	rdb, server, err := o.connect()
	if err != nil {
		return err
	}
	defer func() { _ = rdb.Close() }() // the action is done or has failed
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return act(ctx, rdb, server)
}

// audited writes an audit line to the log: what was to be done to the bucket, and the outcome or the error, which it
// returns.
func (o *operation) audited(key, server string, what, outcome []any, err error) error {
	log := auditLogger(o.env, o.logged)
	fields := slices.Concat([]any{"action", o.verb, "bucket", key}, what,
		[]any{"operator", operatorOf(o.env, o.operator), "reason", o.reason, "redis", server})
	if err != nil {
		log.Error("operator action failed", append(fields, "error", err)...)
		return fmt.Errorf("%s %q: %w", o.verb, key, err)
	}
	log.Info("operator action", append(fields, outcome...)...)
	return nil
}

// run acts, writes an audit line to the log and the answer to stdout.
func (o *operation) run(ctx context.Context, key string, n int64,
	act func(context.Context, redis.UniversalClient) (lua.OperatorReply, error)) error {
	if err := lua.CheckKey(key); err != nil {
		return cli.Usage(err)
	}
	return o.reach(ctx, operateTimeout, func(ctx context.Context, rdb redis.UniversalClient, server string) error {
		reply, err := act(ctx, rdb)
		if err := o.audited(key, server, []any{"tokens", n},
			[]any{"held", reply.Tokens, "clamped", reply.Clamped, "index", reply.Version.Index}, err); err != nil {
			return err
		}
		if o.output == "json" {
			return cli.WriteJSON(o.Stdout, map[string]any{
				"key": key, "tokens": reply.Tokens, "clamped": reply.Clamped, "index": reply.Version.Index,
				"era": reply.Version.Era,
			}, "")
		}
		_, err = fmt.Fprintf(o.Stdout, "%s holds %d tokens (index %d; %d above its capacity were dropped)\n",
			terminal.Text(key), reply.Tokens, reply.Version.Index, reply.Clamped)
		return err
	})
}

// operatorVariable names the operator where the program runs as a user of its own, as in an image.
const operatorVariable = "REFILLER_OPERATOR"

// operatorOf returns who acts, for the audit line: the one that is named, or the user that runs the program.
func operatorOf(e env, named string) string {
	if named == "" {
		named = e.Environ[operatorVariable]
	}
	if named != "" {
		return named
	}
	u, err := user.Current()
	if err != nil {
		return "unknown"
	}
	return u.Username
}

// auditLogger returns the logger of audit lines, which are written whatever the level, in the form of other lines.
func auditLogger(e env, l config.Log) hclog.Logger {
	return newLogger(e, config.Log{Level: "info", JSON: l.JSON}).Named("audit")
}
