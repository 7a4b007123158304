package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong with a configuration.
type Problem struct {
	Source string `json:"source,omitempty"` // the file, or the variable or flag that the value is from
	Line   int    `json:"line,omitempty"`   // from 1; 0 if it is in no file
	Column int    `json:"column,omitempty"` // from 1; 0 if it is in no file
	Field  string `json:"field,omitempty"`  // dotted path, such as buckets[0].rate; empty for the whole file
	Msg    string `json:"message"`          // the value, and what is allowed
}

// String writes the problem as compilers do: source:line:column: field: message.
func (p Problem) String() string {
	var b strings.Builder
	if p.Source != "" {
		b.WriteString(p.Source + ":")
	}
	if p.Line > 0 {
		fmt.Fprintf(&b, "%d:%d:", p.Line, p.Column)
	}
	if b.Len() > 0 {
		b.WriteByte(' ')
	}
	if p.Field != "" {
		b.WriteString(p.Field + ": ")
	}
	b.WriteString(p.Msg)
	return b.String()
}

// Problems are all that is wrong with a configuration, in the order of the file, and at least one. Errors of Parse and
// Load about the content of a configuration are Problems.
type Problems []Problem

// Error writes one problem per line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, problem := range p {
		lines[i] = problem.String()
	}
	return strings.Join(lines, "\n")
}

func (p Problems) sort() {
	slices.SortStableFunc(p, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}
