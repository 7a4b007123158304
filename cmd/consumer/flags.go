package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/policy"
)

// addTokensFlag adds -n, whose default is what n holds.
func addTokensFlag(cmd *cobra.Command, n *int64, usage string) {
	cmd.Flags().VarP(cli.Whole("tokens", n, 1, policy.MaxTokens), "tokens", "n", usage)
}

// addLeaveFlag adds --leave.
func addLeaveFlag(cmd *cobra.Command, o *fetch.LeaveOption) {
	cmd.Flags().Var(cli.NewValue("tokens", policy.Leave(*o).String(), func(s string) (err error) {
		*o, err = fetch.ParseLeave(s)
		return err
	}), "leave", "what must be left: a number of tokens, or of percent of the capacity, as 20%")
}
