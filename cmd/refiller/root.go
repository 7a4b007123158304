package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// Exit codes.
const (
	exitOK     = 0 // done, or asked to stop
	exitFailed = 1 // as for a file that is missing or can't be read
	exitUsage  = 2 // bad usage or bad configuration
	exitOthers = 3 // there are differences
)

// env is what a command may touch of the process.
type env struct {
	environ fields.Environment
	stdin   io.Reader
	stdout  io.Writer
	stderr  io.Writer
}

// commands makes the subcommands, in the order in which the help lists them.
var commands = []func(env) *cobra.Command{
	runCommand,
	checkCommand,
	diffCommand,
	configCommand,
	statusCommand,
	grantCommand,
	resetCommand,
	limitCommand,
	poolCommand,
	doctorCommand,
	devCommand,
	func(e env) *cobra.Command { return cli.VersionCommand("refiller", e.stdout) },
}

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, environ fields.Environment, stdin io.Reader, stdout,
	stderr io.Writer) int {
	root := rootCommand(env{environ, stdin, stdout, stderr})
	cli.RefuseTopics(root)
	root.SetArgs(cli.Args(args))
	err := root.ExecuteContext(ctx)
	if err == nil || ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return exitOK
	}
	text := strings.TrimPrefix(err.Error(), "refiller: ") // which begins errors of package lua, too
	var problems config.Problems
	var usage cli.UsageError
	switch {
	case errors.Is(err, errDifferent):
		return exitOthers
	case cli.Unreadable(err):
		fmt.Fprintf(stderr, "refiller: %s\n", text)
		return exitFailed
	case errors.As(err, &problems): // one line each, in the form that editors jump to
		fmt.Fprintln(stderr, err)
		return exitUsage
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "refiller: %s\nRun 'refiller --help' for usage.\n", text)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "refiller: %s\n", text)
		return exitFailed
	}
}

func rootCommand(e env) *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "refiller",
		Short: "Keep token buckets in Redis full",
	}, e.stdin, e.stdout, e.stderr)
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}
