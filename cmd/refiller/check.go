package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

func checkCommand(e env) *cobra.Command {
	var output, shared string
	cmd := &cobra.Command{
		Use:   "check FILE|-",
		Short: "Validate a configuration",
		Long: `Validate a configuration as run would read it, with REFILLER_ variables laid over it, and without connecting to
anything; - stands for stdin. The exit code is 0, 2 with every problem and its line on stderr, or 1 if the file can't be
read. With -o json the answer is one object on stdout: file, ok, summary and problems (source, line, column, field,
message).

With --shared DOC the document DOC is laid over the file, as run --config-etcd does with the one in etcd.`,
		Args: cli.Positional(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			return check(e, args[0], shared, output == "json")
		},
	}
	cmd.Flags().StringVar(&shared, "shared", "", "file of a document to put into etcd")
	cli.OutputFlag(cmd, &output)
	return cmd
}

// checked is the answer of check in JSON.
type checked struct {
	File     string          `json:"file"`
	OK       bool            `json:"ok"`
	Summary  string          `json:"summary,omitempty"`
	Problems config.Problems `json:"problems"`
}

func check(e env, path, shared string, asJSON bool) error {
	c, err := loadFile(e, path, shared, nil)
	if path == "-" {
		path = "stdin"
	}
	var problems config.Problems
	if err != nil && !errors.As(err, &problems) {
		return err
	}
	if !asJSON {
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(e.Stdout, "%s: ok: %s\n", path, c.Summary())
		for _, t := range c.Templates.All() {
			fmt.Fprintf(e.Stdout, "  template %q: %d tokens at %s, %s\n", t.Prefix, t.Policy.Capacity, t.Policy.Rate, t.Enforce)
		}
		return err
	}
	answer := checked{File: path, OK: err == nil, Problems: problems}
	if answer.OK {
		answer.Summary, answer.Problems = c.Summary(), config.Problems{}
	}
	if writeErr := cli.WriteJSON(e.Stdout, answer, "  "); writeErr != nil {
		return writeErr
	}
	return err
}

// loadFile reads a configuration that an argument names, - for stdin, with the document in the file shared laid over
// it, if that isn't empty, and then the environment and flags.
func loadFile(e env, path, shared string, flags []config.Override) (config.Config, error) {
	source := config.Source{Path: path, Shared: config.Shared{Source: shared}, Env: e.Environ, Flags: flags}
	var err error
	if path == "-" {
		source.Path = "stdin"
		source.Data, err = io.ReadAll(io.LimitReader(e.Stdin, fields.MaxSize+1))
		if err != nil {
			return config.Config{}, fmt.Errorf("stdin: %w", err)
		}
	}
	if shared != "" {
		source.Shared.Data, err = os.ReadFile(shared)
		if err != nil {
			return config.Config{}, err
		}
	}
	return config.Load(source)
}
