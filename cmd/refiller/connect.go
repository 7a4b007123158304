package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
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
	for _, v := range config.Variables() {
		for _, family := range families {
			if name := v.Flag(); name == family || strings.HasPrefix(name, family+"-") {
				cmd.Flags().Var(laidFlag{v, &c.laid}, name, v.Usage())
			}
		}
	}
}

// load reads the configuration. Without a file it says how the servers are reached and nothing else.
func (c *connection) load() (config.Config, error) {
	if c.path == "" {
		return config.Connections(c.environ, c.laid...)
	}
	return config.Load(config.Source{Path: c.path, Env: c.environ, Flags: c.laid})
}

// laidFlag is a flag whose value stands instead of a field of the file.
type laidFlag struct {
	variable fields.Variable
	all      *[]config.Override
}

// Set implements pflag.Value.
func (f laidFlag) Set(text string) error {
	*f.all = append(*f.all, config.Override{Source: "--" + f.variable.Flag(), Field: f.variable.Field, Value: text})
	return nil
}

// String implements pflag.Value.
func (f laidFlag) String() string { return "" }

// Type implements pflag.Value.
func (f laidFlag) Type() string { return "string" }
