// Package cli has the common parts of both programs' command lines.
package cli

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// Root makes root the root command of a program and returns it. The help lists subcommands in the order in which they
// were added.
func Root(root *cobra.Command, e Env) *cobra.Command {
	cobra.EnableCommandSorting = false // the setting is global
	root.Version = Version()
	root.SilenceUsage = true
	root.SilenceErrors = true
	root.Args = UnknownCommand
	root.RunE = func(*cobra.Command, []string) error { return Usage(errors.New("no command was given")) }
	root.SetIn(e.Stdin)
	root.SetOut(e.Stdout)
	root.SetErr(e.Stderr)
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) { _ = writeHelp(cmd.OutOrStdout(), cmd) }) // no way to report it
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		if bad := (*pflag.InvalidValueError)(nil); errors.As(err, &bad) {
			f := bad.GetFlag()
			err = fmt.Errorf("--%s %s: %w", f.Name, fields.Quote(bad.GetValue()), Wanted(f, bad.Unwrap()))
		}
		return Usage(err)
	})
	return root
}

// Positional returns a check of positional arguments that fails if check does. The error is wrong usage. It has the
// arguments that were given, and the arguments that the command wants.
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

// UnknownCommand checks the arguments of a command that only has subcommands. Any argument is wrong usage, because it
// isn't the name of a subcommand. The error suggests subcommands with similar names.
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

// RefuseTopics makes the help command fail for topics that are not commands. It must be called after all commands were
// added.
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

// VersionCommand returns a command that prints the program's version.
func VersionCommand(program string, stdout io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: Positional(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(stdout, program, "version", Version())
			return err
		},
	}
}
