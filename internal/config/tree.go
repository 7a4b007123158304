package config

import (
	"bytes"
	"errors"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/redisconn"
)

// maxSize is the most bytes of a configuration; several hundred thousand buckets fit.
const maxSize = 64 << 20

var yamlError = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// readTree reads the only document of a file and returns its root. It refuses what makes YAML a language of its own, so
// that every node stands for what is written at its place and the tree is as large as its text.
func (d *decoder) readTree(data []byte) *yaml.Node {
	whole := func(line int, msg string) *yaml.Node {
		d.problems = append(d.problems, Problem{Line: max(1, line), Column: 1, Msg: msg})
		return nil
	}
	malformed := func(err error) *yaml.Node {
		line := 0
		if m := yamlError.FindStringSubmatch(err.Error()); m != nil {
			line, _ = strconv.Atoi(m[1])
		}
		return whole(line, "not YAML: "+yamlError.ReplaceAllString(err.Error(), ""))
	}
	if len(data) > maxSize {
		return whole(1, "the file has more than "+strconv.Itoa(maxSize)+" bytes")
	}
	in := yaml.NewDecoder(bytes.NewReader(data))
	var document, second yaml.Node
	err := in.Decode(&document)
	if errors.Is(err, io.EOF) {
		return whole(1, "the file is empty")
	} else if err != nil {
		return malformed(err)
	}
	if err := in.Decode(&second); err == nil {
		return whole(second.Line, "a second document begins here: a file has one")
	} else if !errors.Is(err, io.EOF) {
		return malformed(err)
	}
	if len(document.Content) == 0 {
		return whole(1, "the file is empty")
	}
	root := document.Content[0]
	before := len(d.problems)
	d.refuseFeatures(root)
	switch {
	case len(d.problems) > before:
		return nil
	case isNull(root):
		return whole(root.Line, "the file is empty")
	case root.Kind != yaml.MappingNode:
		return whole(root.Line, "want fields such as redis and buckets, not "+describe(root))
	}
	return root
}

// refuseFeatures reports each anchor, alias, merge key and tag.
func (d *decoder) refuseFeatures(n *yaml.Node) {
	bad := func(msg string) {
		d.problems = append(d.problems, Problem{Line: n.Line, Column: n.Column, Msg: msg})
	}
	switch {
	case n.Kind == yaml.AliasNode:
		bad("alias *" + brief(n.Value) + ": aliases are not allowed, write the value out")
	case n.Anchor != "":
		bad("anchor &" + brief(n.Anchor) + ": anchors are not allowed, write the value out where it is used")
	case n.Tag == "!!merge":
		bad("merge key <<: merge keys are not allowed, write the fields out")
	case n.Style&yaml.TaggedStyle != 0:
		bad("tag " + brief(n.Tag) + ": tags are not allowed")
	}
	for _, child := range n.Content {
		d.refuseFeatures(child)
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// describe tells a node in a message: its kind, or the scalar as it is written.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing"
	case strings.Contains(n.Value, "://"): // an address in the wrong place may hold a password
		return strconv.Quote(brief(redisconn.Redact(n.Value)))
	case n.Tag == "!!str":
		return strconv.Quote(brief(n.Value))
	default:
		return brief(n.Value)
	}
}

// brief cuts a long value short and keeps it on one line.
func brief(s string) string {
	const most = 64
	if r := []rune(s); len(r) > most {
		s = string(r[:most]) + "..."
	}
	return oneLine(s)
}

// oneLine writes spaces for line ends and other control characters.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}
