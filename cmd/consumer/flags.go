package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/sidecar/call"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// addTokensFlag adds -n. Its default is the present value of n.
func addTokensFlag(cmd *cobra.Command, n *int64, usage string) {
	cmd.Flags().VarP(cli.Whole("tokens", n, 1, policy.MaxTokens), "tokens", "n", usage)
}

// addLeaveFlag adds --leave.
func addLeaveFlag(cmd *cobra.Command, l *policy.Leave) {
	cmd.Flags().Var(cli.NewValue("tokens", l.String(), func(s string) (err error) {
		*l, err = policy.ParseLeave(s)
		return err
	}), "leave", "what must be left: a number of tokens, or of percent of the capacity, as 20%")
}

// addFlowFlag adds --flow.
func addFlowFlag(cmd *cobra.Command, flow *string) {
	cmd.Flags().Var(cli.NewValue("name", "", func(s string) error {
		*flow = s
		return policy.CheckFlow(s)
	}), "flow", "for whom the tokens are, in a bucket that is divided among flows")
}

// addRequestFlag adds --request-id.
func addRequestFlag(cmd *cobra.Command, id *string) {
	cmd.Flags().Var(cli.NewValue("id", "", func(s string) error {
		*id = s
		return lua.CheckRequestID(s)
	}), "request-id", "name of the request; repeated within a minute, the tokens are taken once")
}

// takeOptions returns the options of a take. They have the tokens to leave. They also have the flow and the request id
// if these aren't empty.
func takeOptions(leave policy.Leave, flow, requestID string) []fetch.CallOption {
	opts := []fetch.CallOption{call.LeaveOption(leave)}
	if flow != "" {
		opts = append(opts, fetch.WithFlow(flow))
	}
	if requestID != "" {
		opts = append(opts, fetch.WithRequestID(requestID))
	}
	return opts
}
