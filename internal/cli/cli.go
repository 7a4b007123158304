// Package cli holds what the command lines of both programs have in common.
package cli

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// UsageError is wrong usage of a command.
type UsageError struct{ error }

// Usage marks an error as wrong usage.
func Usage(err error) error { return UsageError{err} }

// Unwrap returns what is wrong.
func (e UsageError) Unwrap() error { return e.error }

// Root makes a command that of a program, whose help lists its subcommands in the order in which they are added.
func Root(root *cobra.Command, stdin io.Reader, stdout, stderr io.Writer) *cobra.Command {
	cobra.EnableCommandSorting = false // the setting is global
	root.Version = Version()
	root.SilenceUsage = true
	root.SilenceErrors = true
	root.Args = UnknownCommand
	root.RunE = func(*cobra.Command, []string) error { return Usage(errors.New("which command?")) }
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { _ = writeHelp(cmd.OutOrStdout(), cmd) }) // nobody to tell
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		if bad := (*pflag.InvalidValueError)(nil); errors.As(err, &bad) {
			f := bad.GetFlag()
			err = fmt.Errorf("--%s %s: %w", f.Name, fields.Quote(bad.GetValue()), Wanted(f, bad.Unwrap()))
		}
		return Usage(err)
	})
	return root
}

// wants are what values of Go's own types are to be.
var wants = map[string]string{
	"bool": "true or false", "int": "a whole number", "duration": "a duration, such as 500ms, 10s or 5m",
}

// Wanted is what is wrong with a value of a flag: what it is to be, rather than an error of Go's own.
func Wanted(f *pflag.Flag, err error) error {
	if want := wants[f.Value.Type()]; want != "" {
		return errors.New("want " + want)
	}
	return err
}

// Positional has a check of positional arguments report wrong usage: what was given, and what the command wants.
func Positional(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if check(cmd, args) == nil {
			return nil
		}
		given := "no argument"
		if len(args) > 0 {
			given = "arguments"
			for _, arg := range args {
				given += " " + fields.Quote(arg)
			}
		}
		return Usage(fmt.Errorf("%s: want %s", given, cmd.UseLine()))
	}
}

// OutputFlag gives a command the flag --output, the form of its answer, and has it refuse any other than text and JSON.
func OutputFlag(cmd *cobra.Command, form *string) {
	cmd.Flags().StringVarP(form, "output", "o", "text", "text or json")
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if *form != "text" && *form != "json" {
			return Usage(fmt.Errorf("--output %q: want text or json", *form))
		}
		return nil
	}
}

// UnknownCommand takes an argument of a command for the name of one of its own commands that there isn't: wrong usage.
func UnknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	msg := fmt.Sprintf("unknown command %s for %q", fields.Quote(args[0]), cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		msg += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return Usage(errors.New(msg))
}

// RefuseTopics has the help of a program whose commands have all been added refuse a topic that is none of them.
func RefuseTopics(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	for _, help := range root.Commands() {
		if help.Name() == "help" {
			help.Args = func(_ *cobra.Command, args []string) error {
				of, rest, err := root.Find(args)
				if err != nil || !of.HasSubCommands() {
					return err
				}
				return UnknownCommand(of, rest)
			}
		}
	}
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
		Use: "version", Short: "Print the version", Args: Positional(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(stdout, program, "version", Version())
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
