package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
)

func newReturnCommand(e env) *cobra.Command {
	conn := connection{environ: e.Environ}
	out := output{}
	n := int64(1)
	cmd := &cobra.Command{
		Use:   "return KEY",
		Short: "Return tokens that were taken and not used",
		Long:  "Return tokens to bucket KEY that were taken and not used. Tokens beyond the bucket's capacity are dropped.",
		Args:  oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			key := args[0]
			return conn.with(func(c *fetch.Client) error {
				if err := c.Return(cmd.Context(), key, n); err != nil {
					return err
				}
				dropped := c.Stats().Clamped // of this call, because the client made no other
				text := "returned: " + plural(n-dropped)
				if dropped > 0 {
					text += fmt.Sprintf("; %d dropped, because the bucket is full", dropped)
				}
				return out.print(e.Stdout, text, answer.Return{Key: key, Tokens: n - dropped})
			})
		},
	}
	addTokensFlag(cmd, &n, "number of tokens to return")
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}
