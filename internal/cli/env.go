package cli

import (
	"encoding/json"
	"io"
	"os"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// Env is what a command may touch of its process.
type Env struct {
	Environ fields.Environment
	Stdin   io.Reader
	Stdout  io.Writer
	Stderr  io.Writer
}

// ProcessEnv returns the Env of this process.
func ProcessEnv() Env {
	return Env{Environ: fields.EnvironmentOf(os.Environ()), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
}

// WriteJSON writes value as JSON and a line feed: on one line, or on several ones, each level indented by indent.
// Characters of HTML are not escaped.
func WriteJSON(w io.Writer, value any, indent string) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	return e.Encode(value)
}
