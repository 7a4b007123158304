package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/override"
	"github.com/tokenrefill/refiller/policy"
)

// listTimeout bounds the command that lists all overrides.
const listTimeout = time.Minute

func limitCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "limit",
		Short: "Set the capacity and rate of single keys of a template",
		Long: `Set the capacity and rate of single keys, in place of those of the template that matches the key. Such a
setting is called an override. It takes effect with the next take of the key, also if its bucket exists already. It
stays in force until you unset it, even if later versions of the template have other values.

If you set only the capacity or only the rate, the override copies the other value from the present template. Setting
an override does not refill the bucket.`,
		Args: cli.UnknownCommand,
		RunE: func(*cobra.Command, []string) error {
			return cli.Usage(errors.New("limit: no subcommand was given: want set, get, list or unset"))
		},
	}
	cmd.AddCommand(limitSetCommand(e), limitGetCommand(e), limitListCommand(e), limitUnsetCommand(e))
	return cmd
}

func limitSetCommand(e env) *cobra.Command {
	op := operation{connection: connection{env: e}, verb: "limit set"}
	var capacity int64
	var rate string
	cmd := &cobra.Command{
		Use:   "set KEY [--capacity N] [--rate R]",
		Short: "Set the override of a key",
		Args:  cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			o := policy.Override{Capacity: capacity}
			if cmd.Flags().Lookup("rate").Changed {
				var err error
				o.Rate, err = policy.ParseRate(rate)
				if err != nil {
					return cli.Usage(fmt.Errorf("--rate: %w", err))
				}
			}
			if o == (policy.Override{}) {
				return cli.Usage(errors.New("limit set: want --capacity, --rate or both"))
			}
			return op.change(cmd.Context(), args[0], []any{"capacity", capacity, "rate", rate},
				func(ctx context.Context, s *override.Store) (override.Limit, error) {
					return s.Set(ctx, args[0], o)
				})
		},
	}
	op.flags(cmd)
	cmd.Flags().Var(cli.Whole("tokens", &capacity, 1, policy.MaxTokens), "capacity",
		"largest number of tokens in the bucket, 1 or more (default: the template's capacity)")
	cmd.Flags().StringVar(&rate, "rate", "", "tokens per time, such as 5/s or 100/m (default: the template's rate)")
	return cmd
}

func limitUnsetCommand(e env) *cobra.Command {
	op := operation{connection: connection{env: e}, verb: "limit unset"}
	cmd := &cobra.Command{
		Use:   "unset KEY",
		Short: "Remove the override of a key, so that its template applies again",
		Args:  cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return op.change(cmd.Context(), args[0], nil, func(ctx context.Context, s *override.Store) (override.Limit, error) {
				return s.Unset(ctx, args[0])
			})
		},
	}
	op.flags(cmd)
	return cmd
}

func limitGetCommand(e env) *cobra.Command {
	op := operation{connection: connection{env: e}, verb: "limit get"}
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Show the capacity and rate in force for a key",
		Args:  cli.Positional(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := lua.CheckKey(args[0]); err != nil {
				return cli.Usage(err)
			}
			return op.overrides(cmd.Context(), operateTimeout, func(ctx context.Context, s *override.Store) error {
				l, err := s.Get(ctx, args[0])
				if err != nil {
					return fmt.Errorf("limit get %q: %w", args[0], err)
				}
				if op.output == "json" {
					return cli.WriteJSON(e.Stdout, limitAnswerOf(l), "")
				}
				_, err = fmt.Fprintln(e.Stdout, limitText(l))
				return err
			})
		},
	}
	op.connectFlags(cmd)
	return cmd
}

func limitListCommand(e env) *cobra.Command {
	op := operation{connection: connection{env: e}, verb: "limit list"}
	var prefix string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List all overrides, sorted by key",
		Long:  "List all overrides, sorted by key. With -o json, each line of the output is one object.",
		Args:  cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return op.overrides(cmd.Context(), listTimeout, func(ctx context.Context, s *override.Store) error {
				var list []override.Limit
				for l, err := range s.All(ctx) {
					if err != nil {
						return fmt.Errorf("limit list: %w", err)
					}
					if strings.HasPrefix(l.Key, prefix) {
						list = append(list, l)
					}
				}
				slices.SortFunc(list, func(a, b override.Limit) int { return strings.Compare(a.Key, b.Key) })
				return op.writeLimits(list)
			})
		},
	}
	op.connectFlags(cmd)
	cmd.Flags().StringVar(&prefix, "prefix", "", "beginning of the keys to list (default: all keys)")
	return cmd
}

// overrides connects to Redis and calls act with the overrides in it. timeout bounds act.
func (o *operation) overrides(ctx context.Context, timeout time.Duration,
	act func(context.Context, *override.Store) error) error {
	return o.reach(ctx, timeout, func(ctx context.Context, rdb redis.UniversalClient, _ string) error {
		return act(ctx, override.New(rdb))
	})
}

// change calls act, which changes an override. It writes an audit line to the log, and the result to stdout.
func (o *operation) change(ctx context.Context, key string, what []any,
	act func(context.Context, *override.Store) (override.Limit, error)) error {
	if err := lua.CheckKey(key); err != nil {
		return cli.Usage(err)
	}
	return o.reach(ctx, operateTimeout, func(ctx context.Context, rdb redis.UniversalClient, server string) error {
		l, err := act(ctx, override.New(rdb))
		outcome := []any{"template", l.Template, "in-force-capacity", l.Capacity, "in-force-rate", l.Rate.String(),
			"had-override", l.Changed}
		if err := o.audited(key, server, what, outcome, err); err != nil {
			return err
		}
		if o.output == "json" {
			answer := limitAnswerOf(l)
			answer.Changed, answer.Exists = &l.Changed, &l.Exists
			if l.Exists {
				answer.Tokens = &l.Tokens
			}
			return cli.WriteJSON(o.Stdout, answer, "")
		}
		held := "its bucket is full or does not exist yet"
		if l.Exists {
			held = fmt.Sprintf("its bucket holds %d tokens", l.Tokens)
		}
		_, err = fmt.Fprintf(o.Stdout, "%s; %s\n", limitText(l), held)
		return err
	})
}

// limitAnswer is the JSON output for the limit in force for a key.
type limitAnswer struct {
	Key      string `json:"key"`
	Template string `json:"template"`
	Enforce  string `json:"enforce"`
	Override bool   `json:"override"`
	Bucket   bool   `json:"own_bucket,omitempty"`
	Capacity int64  `json:"capacity"`
	Rate     string `json:"rate"`
	Schedule string `json:"schedule,omitempty"`
	AtStep   int64  `json:"step_tokens,omitempty"`
	Changed  *bool  `json:"had_override,omitempty"`
	Exists   *bool  `json:"exists,omitempty"`
	Tokens   *int64 `json:"tokens,omitempty"`
}

func limitAnswerOf(l override.Limit) limitAnswer {
	answer := limitAnswer{Key: l.Key, Template: l.Template, Enforce: l.Enforce.String(), Override: l.Own,
		Bucket: l.Bucket, Capacity: l.Capacity, Rate: rateText(l.Rate), AtStep: l.StepTokens}
	if l.Steps != nil {
		answer.Schedule = l.Steps.String()
	}
	return answer
}

func limitText(l override.Limit) string {
	whose := fmt.Sprintf("set by the template %q", l.Template)
	switch {
	case l.Bucket:
		whose = "set by a configured bucket or pool, whose limit stays in force until the bucket's keys are deleted"
	case l.Own:
		whose = "set by an override"
	}
	if l.Capacity == 0 {
		return terminal.Text(l.Key) + ": no template matches this key any more"
	}
	due := "rate " + rateText(l.Rate)
	if l.Steps != nil {
		due = fmt.Sprintf("%d tokens %s", l.StepTokens, l.Steps)
	}
	return fmt.Sprintf("%s: capacity %d, %s, %s", terminal.Text(l.Key), l.Capacity, due, whose)
}

// dueText describes when tokens are due.
func dueText(l override.Limit) string {
	if l.Steps != nil {
		return fmt.Sprintf("%d %s", l.StepTokens, l.Steps)
	}
	return rateText(l.Rate)
}

func rateText(r policy.Rate) string {
	if r == (policy.Rate{}) {
		return ""
	}
	return r.String()
}

func (o *operation) writeLimits(list []override.Limit) error {
	if o.output == "json" {
		for _, l := range list {
			if err := cli.WriteJSON(o.Stdout, limitAnswerOf(l), ""); err != nil {
				return err
			}
		}
		return nil
	}
	t := terminal.NewTable(terminal.Column{Name: "KEY", Text: true}, number("CAPACITY", 0), number("RATE", 0),
		terminal.Column{Name: "TEMPLATE", Text: true})
	for _, l := range list {
		t.Row(l.Key, l.Capacity, dueText(l), strconv.Quote(l.Template))
	}
	return t.Write(o.Stdout, terminal.Of(o.Stdout, o.Environ).Width())
}
