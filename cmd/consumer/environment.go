package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

// serveVariables is the prefix of the variables for the sidecar's flags.
const serveVariables = fields.Prefix + "SERVE_"

// variableOf returns the variable for a flag of the sidecar, such as REFILLER_SERVE_TLS_CERT for --tls-cert.
func variableOf(f *pflag.Flag) string {
	return serveVariables + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
}

// describeVariables adds the name of its variable to the description of each flag that the command has so far.
func describeVariables(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Usage += " ($" + variableOf(f) + ")" })
}

// fromEnvironment sets flags from their variables, unless the command line has the flags. Commas separate the items of
// a list.
func fromEnvironment(cmd *cobra.Command, environ fields.Environment) error {
	var known []string
	var problems fields.Problems
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		name := variableOf(f)
		if !strings.Contains(f.Usage, "$"+name) { // it has a variable of another name
			return
		}
		known = append(known, name)
		text := environ[name]
		if f.Changed || text == "" {
			return
		}
		var err error
		if list, ok := f.Value.(pflag.SliceValue); ok {
			err = list.Replace(strings.Split(text, ","))
		} else {
			err = f.Value.Set(text)
		}
		if err != nil {
			msg := fmt.Sprintf("%s: %v", fields.Quote(text), cli.Wanted(f, err))
			problems = append(problems, fields.Problem{Source: name, Msg: msg})
		}
	})
	problems = append(problems, environ.Misspelled(known, []string{serveVariables})...)
	if len(problems) > 0 {
		return cli.Usage(problems)
	}
	return nil
}
