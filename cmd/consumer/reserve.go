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
		Short: "Hold tokens for work whose use is known later",
		Long: `Take tokens from bucket KEY, all or none, for work whose use is known later, and print the id to settle them
with. Tokens that are not settled go back when the time is over. With an --id of your own you may repeat it: the
tokens are taken once. Exit code 0 means held, 3 denied.`,
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
				text := fmt.Sprintf("held: %s until %s as %s; %s left", plural(n), r.Until.Local().Format(time.TimeOnly), r.ID,
					held(r.Result))
				switch {
				case !r.OK:
					text = fmt.Sprintf("denied: %s left; %s due %s", held(r.Result), plural(n), in(r.RetryAfter))
				case r.Until.IsZero():
					text = fmt.Sprintf("admitted (%s): there is nothing to settle", r.Source)
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
	addTokensFlag(cmd, &n, "how many tokens")
	addLeaveFlag(cmd, &leave)
	addFlowFlag(cmd, &flow)
	cmd.Flags().DurationVar(&ttl, "ttl", ttl, fmt.Sprintf("how long the tokens are held at most: %s to %s", policy.MinHold,
		policy.MaxHold))
	cmd.Flags().StringVar(
		&id, "id", id, "name of the reservation, unlike any other of the bucket; a random one if left out")
	cmd.Flags().BoolVar(&debt, "debt", debt,
		"have later refills pay for what is used beyond the reservation and the bucket")
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}

func newSettleCommand(e env) *cobra.Command {
	used := int64(0)
	cmd := newEndCommand(e, &used)
	cmd.Use, cmd.Short = "settle KEY ID --used N", "End a reservation, saying how many tokens were used"
	cmd.Long = `End reservation ID of bucket KEY: what was not used goes back, what was used beyond it is taken. Repeated
within a minute, the command changes nothing and prints the first answer.`
	cmd.Flags().Var(cli.NewValue("tokens", "", func(s string) (err error) {
		used, err = cli.ParseWhole(s, 0, policy.MaxTokens)
		return err
	}), "used", "how many tokens were used (required)")
	end := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !cmd.Flags().Changed("used") {
			return cli.Usage(errors.New("--used: how many tokens were used?"))
		}
		return end(cmd, args)
	}
	return cmd
}

func newCancelCommand(e env) *cobra.Command {
	cmd := newEndCommand(e, new(int64))
	cmd.Use, cmd.Short = "cancel KEY ID", "End a reservation of which nothing was used"
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
		text = "settled before"
	}
	var parts []string
	for _, p := range []struct {
		n    int64
		what string
	}{
		{s.Returned, "given back"}, {s.Clamped, "found the bucket full"}, {s.Void, "of a bucket that has begun anew"},
		{s.Charged, "charged"}, {s.Owed, "owed"}, {s.Forgiven, "forgiven"},
	} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	parts = append(parts, fmt.Sprintf("%d left", s.Remaining))
	return text + ": " + strings.Join(parts, ", ")
}
