package main

import (
	"context"
	"errors"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

// exitOthers is the exit code if a configuration differs from the policies in force, or would be refused. Package cli
// has the other exit codes.
const exitOthers = 3

// env is the part of the process that a command may use, such as its output and its environment.
type env = cli.Env

// commands makes the subcommands, in the order in which the help lists them.
var commands = []func(env) *cobra.Command{
	runCommand,
	checkCommand,
	diffCommand,
	bumpCommand,
	deleteCommand,
	configCommand,
	statusCommand,
	grantCommand,
	resetCommand,
	limitCommand,
	poolCommand,
	doctorCommand,
	devCommand,
	func(env) *cobra.Command { return cli.ManCommand() },
	func(e env) *cobra.Command { return cli.VersionCommand("refiller", e.Stdout) },
}

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, e env) int {
	return cli.Execute(ctx, rootCommand(e), args, []cli.Ending{
		{Matches: cli.Interrupted(ctx), Code: cli.ExitOK},
		{Matches: cli.Is(errDifferent), Code: exitOthers},
		{Matches: cli.Is(errRefused), Code: exitOthers, Text: error.Error},
		// Each problem is on a separate line, in a format from which editors can jump to its place.
		{Matches: isProblems, Code: cli.ExitUsage, Text: error.Error},
	}, withAdvice)
}

// withAdvice returns the text of an error. If there is advice about the error, a line with the advice follows.
func withAdvice(err error) string {
	text := strings.TrimPrefix(err.Error(), "refiller: ") // errors of package lua have this prefix, too
	switch {
	case redisconn.WantsPassword(err):
		text += "\n" + redisconn.PasswordAdvice
	case errors.Is(err, syscall.EADDRINUSE):
		text += "\nAnother program, perhaps another replica, listens on this address: choose another with --listen. " +
			"With 127.0.0.1:0, the system chooses a free port."
	}
	return text
}

// isProblems reports whether an error lists problems of a configuration. An error about an unreadable file doesn't
// count.
func isProblems(err error) bool {
	var problems config.Problems
	return errors.As(err, &problems) && !cli.Unreadable(err)
}

func rootCommand(e env) *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "refiller",
		Short: "Refill token buckets in Redis",
		Long: `Refill token buckets in Redis. The command run starts a replica, which refills the buckets. The other
commands are for operators.

The exit code is 0 if the command succeeded, 1 if it failed, and 2 if it was used wrongly or the configuration is
invalid. The commands check and diff also use 3: the configuration would be refused, or it differs from what is in
force.`,
	}, e)
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}
