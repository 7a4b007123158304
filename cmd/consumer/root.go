package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/limit"
)

// exitDenied is the exit code if the bucket has too few tokens. Package cli has the other exit codes.
const exitDenied = 3

// env is the part of the process that a command may use, such as its output and its environment.
type env = cli.Env

// commands makes the subcommands, in the order in which the help lists them.
var commands = []func(env) *cobra.Command{
	newTakeCommand,
	newTakeAllCommand,
	newPeekCommand,
	newReturnCommand,
	newWaitCommand,
	newReserveCommand,
	newSettleCommand,
	newCancelCommand,
	newServeCommand,
	newCheckCommand,
	newLoadCommand,
	func(e env) *cobra.Command { return newReplayCommand(e.Stdin, e.Stdout, e.Stderr) },
	func(env) *cobra.Command { return cli.ManCommand() },
	func(e env) *cobra.Command { return cli.VersionCommand("consumer", e.Stdout) },
}

// errDenied ends a command that has already written a denial to stdout.
var errDenied = errors.New("denied")

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, e env) int {
	return cli.Execute(ctx, newRootCommand(e), args, []cli.Ending{
		{Matches: cli.Is(errDenied), Code: exitDenied},
		{Matches: isInvalid, Code: cli.ExitUsage, Text: cli.UsageText("consumer", error.Error)},
		{Matches: cli.Is(errWrongFiles), Code: cli.ExitUsage},
		{Matches: cli.Interrupted(ctx), Code: cli.ExitFailed, Text: func(err error) string {
			return fmt.Sprintf("consumer: interrupted: %v", err)
		}},
	}, withAdvice)
}

// isInvalid reports whether an error is about an argument or a flag.
func isInvalid(err error) bool { return limit.OutcomeOf(err).HTTP == http.StatusBadRequest }

// withAdvice returns the text of an error. If there is advice about the error, a line with the advice follows.
func withAdvice(err error) string {
	if what := advice(err); what != "" {
		return err.Error() + "\n" + what
	}
	return err.Error()
}

// advice returns a line of advice about an error. It is empty if there is none.
func advice(err error) string {
	switch {
	case errors.Is(err, fetch.ErrUnknownBucket):
		return "Check the spelling of the key and the Redis address (--redis). If the bucket is new, add it or a template " +
			"to the refiller's configuration. If the refiller has just started, wait a second."
	case errors.Is(err, fetch.ErrLazyBucket):
		return "Set enforce: refilled for the template in the refiller's configuration, or take without an id."
	case errors.Is(err, fetch.ErrMalformedBucket):
		return "Another program uses this key. Choose another name for the bucket, or another database (--redis)."
	case errors.Is(err, fetch.ErrTooManyBuckets):
		return "Wait until unused buckets have expired, or raise max_keys in the refiller's configuration."
	case errors.Is(err, fetch.ErrExceedsCapacity):
		return "Ask for no more than the capacity (-n), or raise the capacity in the refiller's configuration."
	case errors.Is(err, fetch.ErrNotHeld):
		return "Check the id. A reservation is remembered for a minute after it was settled or has expired."
	case errors.Is(err, fetch.ErrIDInUse):
		return "The id belongs to a reservation of another number of tokens, or to a reservation that has ended. Choose " +
			"another id (--id)."
	case errors.Is(err, fetch.ErrRequestReused):
		return "The id belongs to a take of another number of tokens. Choose another id (--request-id)."
	case redisconn.WantsPassword(err):
		return redisconn.PasswordAdvice
	case errors.Is(err, syscall.EADDRINUSE):
		return "Another program listens on this address, perhaps another sidecar. Choose other addresses (--http, " +
			"--grpc, --admin)."
	case slices.Contains([]fetch.Reason{fetch.ReasonMemory, fetch.ReasonDisk, fetch.ReasonReadOnly, fetch.ReasonLoading},
		fetch.ReasonOf(err)):
		return "Redis is running, but it refuses writes. Check its log, its memory and its disk, and whether it is the " +
			"primary."
	case errors.Is(err, fetch.ErrUnavailable):
		const check = "Check that Redis runs, and that its address and credentials are right (the --redis flags or the " +
			"REFILLER_REDIS_ variables)."
		if redisconn.Unsent(err) {
			return check
		}
		return check + " The command may have taken effect."
	}
	return ""
}

func newRootCommand(e env) *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "consumer",
		Short: "Take tokens from buckets in Redis",
		Long: `Take tokens from buckets in Redis. The default URL of Redis is redis://127.0.0.1:6379/0.

Exit codes: 0 success, 1 error, 2 wrong usage, 3 denied, because the bucket has too few tokens.`,
	}, e)
	root.CompletionOptions.HiddenDefaultCmd = true
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}

// oneKey checks that a command has exactly one argument, the bucket's name.
var oneKey = cli.Positional(cobra.ExactArgs(1))
