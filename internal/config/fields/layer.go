package fields

import (
	"bytes"
	"errors"
	"io"
	"regexp"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxSize is the largest size of a document in bytes. Several hundred thousand buckets fit.
const MaxSize = 64 << 20

// layer has the values that were read from one source: a document, a variable or a flag.
type layer struct {
	source string // its name in a Problem
	root   *yaml.Node
}

// locate returns the node at a path. If there is none, it returns the nearest node above.
func (l *layer) locate(p Path) (n *yaml.Node, found bool) {
	n = l.root
	for _, step := range p {
		next := below(n, step)
		if next == nil {
			return n, false
		}
		n = next
	}
	return n, true
}

func below(n *yaml.Node, step string) *yaml.Node {
	switch n.Kind {
	case yaml.SequenceNode:
		if i, err := strconv.Atoi(strings.Trim(step, "[]")); err == nil && i >= 0 && i < len(n.Content) {
			return n.Content[i]
		}
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == step {
				return n.Content[i+1]
			}
		}
	}
	return nil
}

var yamlError = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// parse parses the only document of a text. It returns nil if there is a problem. It refuses anchors, aliases, merge
// keys and tags. So the value of every node is written at the node's place, and the tree is no larger than the text.
func (d *Decoder) parse(source string, data []byte) *layer {
	whole := func(line int, msg string) *layer {
		d.problems = append(d.problems, Problem{Source: source, Line: max(1, line), Column: 1, Msg: msg})
		return nil
	}
	if len(data) > MaxSize {
		return whole(1, "the file has more than "+strconv.Itoa(MaxSize)+" bytes")
	}
	in := yaml.NewDecoder(bytes.NewReader(data))
	var document, second yaml.Node
	err := in.Decode(&document)
	if errors.Is(err, io.EOF) || err == nil && len(document.Content) == 0 {
		return whole(1, "the file is empty")
	} else if err != nil {
		return whole(Malformed(err, data))
	}
	if err := in.Decode(&second); err == nil {
		return whole(second.Line, "a second document begins here: a file has one")
	} else if !errors.Is(err, io.EOF) {
		return whole(Malformed(err, data))
	}
	l, before := &layer{source, document.Content[0]}, len(d.problems)
	d.refuseFeatures(l, l.root)
	switch {
	case len(d.problems) > before:
		return nil
	case isNull(l.root):
		return whole(l.root.Line, "the file is empty")
	case l.root.Kind != yaml.MappingNode:
		return whole(l.root.Line, "want fields such as redis and buckets, not "+show(l.root))
	}
	return l
}

// tabbed matches a line with a tab in its indentation, or in the indentation behind a dash or a name.
var tabbed = regexp.MustCompile(`^[ -]*\t|^[^"'#]*[:-] *\t`)

// Malformed returns the error that the parser found, and its line. It corrects an error that a tab caused: the parser
// does not mention tabs, and may name the line before.
func Malformed(err error, data []byte) (line int, msg string) {
	if m := yamlError.FindStringSubmatch(err.Error()); m != nil {
		line, _ = strconv.Atoi(m[1])
	}
	lines := strings.Split(string(data), "\n")
	for _, n := range []int{line, line + 1} {
		if n > 0 && n <= len(lines) && tabbed.MatchString(lines[n-1]) {
			return n, "not YAML: there is a tab: indent with spaces"
		}
	}
	return line, "not YAML: " + yamlError.ReplaceAllString(err.Error(), "")
}

// refuseFeatures reports each anchor, alias, merge key and tag.
func (d *Decoder) refuseFeatures(l *layer, n *yaml.Node) {
	switch {
	case n.Kind == yaml.AliasNode:
		d.report(l, n, nil, "alias *"+Brief(n.Value)+": aliases are not allowed, write the value out")
	case n.Anchor != "":
		d.report(l, n, nil, "anchor &"+Brief(n.Anchor)+": anchors are not allowed, write the value out where it is used")
	case n.Tag == "!!merge":
		d.report(l, n, nil, "merge key <<: merge keys are not allowed, write the fields out")
	case n.Style&yaml.TaggedStyle != 0:
		d.report(l, n, nil, "tag "+Brief(n.Tag)+": tags are not allowed")
	}
	for _, child := range n.Content {
		d.refuseFeatures(l, child)
	}
}
