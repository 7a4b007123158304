package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

// connection has the settings with which a command reaches the servers. They come from a configuration file, which may
// be missing, from variables, which replace those of the file, and from flags, which replace either.
type connection struct {
	env
	path      string // of the file; empty: there is none
	fromFlags []config.Override
}

// addFlags adds --config and the flags that addServerFlags adds.
func (c *connection) addFlags(cmd *cobra.Command, families ...string) {
	cmd.Flags().StringVarP(&c.path, "config", "c", "", "configuration file to take addresses and credentials from")
	c.addServerFlags(cmd, families...)
}

// addServerFlags adds the flags of configuration variables whose names begin with one of the families, such as redis.
func (c *connection) addServerFlags(cmd *cobra.Command, families ...string) {
	cli.VariableFlags(cmd, config.Variables(), &c.fromFlags, families...)
}

// load reads the configuration. Without a file it has only the settings that reach the servers.
func (c *connection) load() (config.Config, error) {
	if c.path == "" {
		return config.Connections(c.Environ, c.fromFlags...)
	}
	return config.Load(config.Source{Path: c.path, Env: c.Environ, Flags: c.fromFlags})
}
