package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/internal/config"
)

func checkCommand(e env) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Validate a configuration",
		Long: "Validate a configuration as run would read it, with REFILLER_ variables laid over it, and without connecting\n" +
			"to anything. The exit code is 0, or 2 with every problem and its line on stderr. With -o json the answer is one\n" +
			"object on stdout: file, ok, summary and problems (source, line, column, field, message).",
		Args: usageArgs(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			if output != "text" && output != "json" {
				return usageError{fmt.Errorf("--output %q: want text or json", output)}
			}
			return check(e, args[0], output == "json")
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// checked is the answer of check in JSON.
type checked struct {
	File     string          `json:"file"`
	OK       bool            `json:"ok"`
	Summary  string          `json:"summary,omitempty"`
	Problems config.Problems `json:"problems"`
}

func check(e env, path string, asJSON bool) error {
	c, err := config.Load(path, e.getenv)
	var problems config.Problems
	if err != nil && !errors.As(err, &problems) {
		var unreadable *fs.PathError
		if errors.As(err, &unreadable) {
			return usageError{err}
		}
		return err
	}
	if !asJSON {
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(e.stdout, "%s: ok: %s\n", path, c.Summary())
		return err
	}
	answer := checked{File: path, OK: err == nil, Problems: problems}
	if answer.OK {
		answer.Summary, answer.Problems = c.Summary(), config.Problems{}
	}
	encoder := json.NewEncoder(e.stdout)
	encoder.SetIndent("", "  ")
	encoder.SetEscapeHTML(false)
	if writeErr := encoder.Encode(answer); writeErr != nil {
		return writeErr
	}
	return err
}
