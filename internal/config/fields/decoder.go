package fields

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Decoder fills one struct from layers: the defaults, the file, the shared part, variables and flags, in this order. A
// later layer replaces values of the earlier ones. The Decoder collects all problems.
type Decoder struct {
	kinds    Kinds
	into     reflect.Value
	shapes   map[reflect.Type]*shape
	layers   []*layer
	invalid  map[string]bool // paths at which or below which there is a problem
	problems Problems
}

// New makes a Decoder that fills the struct that into points to, and sets its defaults.
func New(kinds Kinds, into any) *Decoder {
	d := &Decoder{kinds: kinds, into: reflect.ValueOf(into).Elem(), shapes: map[reflect.Type]*shape{}}
	d.invalid = map[string]bool{}
	d.into.Set(d.shape(d.into.Type()).defaults)
	return d
}

// Read adds a YAML document as a layer. source is its name in messages. Read reports whether the document could be
// parsed at all.
func (d *Decoder) Read(source string, data []byte) bool {
	l := d.parse(source, data)
	if l != nil {
		d.add(l)
	}
	return l != nil
}

// ReadUnder adds the mapping that is the value of a field of a YAML document, as Read adds a whole document. Problems
// have the lines and columns of the document. A field that is missing or null is an empty mapping.
func (d *Decoder) ReadUnder(source string, data []byte, field string) bool {
	l := d.parse(source, data)
	if l == nil {
		return false
	}
	outer := l.root
	l.root = &yaml.Node{Kind: yaml.MappingNode, Line: outer.Line, Column: outer.Column}
	for i := 0; i+1 < len(outer.Content); i += 2 {
		if outer.Content[i].Value == field && !isNull(outer.Content[i+1]) {
			l.root = outer.Content[i+1]
		}
	}
	d.add(l)
	return true
}

// Override is a value that replaces a value of the file.
type Override struct {
	Source string // the flag or variable, as Problems name it, such as --listen
	Field  string // dotted path of a value or of a list of values, such as redis.url
	Value  string // as in the file; a list has commas between its values
	Secret bool   // Value is the secret itself, although the field is for the name of the secret's file
}

// AddValue adds a layer of a single value.
func (d *Decoder) AddValue(o Override) {
	n := overrideNode(o.Value, o.Secret)
	names := strings.Split(o.Field, ".")
	for _, name := range slices.Backward(names) {
		n = &yaml.Node{Kind: yaml.MappingNode, Content: []*yaml.Node{overrideNode(name, false), n}}
	}
	d.add(&layer{o.Source, n})
}

// AddDocument adds the document that another Decoder has read, as a layer.
func (d *Decoder) AddDocument(other *Decoder) { d.add(other.layers[0]) }

func (d *Decoder) add(l *layer) {
	d.forget(l.root, nil)
	d.layers = append(d.layers, l)
	d.object(l, l.root, d.into, nil)
}

// forget removes the problems of values that a new layer replaces.
func (d *Decoder) forget(n *yaml.Node, at Path) {
	if n.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(n.Content) && len(d.problems) > 0; i += 2 {
			d.forget(n.Content[i+1], at.Field(n.Content[i].Value))
		}
		return
	}
	replaced := func(field string) bool {
		rest, found := strings.CutPrefix(field, at.String())
		return found && (rest == "" || rest[0] == '[')
	}
	d.problems = slices.DeleteFunc(d.problems, func(p Problem) bool { return replaced(p.Field) })
	maps.DeleteFunc(d.invalid, func(path string, _ bool) bool { return replaced(path) })
}

// object fills a struct from a mapping.
func (d *Decoder) object(l *layer, n *yaml.Node, v reflect.Value, at Path) {
	s := d.shape(v.Type())
	if n.Kind != yaml.MappingNode {
		d.report(l, n, at, fmt.Sprintf("want fields (%s), not %s", strings.Join(s.names, ", "), show(n)))
		return
	}
	var given uint64 // a bit for each field, by its number
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, child := n.Content[i], n.Content[i+1]
		number, known := s.byName[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode:
			d.report(l, key, at, "a field's name is a word, not "+show(key))
		case !known:
			d.report(l, key, at.Field(key.Value), d.unknown(s, at.Field(key.Value)))
		case given&(1<<number) != 0:
			d.twice(l, n, key, at)
		default:
			given |= 1 << number
			d.field(l, child, v.FieldByIndex(s.fields[number].index), &s.fields[number], at)
		}
	}
	if len(at) < 2 || !strings.HasPrefix(at[1], "[") {
		return // another layer may have missing fields: Require checks them
	}
	for i := range s.fields {
		if f := &s.fields[i]; f.required && given&(1<<i) == 0 {
			d.report(l, n, at.Field(f.name), d.missing(f, at.Field(f.name)))
		}
	}
}

// twice reports a key that occurs earlier in the mapping, too.
func (d *Decoder) twice(l *layer, mapping, key *yaml.Node, at Path) {
	first := 0
	for mapping.Content[first].Value != key.Value {
		first += 2
	}
	d.report(l, key, at.Field(key.Value), fmt.Sprintf("given twice: the first is on line %d", mapping.Content[first].Line))
}

// field fills one field of the struct at a path.
func (d *Decoder) field(l *layer, n *yaml.Node, v reflect.Value, f *field, at Path) {
	switch {
	case v.Kind() == reflect.Slice && f.kind == nil && d.shape(f.typ.Elem()).key != nil:
		d.keyed(l, n, v, f, at.Field(f.name))
	case v.Kind() == reflect.Slice:
		d.list(l, n, v, f, at.Field(f.name))
	case f.kind != nil:
		if wrong := f.set(v, n); wrong != "" {
			d.report(l, n, at.Field(f.name), wrong)
		}
	case !isNull(n): // an empty section changes nothing
		if v.Kind() == reflect.Pointer {
			if v.IsNil() {
				v.Set(reflect.New(f.section()))
				v.Elem().Set(d.shape(f.section()).defaults)
			}
			v = v.Elem()
		}
		d.object(l, n, v, at.Field(f.name))
	}
}

// list fills a list of structs or of single values.
func (d *Decoder) list(l *layer, n *yaml.Node, v reflect.Value, f *field, at Path) {
	items := n.Content
	if n.Kind == yaml.ScalarNode && IsOverride(n) {
		for item := range strings.SplitSeq(n.Value, ",") {
			items = append(items, overrideNode(strings.TrimSpace(item), false))
		}
	} else if n.Kind != yaml.SequenceNode {
		d.report(l, n, at, "want a list, whose items begin with a dash, not "+show(n))
		return
	}
	v.Set(reflect.MakeSlice(f.typ, len(items), len(items)))
	for i, item := range items {
		if f.kind == nil {
			v.Index(i).Set(d.shape(f.typ.Elem()).defaults)
			d.object(l, item, v.Index(i), at.Item(i))
		} else if wrong := f.set(v.Index(i), item); wrong != "" {
			d.report(l, item, at.Item(i), wrong)
		}
	}
}

// keyed fills a list of structs from a mapping. The key of each entry becomes a field of the struct.
func (d *Decoder) keyed(l *layer, n *yaml.Node, v reflect.Value, f *field, at Path) {
	if n.Kind != yaml.MappingNode {
		one := d.shape(f.typ.Elem()).names[0]
		d.report(l, n, at, fmt.Sprintf("want %s by name, such as {NAME: {%s: ...}}, not %s", f.name, one, show(n)))
		return
	}
	element := d.shape(f.typ.Elem())
	v.Set(reflect.MakeSlice(f.typ, 0, len(n.Content)/2))
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, child := n.Content[i], n.Content[i+1]
		if seen[key.Value] {
			d.twice(l, n, key, at)
			continue
		}
		seen[key.Value] = true
		item := reflect.New(f.typ.Elem()).Elem()
		item.Set(element.defaults)
		if wrong := element.key.set(item.FieldByIndex(element.key.index), key); wrong != "" {
			d.report(l, key, at.Field(key.Value), wrong)
		}
		if !isNull(child) {
			d.object(l, child, item, at.Field(key.Value))
		}
		v.Set(reflect.Append(v, item))
	}
}

// Require reports the required fields that no layer has. Missing fields of structs in lists were reported before.
func (d *Decoder) Require() { d.require(d.into, nil) }

func (d *Decoder) require(v reflect.Value, at Path) {
	if slices.ContainsFunc(d.problems, func(p Problem) bool { return p.Field == at.String() }) {
		return // another value is in the place of the section
	}
	s := d.shape(v.Type())
	for i := range s.fields {
		f := &s.fields[i]
		if section := reflect.Indirect(v.FieldByIndex(f.index)); f.section() != nil && section.IsValid() {
			d.require(section, at.Field(f.name))
		} else if f.required && !d.Given(at.Field(f.name)) {
			d.Bad(at.Field(f.name), "%s", d.missing(f, at.Field(f.name)))
		}
	}
}

// LayerOf returns the number of the layer whose value a field has, from 1; 0 if no layer has the field.
func (d *Decoder) LayerOf(at Path) int {
	for i, l := range slices.Backward(d.layers) {
		if _, found := l.locate(at); found {
			return i + 1
		}
	}
	return 0
}

// Given reports whether a layer has the field, with a valid value or not.
func (d *Decoder) Given(at Path) bool { return d.LayerOf(at) > 0 }

// Valid reports whether there is no problem at a path or below it.
func (d *Decoder) Valid(at Path) bool { return len(d.invalid) == 0 || !d.invalid[at.String()] }

// where returns the node of a field with its layer. If no layer has the field, it returns the node of the nearest
// section above the field.
func (d *Decoder) where(at Path) (*layer, *yaml.Node) {
	for n := len(at); n >= 0; n-- {
		if number := d.LayerOf(at[:n]); number > 0 {
			if n == 0 {
				number = 1
			}
			node, _ := d.layers[number-1].locate(at[:n])
			return d.layers[number-1], node
		}
	}
	return &layer{}, &yaml.Node{}
}

// Where returns the place of a value, for messages about another value.
func (d *Decoder) Where(at Path) string {
	switch l, n := d.where(at); {
	case IsOverride(n):
		return "in " + l.source
	case l == d.layers[0]:
		return fmt.Sprintf("on line %d", n.Line)
	default:
		return fmt.Sprintf("on line %d of %s", n.Line, l.source)
	}
}

// Bad adds a problem with the field at a path, which may be missing.
func (d *Decoder) Bad(at Path, format string, args ...any) { d.BadAt(at, at, format, args...) }

// BadAt does the same as Bad, but the problem has the line of another field.
func (d *Decoder) BadAt(line, at Path, format string, args ...any) {
	l, n := d.where(line)
	d.report(l, n, at, fmt.Sprintf(format, args...))
}

// report adds a problem with a node of a layer.
func (d *Decoder) report(l *layer, n *yaml.Node, at Path, msg string) {
	d.problems = append(d.problems, Problem{Source: l.source, Line: n.Line, Column: n.Column, Field: at.String(),
		Msg: msg})
	for i := range at {
		d.invalid[at[:i+1].String()] = true
	}
}

// Check adds the Errors that errors.Join has combined as problems of the struct at a path.
func (d *Decoder) Check(at Path, err error) {
	for _, err := range Joined(err) {
		if wrong := (*Error)(nil); errors.As(err, &wrong) {
			below := strings.Split(strings.ReplaceAll(wrong.Field, "[", ".["), ".")
			d.Bad(slices.Concat(at, below), "%s", wrong.Msg)
		}
	}
}

// Joined returns the errors that errors.Join has combined.
func Joined(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return nil
}

// AddProblems adds problems that were found elsewhere.
func (d *Decoder) AddProblems(others Problems) { d.problems = append(d.problems, others...) }

// Err returns all problems as Problems, or nil if there are none.
func (d *Decoder) Err() error {
	if len(d.problems) == 0 {
		return nil
	}
	d.problems.sort()
	return d.problems
}
