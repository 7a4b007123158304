package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
)

// output is the form in which a command prints its result.
type output struct{ format string }

func (o *output) addFlags(cmd *cobra.Command) { cli.OutputFlag(cmd, &o.format) }

// print writes text, or value as JSON.
func (o *output) print(w io.Writer, text string, value any) error {
	if o.format == "json" {
		if err := cli.WriteJSON(w, value, ""); err != nil {
			return fmt.Errorf("write result: %w", err)
		}
		return nil
	}
	if _, err := fmt.Fprintln(w, text); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// held describes how many tokens a bucket holds.
func held(r fetch.Result) string {
	text := fmt.Sprintf("%d tokens", r.Remaining)
	if r.Limit > 0 {
		text = fmt.Sprintf("%d of %d tokens", r.Remaining, r.Limit)
	}
	return text
}

// in describes the time that is d from now, for example as "in 5s".
func in(d time.Duration) string {
	switch {
	case d == fetch.Never:
		return "at an unknown time"
	case d > time.Second:
		d = d.Round(100 * time.Millisecond)
	case d > time.Millisecond:
		d = d.Round(time.Millisecond)
	}
	text := d.String() // for example 1h0m0s
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return "in " + text
}

// plural returns a number with the word token or tokens.
func plural(n int64) string { return count(n, "token") }

// count returns a number with the name of the thing that it counts, in the plural unless n is 1.
func count(n int64, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}
