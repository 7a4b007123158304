package cli

import (
	"encoding/json"
	"io"
	"os"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// Env is the part of its process that a command may use.
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

// WriteJSON writes value as JSON and a line feed. If indent is empty, the JSON is on one line. Otherwise each value is
// on a separate line, and each level is indented by indent. The characters <, > and & are not escaped.
func WriteJSON(w io.Writer, value any, indent string) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	return e.Encode(value)
}
