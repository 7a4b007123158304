package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
)

func newCheckCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "check FILE...",
		Short: "Validate the sidecar's files of limits",
		Long: `Validate files of rate limits for Envoy (serve --envoy) and of limits by name (serve --limits), without
connecting to anything. The exit code is 0, 2 with every problem on stderr, or 1 if a file can't be read.`,
		Example: "  consumer check edge.yaml limits.yaml",
		Args:    usageArgs(cobra.MinimumNArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			var errs []error
			forEnvoy := make(map[string][]byte)
			for _, path := range args {
				data, err := os.ReadFile(path)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				if !isNamed(data) {
					forEnvoy[path] = data
					continue
				}
				set, err := limits.Parse(path, data, nil, nil)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				fmt.Fprintf(e.stdout, "%s: ok: %d limits\n", path, len(set.Names()))
			}
			all, err := envoy.Parse(forEnvoy, nil)
			if err != nil {
				errs = append(errs, err)
			}
			if err := errors.Join(errs...); err != nil {
				return cli.Usage(err)
			}
			for _, path := range args {
				if forEnvoy[path] != nil {
					fmt.Fprintf(e.stdout, "%s: ok: rate limits for envoy, %s\n", path, all.Describe(path))
				}
			}
			return nil
		},
	}
}

// isNamed reports whether a file is one of limits by name; what it can't tell is for Envoy.
func isNamed(data []byte) bool {
	var top map[string]yaml.Node
	if yaml.Unmarshal(data, &top) != nil {
		return false
	}
	_, named := top["limits"]
	return named
}
