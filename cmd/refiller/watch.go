package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
)

const minWatch = 100 * time.Millisecond

// display is how a command shows something: once or again and again, as text or JSON.
type display struct {
	every  time.Duration
	output string
	cmd    *cobra.Command
}

func (d *display) flags(cmd *cobra.Command) {
	d.cmd = cmd
	cmd.Flags().DurationVarP(&d.every, "watch", "w", time.Second, "show it again and again, so often, until interrupted: --watch or --watch=5s")
	cmd.Flags().Lookup("watch").NoOptDefVal = "1s"
	cmd.Flags().StringVarP(&d.output, "output", "o", "text", "text or json")
}

func (d *display) validate() error {
	if d.output != "text" && d.output != "json" {
		return usageError{fmt.Errorf("--output %q: want text or json", d.output)}
	}
	if d.cmd.Flags().Changed("watch") && d.every < minWatch {
		return usageError{fmt.Errorf("--watch %s: want %s or more", d.every, minWatch)}
	}
	return nil
}

// show calls what writes it, again and again until ctx ends if that is asked for. Then whoever doesn't answer is shown as
// such and asked again; text takes the place of the one before, and JSON is an object per line.
func (d *display) show(ctx context.Context, w io.Writer, write func(context.Context, io.Writer) error) error {
	if !d.cmd.Flags().Changed("watch") {
		return write(ctx, w)
	}
	again := time.NewTicker(d.every)
	defer again.Stop()
	for {
		var out bytes.Buffer
		if err := write(ctx, &out); err != nil && ctx.Err() == nil {
			if d.output == "json" {
				return err
			}
			fmt.Fprintln(&out, err)
		}
		if d.output != "json" {
			fmt.Fprint(w, "\x1b[H\x1b[2J") // to the upper left, and clear
		}
		if _, err := out.WriteTo(w); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		}
	}
}
