package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/policy"
)

// addTokensFlag adds -n, whose default is what n holds.
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
