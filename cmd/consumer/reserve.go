package main

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/policy"
)

func newReserveCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	n := int64(1)
	leave := policy.Leave{}
	flow := ""
	ttl := time.Duration(0)
	id := ""
	debt := false
	cmd := &cobra.Command{
		Use:   "reserve KEY --ttl TIME",
		Short: "Reserve tokens for work whose cost is not known yet",
		Long: `Reserve tokens of bucket KEY, all or none, for work whose cost is not known yet. The command prints the id of
the reservation. After the work, pass the id and the number of used tokens to "consumer settle". If a reservation is
not settled within --ttl, its tokens are returned to the bucket.

If you choose the id with --id, you can repeat the command: the tokens are taken only once.

Exit codes: 0 reserved, 1 error, 2 wrong usage, 3 denied.`,
		Example: "  consumer reserve llm -n 4000 --ttl 2m --id job-17\n  consumer settle llm job-17 --used 2950",
		Args:    oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			if ttl < policy.MinHold || ttl > policy.MaxHold {
				return cli.Usage(fmt.Errorf("--ttl %s: want %s to %s", ttl, policy.MinHold, policy.MaxHold))
			}
			opts := takeOptions(leave, flow, "")
			if cmd.Flags().Changed("id") {
				opts = append(opts, fetch.WithReservationID(id))
			}
			if debt {
				opts = append(opts, fetch.WithOverrun(policy.OverrunDebt))
			}
			return conn.with(func(c *fetch.Client) error {
				r, err := c.Reserve(cmd.Context(), args[0], n, ttl, opts...)
				if err != nil {
					return err
				}
				text := fmt.Sprintf("reserved: %s until %s as %s; %s left", plural(n),
					r.Until.Local().Format(time.TimeOnly), r.ID, held(r.Result))
				switch {
				case !r.OK:
					text = fmt.Sprintf("denied: %s left; %s due %s", held(r.Result), plural(n), in(r.RetryAfter))
				case r.Until.IsZero():
					text = fmt.Sprintf("admitted without the bucket (%s): there is nothing to settle", answer.Source(r.Result))
				}
				if err := out.print(e.Stdout, text, answer.NewReservation(r)); err != nil {
					return err
				}
				if !r.OK {
					return errDenied
				}
				return nil
			})
		},
	}
	addTokensFlag(cmd, &n, "number of tokens to reserve")
	addLeaveFlag(cmd, &leave)
	addFlowFlag(cmd, &flow)
	cmd.Flags().DurationVar(&ttl, "ttl", ttl, fmt.Sprintf("longest duration of the reservation, from %s to %s (required)",
		policy.MinHold, policy.MaxHold))
	cmd.Flags().StringVar(
		&id, "id", id, "id of the reservation, unique in the bucket (default: a random id)")
	cmd.Flags().BoolVar(&debt, "debt", debt,
		"let later refills pay for tokens that are used beyond the reservation, if the bucket has too few")
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}

func newSettleCommand(e env) *cobra.Command {
	used := int64(0)
	cmd := newEndCommand(e, &used)
	cmd.Use, cmd.Short = "settle KEY ID --used N", "End a reservation with the number of tokens that were used"
	cmd.Long = `End reservation ID of bucket KEY. Reserved tokens that were not used are returned to the bucket. If more
tokens were used than were reserved, the difference is taken from the bucket. If you repeat the command within a minute,
it changes nothing and prints the result of the first settlement.`
	cmd.Flags().Var(cli.NewValue("tokens", "", func(s string) (err error) {
		used, err = cli.ParseWhole(s, 0, policy.MaxTokens)
		return err
	}), "used", "number of tokens that were used (required)")
	end := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("used") {
			return cli.Usage(errors.New("--used is missing (number of tokens that were used)"))
		}
		return end(cmd, args)
	}
	return cmd
}

func newCancelCommand(e env) *cobra.Command {
	cmd := newEndCommand(e, new(int64))
	cmd.Use, cmd.Short = "cancel KEY ID", "Cancel a reservation and return all of its tokens"
	return cmd
}

// newEndCommand returns a command that ends a reservation. used is the number of its tokens that were used.
func newEndCommand(e env, used *int64) *cobra.Command {
	conn, out := connection{environ: e.Environ}, output{}
	cmd := &cobra.Command{
		Args: cli.Positional(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return conn.with(func(c *fetch.Client) error {
				s, err := c.Settle(cmd.Context(), args[0], args[1], *used)
				if err != nil {
					return err
				}
				return out.print(e.Stdout, describeSettlement(s), answer.NewSettlement(args[0], args[1], s))
			})
		},
	}
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}

// describeSettlement describes the numbers of a settlement. It leaves out numbers that are 0.
func describeSettlement(s fetch.Settlement) string {
	text := "settled"
	if s.Again {
		text = "already settled"
	}
	var parts []string
	for _, p := range []struct {
		n    int64
		what string
	}{
		{s.Returned, "returned"}, {s.Clamped, "dropped (bucket full)"}, {s.Void, "dropped (bucket state lost)"},
		{s.Charged, "charged"}, {s.Owed, "owed"}, {s.Forgiven, "forgiven"},
	} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	parts = append(parts, fmt.Sprintf("%d left", s.Remaining))
	return text + ": " + strings.Join(parts, ", ")
}
