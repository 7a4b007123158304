package main

import (
	"strconv"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/policy"
)

// addTokensFlag adds -n, whose default is what n holds.
func addTokensFlag(cmd *cobra.Command, n *int64, usage string) {
	cmd.Flags().VarP(value{"tokens", strconv.FormatInt(*n, 10), func(s string) (err error) {
		*n, err = parseWhole(s, 1, policy.MaxTokens)
		return err
	}}, "tokens", "n", usage)
}
