package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/policy"
)

// takeExitCodes ends the help of each command that takes tokens.
const takeExitCodes = "\n\nExit codes: 0 taken, 1 error, 2 wrong usage, 3 denied."

func newTakeCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	n := int64(1)
	leave := policy.Leave{}
	flow := ""
	requestID := ""
	cmd := &cobra.Command{
		Use:     "take KEY",
		Short:   "Take tokens from a bucket, all or none",
		Long:    "Take tokens from bucket KEY, all or none." + takeExitCodes,
		Example: "  consumer take checkout\n  consumer take checkout -n 5 -o json\n  consumer take acme --flow team-a/user-7",
		Args:    oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			key := args[0]
			return conn.with(func(c *fetch.Client) error {
				r, err := c.Take(cmd.Context(), key, n, takeOptions(leave, flow, requestID)...)
				if err != nil {
					return err
				}
				text := fmt.Sprintf("taken: %s; %s left", plural(n), held(r))
				if !r.OK {
					text = fmt.Sprintf("denied: %s left; %s due %s", held(r), plural(n), in(r.RetryAfter))
				}
				if err := out.print(e.Stdout, text, answer.NewResult(key, r)); err != nil {
					return err
				}
				if !r.OK {
					return errDenied
				}
				return nil
			})
		},
	}
	addTokensFlag(cmd, &n, "number of tokens to take")
	addLeaveFlag(cmd, &leave)
	addFlowFlag(cmd, &flow)
	addRequestFlag(cmd, &requestID)
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}
