package image

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
)

// dockerfile has the parts of a two-stage Dockerfile from which the image is built.
type dockerfile struct {
	compile string // the command that builds the programs
	last    []instructions.Command
}

func parse(path string) (dockerfile, error) {
	file, err := os.Open(path)
	if err != nil {
		return dockerfile{}, err
	}
	defer func() { _ = file.Close() }() // it is only read, so the error doesn't matter
	tree, err := parser.Parse(file)
	if err != nil {
		return dockerfile{}, err
	}
	stages, _, err := instructions.Parse(tree.AST, nil)
	if err != nil {
		return dockerfile{}, err
	}
	if len(stages) != 2 || stages[1].BaseName != "scratch" {
		return dockerfile{}, errors.New("the Dockerfile should have two stages, the second from scratch")
	}
	d := dockerfile{last: stages[1].Commands}
	for _, c := range stages[0].Commands {
		if run, ok := c.(*instructions.RunCommand); ok && strings.Contains(strings.Join(run.CmdLine, " "), "go build") {
			d.compile = strings.Join(run.CmdLine, " ")
		}
	}
	if !strings.Contains(d.compile, "/out/") {
		return dockerfile{}, fmt.Errorf("no command of the Dockerfile builds into /out/: %q", d.compile)
	}
	return d, nil
}
