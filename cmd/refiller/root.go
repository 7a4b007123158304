package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/build"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/fields"
)

// Exit codes.
const (
	exitOK     = 0 // done, or asked to stop
	exitFailed = 1
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
	versionCommand,
}

// usageError is wrong usage of a command.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, environ fields.Environment, stdin io.Reader, stdout, stderr io.Writer) int {
	root := rootCommand(env{environ, stdin, stdout, stderr})
	root.SetArgs(build.Args(args))
	err := root.ExecuteContext(ctx)
	if err == nil || ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return exitOK
	}
	var problems config.Problems
	var usage usageError
	switch {
	case errors.Is(err, errDifferent):
		return exitOthers
	case errors.As(err, &problems): // one line each, in the form that editors jump to
		fmt.Fprintln(stderr, err)
		return exitUsage
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "refiller: %v\nRun 'refiller --help' for usage.\n", err)
		return exitUsage
	default:
		fmt.Fprintf(stderr, "refiller: %v\n", err)
		return exitFailed
	}
}

func rootCommand(e env) *cobra.Command {
	root := &cobra.Command{
		Use:           "refiller",
		Short:         "Keep token buckets in Redis full",
		Version:       build.Version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          unknownCommand,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("which command?")}
		},
	}
	root.SetIn(e.stdin)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	cobra.EnableCommandSorting = false
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}

func versionCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: usageArgs(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(e.stdout, "refiller version", build.Version())
			return err
		},
	}
}

// unknownCommand takes a command's argument for the name of a command of its own that there isn't.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("unknown command %s for %q", fields.Quote(args[0]), cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		msg += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return usageError{errors.New(msg)}
}

// usageArgs makes a check of positional arguments report wrong usage.
func usageArgs(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}
