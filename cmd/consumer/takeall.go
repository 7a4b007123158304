package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
	"github.com/tokenrefill/refiller/policy"
)

func newTakeAllCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	leave := policy.Leave{}
	requestID := ""
	flow := ""
	cmd := &cobra.Command{
		Use:   "take-all KEY[=N]...",
		Short: "Take tokens from several buckets, all or none",
		Long: `Take N tokens from each bucket KEY. If one of the buckets has too few tokens, no tokens are taken from any of
them. The default of N is 1. If an argument has several = signs, N follows the last one.` + takeExitCodes,
		Example: "  consumer take-all user:7 tenant:acme=2 && work",
		Args:    cli.Positional(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			reqs := make([]fetch.Request, len(args))
			for i, arg := range args {
				var err error
				reqs[i], err = parseRequest(arg)
				if err != nil {
					return cli.Usage(err)
				}
			}
			return conn.with(func(c *fetch.Client) error {
				r, err := c.TakeAll(cmd.Context(), reqs, takeOptions(leave, flow, requestID)...)
				if err != nil {
					return err
				}
				if err := out.print(e.Stdout, describeAll(reqs, r), answer.NewAll(reqs, r)); err != nil {
					return err
				}
				if !r.OK {
					return errDenied
				}
				return nil
			})
		},
	}
	addLeaveFlag(cmd, &leave)
	addRequestFlag(cmd, &requestID)
	addFlowFlag(cmd, &flow)
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}

// parseRequest reads KEY or KEY=N.
func parseRequest(s string) (fetch.Request, error) {
	at := strings.LastIndexByte(s, '=')
	if at < 0 {
		return fetch.Request{Key: s, N: 1}, nil
	}
	n, err := cli.ParseWhole(s[at+1:], 1, policy.MaxTokens)
	if err != nil {
		return fetch.Request{}, fmt.Errorf("%q: number of tokens after the last =: %w", s, err)
	}
	return fetch.Request{Key: s[:at], N: n}, nil
}

// describeAll describes the result of each request on a separate line.
func describeAll(reqs []fetch.Request, r fetch.AllResult) string {
	lines := make([]string, len(reqs))
	for i, one := range r.Results {
		key := terminal.Text(reqs[i].Key)
		switch {
		case r.OK:
			lines[i] = fmt.Sprintf("taken: %s of %s; %s left", plural(one.Taken), key, held(one))
		case one.OK:
			lines[i] = fmt.Sprintf("not taken: %s of %s; %s left", plural(reqs[i].N), key, held(one))
		default:
			lines[i] = fmt.Sprintf("denied: %s of %s; %s left; due %s", plural(reqs[i].N), key, held(one), in(one.RetryAfter))
		}
	}
	return strings.Join(lines, "\n")
}
