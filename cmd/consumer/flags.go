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
	}), "leave", "tokens that must be left in the bucket: a number, or a percentage of the capacity such as 20%")
}

// addFlowFlag adds --flow.
func addFlowFlag(cmd *cobra.Command, flow *string) {
	cmd.Flags().Var(cli.NewValue("name", "", func(s string) error {
		*flow = s
		return policy.CheckFlow(s)
	}), "flow", "flow for which the tokens are taken; for buckets that have flows")
}

// addRequestFlag adds --request-id.
func addRequestFlag(cmd *cobra.Command, id *string) {
	cmd.Flags().Var(cli.NewValue("id", "", func(s string) error {
		*id = s
		return lua.CheckRequestID(s)
	}), "request-id", "id of the request; if it is repeated with this id within a minute, the tokens are taken only once")
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
