package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/terminal"
)

const minWatch = 100 * time.Millisecond

// display shows the output of a command once or repeatedly, as text or JSON.
type display struct {
	every  time.Duration
	output string
	cmd    *cobra.Command
}

func (d *display) flags(cmd *cobra.Command) {
	d.cmd = cmd
	cmd.Flags().DurationVarP(&d.every, "watch", "w", time.Second,
		"repeat the output at this interval until interrupted, 100ms or more, such as --watch=5s")
	cmd.Flags().Lookup("watch").NoOptDefVal = "1s"
	cli.OutputFlag(cmd, &d.output)
}

func (d *display) validate() error {
	if d.cmd.Flags().Changed("watch") && d.every < minWatch {
		return cli.Usage(fmt.Errorf("--watch %s: want %s or more", d.every, minWatch))
	}
	return nil
}

// isInterval reports whether the only argument of the command is a time for --watch. If a space separates the two, the
// time is a separate argument, and would be used as a bucket's key.
func (d *display) isInterval(args []string) bool {
	if len(args) != 1 || !d.cmd.Flags().Changed("watch") {
		return false
	}
	_, err := time.ParseDuration(args[0])
	return err == nil
}

// show calls write once. With --watch it calls write repeatedly until ctx ends. If write then fails, show writes the
// error and goes on. But if the output is JSON, show returns the error. On a terminal the new text replaces the
// previous one. JSON is one object per line.
func (d *display) show(ctx context.Context, e env, write func(context.Context, io.Writer, int) error) error {
	screen := terminal.Of(e.Stdout, e.Environ)
	if !d.cmd.Flags().Changed("watch") {
		return write(ctx, e.Stdout, screen.Width())
	}
	again := time.NewTicker(d.every)
	defer again.Stop()
	for first := true; ; first = false {
		var out bytes.Buffer
		if err := write(ctx, &out, screen.Width()); err != nil && ctx.Err() == nil {
			if d.output == "json" {
				return err
			}
			fmt.Fprintln(&out, err)
		}
		switch {
		case d.output == "json":
		case screen.Rewrites():
			fmt.Fprint(e.Stdout, "\x1b[H\x1b[2J") // move to the upper left, and clear the screen
		case !first:
			fmt.Fprintln(e.Stdout)
		}
		if _, err := out.WriteTo(e.Stdout); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again.C:
		}
	}
}
