package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/sidecar/answer"
)

func newPeekCommand(e env) *cobra.Command {
	conn, out := connection{environ: e.Environ}, output{}
	cmd := &cobra.Command{
		Use:   "peek KEY",
		Short: "Show how many tokens a bucket has, without taking any",
		Args:  oneKey,
		RunE: func(cmd *cobra.Command, args []string) error {
			key := args[0]
			return conn.with(func(c *fetch.Client) error {
				r, err := c.Peek(cmd.Context(), key)
				if err != nil {
					return err
				}
				text := held(r)
				if r.Outstanding > 0 {
					text += fmt.Sprintf("; consumers hold %d more", r.Outstanding)
				}
				if r.ResetAfter > 0 {
					text += "; full " + in(r.ResetAfter)
				}
				return out.print(e.Stdout, text, answer.NewResult(key, r))
			})
		},
	}
	conn.addFlags(cmd)
	out.addFlags(cmd)
	return cmd
}
