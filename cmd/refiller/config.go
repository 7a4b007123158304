package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

func configCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print information about the configuration file",
		Args:  cli.UnknownCommand,
		RunE: func(*cobra.Command, []string) error {
			return cli.Usage(errors.New("config: no subcommand was given: want schema"))
		},
	}
	cmd.AddCommand(&cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file, for editors",
		Long: `Print the JSON Schema of the configuration file. Editors use the schema to complete and check the fields of
YAML files. Write the schema to a file, and begin the configuration with a line such as

  # yaml-language-server: $schema=refiller.schema.json`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := e.Stdout.Write(config.Schema)
			return err
		},
	})
	return cmd
}
