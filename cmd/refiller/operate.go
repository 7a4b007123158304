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

// operateTimeout bounds an operator's action. It is short because the operator waits for the action.
const operateTimeout = 5 * time.Second

func grantCommand(e env) *cobra.Command {
	n := int64(1)
	op := operation{connection: connection{env: e}, verb: "grant"}
	cmd := &cobra.Command{
		Use:   "grant KEY -n TOKENS",
		Short: "Add tokens to a bucket, up to its capacity",
		Long: `Add tokens to a bucket, up to its capacity. Tokens for which the bucket has no room are dropped. The command
writes an audit line to stderr.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			act := func(ctx context.Context, rdb redis.UniversalClient) (lua.OperatorReply, error) {
				return lua.Grant(ctx, rdb, args[0], n)
			}
			return op.run(cmd.Context(), args[0], []any{"tokens", n}, act)
		},
	}
	op.flags(cmd)
	cmd.Flags().VarP(cli.Whole("tokens", &n, 1, policy.MaxTokens), "tokens", "n", "number of tokens to add, 1 or more")
	return cmd
}

func resetCommand(e env) *cobra.Command {
	n := int64(-1) // means the capacity
	op := operation{connection: connection{env: e}, verb: "reset"}
	cmd := &cobra.Command{
		Use:   "reset KEY [-n TOKENS]",
		Short: "Set the number of tokens in a bucket",
		Long: `Set the number of tokens in a bucket, by default to its capacity. The bucket also loses its credit: tokens
that are due for the time up to now are not added. The command writes an audit line to stderr.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			act := func(ctx context.Context, rdb redis.UniversalClient) (lua.OperatorReply, error) {
				return reset(ctx, rdb, args[0], n)
			}
			var details []any
			if n >= 0 {
				details = []any{"tokens", n}
			}
			return op.run(cmd.Context(), args[0], details, act)
		},
	}
	op.flags(cmd)
	cmd.Flags().VarP(cli.Whole("tokens", &n, 0, policy.MaxTokens), "tokens", "n",
		"number of tokens in the bucket after the reset, 0 or more (default: its capacity)")
	return cmd
}

// reset sets a bucket's tokens. A negative n means the bucket's capacity. If a refilled template applies to the bucket,
// reset then puts the bucket into the active set. If the template's buckets are budgets, it credits the bucket instead.
// If this second step fails, reset returns the reply of the first step and an error.
func reset(ctx context.Context, rdb redis.UniversalClient, key string, n int64) (lua.OperatorReply, error) {
	published, _, _ := lua.ReadTemplates(ctx, rdb, "") // without templates, refills begin again with the next take
	reply, err := lua.Reset(ctx, rdb, key, n)
	rule := published.Of(key)
	if err != nil || rule == nil || rule.Enforce != policy.EnforceRefilled {
		return reply, err
	}
	_, cluster := rdb.(*redis.ClusterClient)
	if err := lua.NewTemplate(rule, cluster).Open(ctx, rdb, key); err != nil {
		return reply, fmt.Errorf("the bucket holds %d tokens now, but it may not be refilled before its next take: %w",
			reply.Tokens, err)
	}
	return reply, nil
}

// operation is an operator's action on one bucket.
type operation struct {
	connection
	verb           string
	output, reason string
	operator       string
	logConfig      config.Log // the log settings of the configuration
}

func (o *operation) flags(cmd *cobra.Command) {
	o.connectFlags(cmd)
	cmd.Flags().StringVar(&o.reason, "reason", "", "reason for the action, shown in the audit line")
	operatorFlag(cmd, &o.operator)
}

func operatorFlag(cmd *cobra.Command, operator *string) {
	cmd.Flags().StringVar(operator, "operator", "",
		"name of the operator, shown in the audit line (default: $"+operatorVariable+", or the current user)")
}

func (o *operation) connectFlags(cmd *cobra.Command) {
	o.addFlags(cmd, "redis")
	cli.OutputFlag(cmd, &o.output)
}

// connect returns a client of Redis, and the server's address without secrets.
func (o *operation) connect() (redis.UniversalClient, string, error) {
	cfg, err := o.load()
	if err != nil {
		return nil, "", err
	}
	o.logConfig = cfg.Log
	rdb, err := redisconn.Open(cfg.Redis)
	return rdb, cfg.Redis.String(), err
}

// reach connects to Redis, calls act, and closes the connection. timeout bounds act.
func (o *operation) reach(ctx context.Context, timeout time.Duration,
	act func(ctx context.Context, rdb redis.UniversalClient, server string) error) error {
	rdb, server, err := o.connect()
	if err != nil {
		return err
	}
	defer func() { _ = rdb.Close() }() // the action is done or has failed, so the error doesn't matter
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return act(ctx, rdb, server)
}

// audited writes an audit line to the log. The arguments details and outcome describe the action and its result. If err
// isn't nil, audited returns it with the verb and the key in front.
func (o *operation) audited(key, server string, details, outcome []any, err error) error {
	log := auditLogger(o.env, o.logConfig)
	fields := slices.Concat([]any{"action", o.verb, "bucket", key}, details,
		[]any{"operator", operatorOf(o.env, o.operator), "reason", o.reason, "redis", server})
	if err != nil {
		log.Error("operator action failed", append(fields, "error", err)...)
		return fmt.Errorf("%s %q: %w", o.verb, key, err)
	}
	log.Info("operator action", append(fields, outcome...)...)
	return nil
}

// run calls act. It writes an audit line to the log, and the reply to stdout. The argument details is the part of the
// audit line that describes the action.
func (o *operation) run(ctx context.Context, key string, details []any,
	act func(context.Context, redis.UniversalClient) (lua.OperatorReply, error)) error {
	if err := lua.CheckKey(key); err != nil {
		return cli.Usage(err)
	}
	return o.reach(ctx, operateTimeout, func(ctx context.Context, rdb redis.UniversalClient, server string) error {
		reply, err := act(ctx, rdb)
		outcome := []any{"held", reply.Tokens, "clamped", reply.Clamped, "index", reply.Version.Index}
		if err != nil && reply.Version.Index > 0 { // the bucket was changed, but a later step failed
			details = slices.Concat(details, outcome)
		}
		if err := o.audited(key, server, details, outcome, err); err != nil {
			return err
		}
		if o.output == "json" {
			return cli.WriteJSON(o.Stdout, map[string]any{
				"key": key, "tokens": reply.Tokens, "clamped": reply.Clamped, "index": reply.Version.Index,
				"era": reply.Version.Era,
			}, "")
		}
		_, err = fmt.Fprintf(o.Stdout, "%s holds %d tokens (index %d; %d tokens had no room)\n",
			terminal.Text(key), reply.Tokens, reply.Version.Index, reply.Clamped)
		return err
	})
}

// operatorVariable is the variable with the operator's name. It is useful in containers, where the program's user
// doesn't identify a person.
const operatorVariable = "REFILLER_OPERATOR"

// operatorOf returns the operator's name for the audit line. It is the argument name, or the value of operatorVariable
// if name is empty. If both are empty, it is the user that runs the program.
func operatorOf(e env, name string) string {
	if name == "" {
		name = e.Environ[operatorVariable]
	}
	if name != "" {
		return name
	}
	u, err := user.Current()
	if err != nil {
		return "unknown"
	}
	return u.Username
}

// auditLogger returns the logger of audit lines. It writes them at every log level, as text or JSON like other lines.
func auditLogger(e env, l config.Log) hclog.Logger {
	return newLogger(e, config.Log{Level: "info", JSON: l.JSON}).Named("audit")
}
