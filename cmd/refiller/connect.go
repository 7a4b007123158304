package main

import (
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
)

// connection is how a command finds the servers: from a configuration file, or without one from variables alone, and
// from flags in any case.
type connection struct {
	env
	path string // of the file; empty: there is none
	laid []config.Override
}

// addFlags adds --config, and the flags of servers.
func (c *connection) addFlags(cmd *cobra.Command, families ...string) {
	cmd.Flags().StringVarP(&c.path, "config", "c", "", "configuration file to take addresses and credentials from")
	c.addServerFlags(cmd, families...)
}

// addServerFlags adds a flag for each variable whose flag begins with one of the families.
func (c *connection) addServerFlags(cmd *cobra.Command, families ...string) {
	cli.VariableFlags(cmd, config.Variables(), &c.laid, families...)
}

// load reads the configuration. Without a file it says how the servers are reached and nothing else.
func (c *connection) load() (config.Config, error) {
	if c.path == "" {
		return config.Connections(c.Environ, c.laid...)
	}
	return config.Load(config.Source{Path: c.path, Env: c.Environ, Flags: c.laid})
}
