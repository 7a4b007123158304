// Package cli holds what the command lines of both programs have in common.
package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/build"
	"github.com/tokenrefill/refiller/internal/fields"
)

// UnknownCommand takes an argument of a command for the name of one of its own commands that there isn't.
func UnknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("unknown command %s for %q", fields.Quote(args[0]), cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		msg += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return errors.New(msg)
}

// Unreadable tells whether an error is that a file is missing or can't be read. It is a failure and no wrong usage, in
// every command.
func Unreadable(err error) bool {
	var of *fs.PathError
	return errors.As(err, &of)
}

// VersionCommand prints which version of a program this is.
func VersionCommand(program string, stdout io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version",
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(stdout, program, "version", build.Version())
			return err
		},
	}
}

// Args are a program's arguments with -version, as programs of Go have it, written as --version, as cobra wants it.
func Args(args []string) []string {
	if len(args) == 1 && args[0] == "-version" {
		return []string{"--version"}
	}
	return args
}
