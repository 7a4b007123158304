package main

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

// exitOthers is the exit code of a command that finds differences. The others are those of package cli.
const exitOthers = 3

// env is what a command may touch of the process.
type env = cli.Env

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
	func(e env) *cobra.Command { return cli.VersionCommand("refiller", e.Stdout) },
}

// endings are how a command ends with errors of its own.
var endings = []cli.Ending{
	{Matches: cli.Is(errDifferent), Code: exitOthers},
	{Matches: isProblems, Code: cli.ExitUsage, Text: error.Error}, // one line each, in the form that editors jump to
}

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, e env) int {
	interrupted := cli.Ending{Matches: func(err error) bool {
		return ctx.Err() != nil && errors.Is(err, context.Canceled)
	}, Code: cli.ExitOK}
	// Errors of package lua begin with the program's name, too.
	text := func(err error) string { return strings.TrimPrefix(err.Error(), "refiller: ") }
	return cli.Execute(ctx, rootCommand(e), args, slices.Insert(slices.Clone(endings), 0, interrupted), text)
}

// isProblems reports whether an error is the problems of a configuration that could be read.
func isProblems(err error) bool {
	var problems config.Problems
	return errors.As(err, &problems) && !cli.Unreadable(err)
}

func rootCommand(e env) *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "refiller",
		Short: "Keep token buckets in Redis full",
	}, e)
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}
