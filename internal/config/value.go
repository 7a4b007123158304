package config

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/policy"
)

// decoder collects the problems of one configuration.
type decoder struct {
	problems Problems
	sources  map[*yaml.Node]string // nodes that are not written anywhere: the variable or flag
	files    map[*yaml.Node]string // nodes that are written elsewhere than in the file
}

// value is a field of a configuration. A field that isn't there has a nil node; its readers return the default.
type value struct {
	d      *decoder
	node   *yaml.Node
	parent *yaml.Node // where to point for a field that isn't there
	path   string
}

func (v value) present() bool { return v.node != nil }

// bad reports a problem with the value, at its place.
func (v value) bad(format string, args ...any) {
	at := v.node
	if at == nil {
		at = v.parent
	}
	v.d.report(at, v.path, fmt.Sprintf(format, args...))
}

func (d *decoder) report(at *yaml.Node, path, msg string) {
	p := Problem{Line: at.Line, Column: at.Column, Field: path, Msg: msg}
	if source, ok := d.sources[at]; ok {
		p.Source, p.Line, p.Column = source, 0, 0
	} else if source, ok := d.files[at]; ok {
		p.Source = source
	}
	d.problems = append(d.problems, p)
}

// object is a value with named fields.
type object struct {
	value
	fields map[string]value
}

// object reads a mapping and reports fields that are not among names, or that come twice. Fields among quiet are read as
// well, but not offered in messages.
func (v value) object(names []string, quiet ...string) object {
	o := object{value: v, fields: map[string]value{}}
	if v.node == nil {
		return o
	}
	if v.node.Kind != yaml.MappingNode {
		v.bad("want fields (%s), not %s", strings.Join(names, ", "), describe(v.node))
		return o
	}
	for i := 0; i+1 < len(v.node.Content); i += 2 {
		key, child := v.node.Content[i], v.node.Content[i+1]
		if key.Kind != yaml.ScalarNode {
			v.d.report(key, v.path, "a field's name is a word, not "+describe(key))
			continue
		}
		name := key.Value
		path := join(v.path, brief(name))
		if !slices.Contains(names, name) && !slices.Contains(quiet, name) {
			msg := "unknown field"
			if near := closest(name, names); near != "" {
				msg += fmt.Sprintf(": did you mean %s?", near)
			} else {
				msg += ": allowed are " + strings.Join(names, ", ")
			}
			v.d.report(key, path, msg)
			continue
		}
		if first, twice := o.fields[name]; twice {
			v.d.report(key, path, fmt.Sprintf("given twice: the first is on line %d", first.parent.Line))
			continue
		}
		o.fields[name] = value{d: v.d, node: child, parent: key, path: path}
	}
	return o
}

// field returns a field, which may be absent.
func (o object) field(name string) value {
	if v, ok := o.fields[name]; ok {
		return v
	}
	at := o.node
	if at == nil {
		at = o.parent
	}
	return value{d: o.d, parent: at, path: join(o.path, name)}
}

// list reads a sequence.
func (v value) list() []value {
	if v.node == nil {
		return nil
	}
	if v.node.Kind != yaml.SequenceNode {
		v.bad("want a list, not %s", describe(v.node))
		return nil
	}
	items := make([]value, len(v.node.Content))
	for i, n := range v.node.Content {
		items[i] = value{d: v.d, node: n, parent: v.node, path: fmt.Sprintf("%s[%d]", v.path, i)}
	}
	return items
}

// text reads a string that isn't empty. ok is false if the field is absent or wrong, which is then reported.
func (v value) text(want string) (s string, ok bool) {
	n := v.node
	switch {
	case n == nil:
		return "", false
	case n.Kind != yaml.ScalarNode || isNull(n):
		v.bad("want %s, not %s", want, describe(n))
	case n.Tag != "!!str":
		v.bad("want %s, not %s: put text that looks like something else in quotes", want, describe(n))
	case n.Value == "":
		v.bad("it is empty: want %s", want)
	default:
		return n.Value, true
	}
	return "", false
}

var wholeNumber = regexp.MustCompile(`^[+-]?[0-9]+$`)

// integer reads a whole number from lo to hi, in decimal digits.
func (v value) integer(lo, hi int64) (n int64, ok bool) {
	if v.node == nil {
		return 0, false
	}
	quoted := v.node.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) != 0
	if v.node.Kind == yaml.ScalarNode && !quoted && wholeNumber.MatchString(v.node.Value) {
		n, err := strconv.ParseInt(v.node.Value, 10, 64)
		if err == nil && lo <= n && n <= hi {
			return n, true
		}
	}
	v.bad("%s is not a whole number from %d to %d", describe(v.node), lo, hi)
	return 0, false
}

// duration reads a duration from lo to hi in whole multiples of unit.
func (v value) duration(lo, hi, unit time.Duration) (d time.Duration, ok bool) {
	if v.node == nil {
		return 0, false
	}
	allowed := fmt.Sprintf("from %s to %s", short(lo), short(hi))
	if unit >= time.Microsecond {
		allowed += fmt.Sprintf(" in whole multiples of %s", short(unit))
	}
	if v.node.Kind != yaml.ScalarNode || isNull(v.node) {
		v.bad("want a duration %s, not %s", allowed, describe(v.node))
		return 0, false
	}
	d, err := policy.ParseDuration(v.node.Value)
	switch {
	case err != nil && wholeNumber.MatchString(v.node.Value):
		v.bad("%s has no unit: want a duration %s, such as 100ms or 5s", describe(v.node), allowed)
	case err != nil:
		v.bad("%s is not a duration: want one %s, such as 100ms or 5s", describe(v.node), allowed)
	case d < lo || d > hi || d%unit != 0:
		v.bad("%s is not a duration %s", brief(v.node.Value), allowed)
	default:
		return d, true
	}
	return 0, false
}

// short writes a duration without parts that are zero: 1m, 8784h.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// choice reads one of some words and returns its place among them; 0 if it is absent.
func (v value) choice(words ...string) int {
	if v.node == nil {
		return 0
	}
	if v.node.Kind == yaml.ScalarNode {
		for i, w := range words {
			if v.node.Value == w {
				return i
			}
		}
	}
	msg := fmt.Sprintf("%s is not one of %s", describe(v.node), strings.Join(words, ", "))
	if near := closest(v.node.Value, words); near != "" {
		msg += fmt.Sprintf(": did you mean %s?", near)
	}
	v.bad("%s", msg)
	return 0
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// unwrapped is the message of a parser's error less the prefix of its package.
func unwrapped(err error, sentinel error) string {
	msg := err.Error()
	if sentinel != nil && errors.Is(err, sentinel) {
		if rest, found := strings.CutPrefix(msg, sentinel.Error()+" "); found {
			return rest
		}
	}
	return msg
}
