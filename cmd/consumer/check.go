package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
)

// errWrongFiles ends a command that has reported each problem.
var errWrongFiles = errors.New("there are invalid files")

func newCheckCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE...",
		Short: "Validate the files of limits of consumer serve",
		Long: `Validate files of limits for the flags --envoy and --limits of "consumer serve". If an argument is a
directory, all YAML files in it are validated. The command connects to no server. It writes every problem to stderr.

Exit codes: 0 all files are valid, 1 a file can't be read, 2 a file is invalid.`,
		Example: "  consumer check edge.yaml limits.yaml",
		Args:    cli.Positional(cobra.MinimumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			var failed []error
			wrong := false
			refuse := func(err error) {
				wrong = true
				text := strings.NewReplacer(limits.ErrFile.Error()+": ", "", envoy.ErrLimits.Error()+": ", "").Replace(err.Error())
				fmt.Fprintln(e.Stderr, text)
			}
			forEnvoy := make(map[string][]byte)
			contents := make(map[string][]byte)
			for _, path := range args {
				if err := readAll(path, contents); err != nil {
					failed = append(failed, err)
				}
			}
			paths := slices.Sorted(maps.Keys(contents))
			for _, path := range paths {
				data := contents[path]
				if !isNamed(data) {
					forEnvoy[path] = data
					continue
				}
				set, err := limits.Parse(path, data, nil, nil)
				if err != nil {
					refuse(err)
					continue
				}
				fmt.Fprintf(e.Stdout, "%s: ok: %s\n", path, count(int64(len(set.Names())), "limit"))
			}
			all, err := envoy.Parse(forEnvoy, nil)
			if err != nil {
				refuse(err)
			}
			switch {
			case len(failed) > 0:
				return errors.Join(failed...)
			case wrong:
				return errWrongFiles
			}
			for _, path := range paths {
				if forEnvoy[path] != nil {
					domain, n := all.Describe(path)
					fmt.Fprintf(e.Stdout, "%s: ok: rate limits for envoy, domain %s: %s\n", path, domain, count(int64(n), "limit"))
				}
			}
			return nil
		},
	}
}

// isNamed reports whether a file has limits by name. If it can't be parsed, it counts as a file for Envoy.
func isNamed(data []byte) bool {
	var top map[string]yaml.Node
	if yaml.Unmarshal(data, &top) != nil {
		return false
	}
	_, named := top["limits"]
	return named
}
