package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/spf13/cobra"
)

// These exit codes are common to both programs.
const (
	ExitOK     = 0 // the command is done, or was asked to stop
	ExitFailed = 1 // the command failed, for example because a file can't be read
	ExitUsage  = 2 // wrong usage, or a wrong configuration
)

// UsageError is the error of a command that was used wrongly.
type UsageError struct{ error }

// Usage marks an error as wrong usage.
func Usage(err error) error { return UsageError{err} }

// Unwrap returns the error that Usage marked.
func (e UsageError) Unwrap() error { return e.error }

// Unreadable reports whether an error means that a file is missing or can't be read. In every command such an error
// counts as a failure, and not as wrong usage.
func Unreadable(err error) bool {
	var of *fs.PathError
	return errors.As(err, &of)
}

// Ending describes how a program ends after an error that Matches accepts. Code is the exit code. Text returns the text
// for stderr. If Text is nil, the program writes nothing.
type Ending struct {
	Matches func(error) bool
	Code    int
	Text    func(error) string
}

// Is returns a function that reports whether an error is target, as errors.Is does.
func Is(target error) func(error) bool {
	return func(err error) bool { return errors.Is(err, target) }
}

// Interrupted returns a function that reports whether an error was caused by the cancellation of ctx.
func Interrupted(ctx context.Context) func(error) bool {
	return func(err error) bool { return ctx.Err() != nil && errors.Is(err, context.Canceled) }
}

// Execute runs the command that the arguments name and returns the exit code. If the command fails, the first ending
// that matches the error determines how the program ends. If none matches, the exit code is ExitUsage or ExitFailed,
// and Execute writes text(error) to stderr.
func Execute(ctx context.Context, root *cobra.Command, args []string, endings []Ending, text func(error) string) int {
	defer flushErr(root)
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

// UsageText returns a function for the Text of an Ending after wrong usage. To the text it adds a line that names the
// program's help.
func UsageText(program string, text func(error) string) func(error) string {
	return func(err error) string {
		return fmt.Sprintf("%s: %s\nRun '%s --help' for usage.", program, text(err), program)
	}
}

// withLongVersion replaces -version, if it is the only argument, by --version. Go programs often have -version, while
// cobra has --version.
func withLongVersion(args []string) []string {
	if len(args) == 1 && args[0] == "-version" {
		return []string{"--version"}
	}
	return args
}
