package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/spf13/cobra"
)

// Exit codes that both programs have.
const (
	ExitOK     = 0 // done, or asked to stop
	ExitFailed = 1 // as for a file that is missing or can't be read
	ExitUsage  = 2 // wrong usage, or a wrong configuration
)

// UsageError is wrong usage of a command.
type UsageError struct{ error }

// Usage marks an error as wrong usage.
func Usage(err error) error { return UsageError{err} }

// Unwrap returns what is wrong.
func (e UsageError) Unwrap() error { return e.error }

// Unreadable reports whether an error is that a file is missing or can't be read. In every command it is a failure, and
// no wrong usage.
func Unreadable(err error) bool {
	var of *fs.PathError
	return errors.As(err, &of)
}

// Ending is how a program ends with some errors: its exit code and what it writes to stderr, nothing if Text is nil.
type Ending struct {
	Matches func(error) bool
	Code    int
	Text    func(error) string
}

// Is returns a function that reports whether an error is target.
func Is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

// Interrupted returns a function that reports whether an error is that ctx was cancelled.
func Interrupted(ctx context.Context) func(error) bool {
	return func(err error) bool { return ctx.Err() != nil && errors.Is(err, context.Canceled) }
}

// Execute runs the command that the arguments name and returns the exit code. The first of the endings that matches an
// error decides; the error of one that none matches is wrong usage or a failure, and is written as text says.
func Execute(ctx context.Context, root *cobra.Command, args []string, endings []Ending, text func(error) string) int {
	RefuseTopics(root)
	root.SetArgs(withHelp(root, withLongVersion(args)))
	err := root.ExecuteContext(ctx)
	if err == nil {
		return ExitOK
	}
	for _, e := range slices.Concat(endings, []Ending{{isUsage, ExitUsage, UsageText(root.Name(), text)}}) {
		if e.Matches(err) {
			if e.Text != nil {
				fmt.Fprintln(root.ErrOrStderr(), e.Text(err))
			}
			return e.Code
		}
	}
	fmt.Fprintf(root.ErrOrStderr(), "%s: %s\n", root.Name(), text(err))
	return ExitFailed
}

// isUsage reports whether an error is wrong usage.
func isUsage(err error) bool {
	var usage UsageError
	return errors.As(err, &usage) && !Unreadable(err)
}

// UsageText returns the Text of an Ending that is wrong usage of a program.
func UsageText(program string, text func(error) string) func(error) string {
	return func(err error) string {
		return fmt.Sprintf("%s: %s\nRun '%s --help' for usage.", program, text(err), program)
	}
}

// withLongVersion returns a program's arguments with -version, as programs of Go have it, as --version, which cobra
// knows.
func withLongVersion(args []string) []string {
	if len(args) == 1 && args[0] == "-version" {
		return []string{"--version"}
	}
	return args
}
