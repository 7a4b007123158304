package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

// connection has the settings with which a command reaches the servers. They come from a configuration file, from
// variables and from flags. Variables override the file, and flags override both. The file may be missing.
type connection struct {
	env
	path      string // of the file; empty if there is none
	fromFlags []config.Override
}

// addFlags adds --config and the flags that addServerFlags adds.
func (c *connection) addFlags(cmd *cobra.Command, families ...string) {
	cmd.Flags().StringVarP(&c.path, "config", "c", "",
		"configuration file with the addresses and credentials of the servers")
	c.addServerFlags(cmd, families...)
}

// addServerFlags adds the flags of configuration variables in the given families. A family is a prefix of names, such
// as redis.
func (c *connection) addServerFlags(cmd *cobra.Command, families ...string) {
	cli.VariableFlags(cmd, config.Variables(), &c.fromFlags, families...)
}

// load reads the configuration. Without a file the configuration has only the settings that reach the servers.
func (c *connection) load() (config.Config, error) {
	if c.path == "" {
		return config.Connections(c.Environ, c.fromFlags...)
	}
	return config.Load(config.Source{Path: c.path, Env: c.Environ, Flags: c.fromFlags})
}
