package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/policy"
)

func newWaitCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	n := int64(1)
	timeout := time.Duration(0)
	leave := policy.Leave{}
	flow := ""
	cmd := &cobra.Command{
		Use:   "wait KEY",
		Short: "Take tokens from a bucket as soon as it has enough",
		Long: `Wait until bucket KEY has enough tokens, and take them, all at once. If the tokens are due later than
--timeout, they are denied. If that is known beforehand, the command ends at once.` + takeExitCodes,
		Example: "  consumer wait checkout -n 5 --timeout 10s && work",
		Args:    oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			if timeout < 0 {
				return cli.Usage(fmt.Errorf("--timeout %s: want 0 (no limit) or more", timeout))
			}
			key := args[0]
			return conn.with(func(c *fetch.Client) error {
				ctx := cmd.Context()
				if timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, timeout)
					defer cancel()
				}
				began := time.Now()
				r, err := c.Wait(ctx, key, n, takeOptions(leave, flow, "")...)
				late := call.Late(cmd.Context(), err)
				if err != nil && !late {
					return err
				}
				result := answer.NewWait(key, r, time.Since(began))
				text := fmt.Sprintf("denied: no tokens within %s: %v", timeout, err)
				if result.OK {
					text = fmt.Sprintf("taken: %s, after %s", plural(n), time.Since(began).Round(time.Millisecond))
				}
				if err := out.print(e.Stdout, text, result); err != nil {
					return err
				}
				if late {
					return errDenied
				}
				return nil
			})
		},
	}
	addTokensFlag(cmd, &n, "number of tokens to take")
	addLeaveFlag(cmd, &leave)
	addFlowFlag(cmd, &flow)
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "longest time to wait; 0 for no limit")
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}
