package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

// Exit codes.
const (
	exitOK     = 0 // taken, or done
	exitFailed = 1 // as for a file that is missing or can't be read
	exitUsage  = 2
	exitDenied = 3 // the bucket holds too few tokens
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
	func(e env) *cobra.Command { return newReplayCommand(e.stdin, e.stdout, e.stderr) },
	func(e env) *cobra.Command { return cli.VersionCommand("consumer", e.stdout) },
}

// errDenied ends a command whose denial is already on stdout.
var errDenied = errors.New("denied")

// run runs the command that the arguments name and returns the exit code.
func run(ctx context.Context, args []string, environ fields.Environment, stdin io.Reader, stdout,
	stderr io.Writer) int {
	root := newRootCommand(env{environ, stdin, stdout, stderr})
	cli.RefuseTopics(root)
	root.SetArgs(cli.Args(args))
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errDenied):
		return exitDenied
	case isUsage(err) && !cli.Unreadable(err):
		fmt.Fprintf(stderr, "consumer: %v\nRun 'consumer --help' for usage.\n", err)
		return exitUsage
	case errors.Is(err, errWrongFiles):
		return exitUsage
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintf(stderr, "consumer: interrupted: %v\n", err)
		return exitFailed
	}
	fmt.Fprintf(stderr, "consumer: %v\n", err)
	if what := advice(err); what != "" {
		fmt.Fprintln(stderr, what)
	}
	return exitFailed
}

func isUsage(err error) bool {
	var usage cli.UsageError
	return errors.As(err, &usage) || errors.Is(err, fetch.ErrInvalidKey) || errors.Is(err, fetch.ErrInvalidAmount) ||
		errors.Is(err, fetch.ErrInvalidTTL) || errors.Is(err, fetch.ErrInvalidID)
}

// advice says what to do about an error.
func advice(err error) string {
	switch {
	case errors.Is(err, fetch.ErrUnknownBucket):
		return "Check the spelling and the Redis address (--redis), add the bucket or a template to the refiller's " +
			"configuration, or wait a second, if the refiller has just started."
	case errors.Is(err, fetch.ErrLazyBucket):
		return "Set enforce: refilled for the template in the refiller's configuration, or take without an id."
	case errors.Is(err, fetch.ErrMalformedBucket):
		return "Another program uses this key: name the bucket differently, or point --redis at another database."
	case errors.Is(err, fetch.ErrTooManyBuckets):
		return "Wait until buckets that nobody takes from have expired, or raise max_keys in the refiller's configuration."
	case errors.Is(err, fetch.ErrExceedsCapacity):
		return "Ask for no more than the capacity (-n), or raise it in the refiller's configuration."
	case errors.Is(err, fetch.ErrNotHeld):
		return "Check the id. A reservation is remembered for a minute after it was settled or its time was over."
	case errors.Is(err, fetch.ErrIDInUse):
		return "The id stands for a reservation of another number of tokens, or for one that has ended: choose another " +
			"(--id)."
	case slices.Contains([]fetch.Reason{fetch.ReasonMemory, fetch.ReasonDisk, fetch.ReasonReadOnly, fetch.ReasonLoading},
		fetch.ReasonOf(err)):
		return "Redis runs, and refuses writes: look at its log, its memory, its disk and whether it is the primary."
	case errors.Is(err, fetch.ErrUnavailable):
		const check = "Check that Redis runs, and that its address and credentials are right (--redis and so on, or " +
			"REFILLER_REDIS_ variables)."
		if redisconn.Unsent(err) {
			return check
		}
		return check + " The command may have had its effect."
	}
	return ""
}

func newRootCommand(e env) *cobra.Command {
	root := cli.Root(&cobra.Command{
		Use:   "consumer",
		Short: "Take tokens from buckets in Redis",
		Long: `Take tokens from buckets in Redis.

Exit codes: 0 taken or done, 1 error, 2 wrong usage, 3 denied: the bucket holds too few tokens.`,
	}, e.stdin, e.stdout, e.stderr)
	root.CompletionOptions.HiddenDefaultCmd = true
	for _, command := range commands {
		root.AddCommand(command(e))
	}
	return root
}

// oneKey checks that a command gets the bucket's name and nothing else.
var oneKey = cli.Positional(cobra.ExactArgs(1))
