package fields

import (
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/policy"
)

// Kind is a kind of single values.
type Kind struct {
	// Want describes the allowed values, for messages and the reference: "a whole number from 1 to 9".
	Want string
	// Read returns the value in the field's type, or a description of the error.
	Read func(n *yaml.Node) (v any, wrong string)
	// Schema is the JSON Schema of the value.
	Schema map[string]any
}

// Kinds are kinds by their names in tags.
type Kinds map[string]Kind

// And returns the kinds of k and of others.
func (k Kinds) And(others Kinds) Kinds {
	all := maps.Clone(k)
	maps.Copy(all, others)
	return all
}

// secretTag is the YAML tag of a value that is the secret itself, not the name of the secret's file.
const secretTag = "secret"

// overrideNode returns a node for the value of a variable or a flag. It has no line.
func overrideNode(text string, secret bool) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	if secret {
		n.Tag = secretTag
	}
	return n
}

// IsOverride reports whether a node is the value of a variable or a flag.
func IsOverride(n *yaml.Node) bool { return n.Line == 0 }

// show returns a node as messages show it: the kind of the node, or the scalar as it is written.
func show(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "nothing"
	case strings.Contains(n.Value, "://"): // an address in the wrong place may hold a password
		return Quote(credential.Redact(n.Value))
	case n.Tag == "!!str":
		return Quote(n.Value)
	default:
		return Brief(n.Value)
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// isPlain reports whether a scalar may be a number: it is not in quotes.
func isPlain(n *yaml.Node) bool {
	const quoted = yaml.DoubleQuotedStyle | yaml.SingleQuotedStyle | yaml.LiteralStyle | yaml.FoldedStyle
	return n.Kind == yaml.ScalarNode && n.Style&quoted == 0
}

// Text returns the kind of text that isn't empty. parse, unless it is nil, returns the value or a description of the
// error.
func Text(want string, parse func(string) (v any, wrong string)) Kind {
	return Kind{want, func(n *yaml.Node) (any, string) {
		switch {
		case n.Kind != yaml.ScalarNode || isNull(n):
			return nil, fmt.Sprintf("want %s, not %s", want, show(n))
		case n.Tag != "!!str":
			return nil, fmt.Sprintf("want %s, not %s: put text that looks like something else in quotes", want, show(n))
		case n.Value == "":
			return nil, "it is empty: want " + want
		case parse == nil:
			return n.Value, ""
		}
		return parse(n.Value)
	}, map[string]any{"type": "string"}}
}

// Matching returns the kind of text that matches a form.
func Matching(want string, form *regexp.Regexp) Kind {
	k := Text(want, func(s string) (any, string) {
		if !form.MatchString(s) {
			return nil, Quote(s) + ": want " + want
		}
		return s, ""
	})
	k.Schema["pattern"] = form.String()
	return k
}

var wholeNumber = regexp.MustCompile(`^[+-]?[0-9]+$`)

// Integer returns the kind of whole numbers from lo to hi, in decimal digits.
func Integer(lo, hi int64) Kind {
	return integer(fmt.Sprintf("a whole number from %d to %d", lo, hi), lo, hi)
}

// Whole returns the kind of whole numbers in decimal digits, whose range is checked elsewhere.
func Whole() Kind {
	return integer("a whole number below 2^63 in decimal digits", math.MinInt64, math.MaxInt64)
}

func integer(want string, lo, hi int64) Kind {
	return Kind{want, func(n *yaml.Node) (any, string) {
		if isPlain(n) && wholeNumber.MatchString(n.Value) {
			i, err := strconv.ParseInt(n.Value, 10, 64)
			if err == nil && lo <= i && i <= hi {
				return i, ""
			}
		}
		if n.Kind == yaml.ScalarNode && !isPlain(n) && wholeNumber.MatchString(n.Value) {
			return nil, fmt.Sprintf("%s is text: want %s, without quotes", show(n), want)
		}
		return nil, fmt.Sprintf("%s is not %s", show(n), want)
	}, map[string]any{"type": "integer", "minimum": lo, "maximum": hi}}
}

// Percent returns the kind of percentages from lo to hi, such as 40%. The value is the whole number.
func Percent(lo, hi int64) Kind {
	want := fmt.Sprintf("a percentage from %d%% to %d%%", lo, hi)
	return Kind{want, func(n *yaml.Node) (any, string) {
		digits, found := strings.CutSuffix(n.Value, "%")
		i, err := strconv.ParseInt(digits, 10, 64)
		if !found || err != nil || i < lo || i > hi {
			return nil, fmt.Sprintf("%s is not %s, such as 20%%", show(n), want)
		}
		return i, ""
	}, map[string]any{"type": "string", "pattern": `^[0-9]{1,3}%$`}}
}

// Duration returns the kind of durations from lo to hi that are whole multiples of unit.
func Duration(lo, hi, unit time.Duration) Kind {
	want := fmt.Sprintf("a duration from %s to %s", short(lo), short(hi))
	if unit >= time.Microsecond {
		want += " in whole multiples of " + short(unit)
	}
	return Kind{want, func(n *yaml.Node) (any, string) {
		d, err := policy.ParseDuration(n.Value)
		switch {
		case n.Kind != yaml.ScalarNode || isNull(n):
			return nil, fmt.Sprintf("want %s, not %s", want, show(n))
		case err != nil && wholeNumber.MatchString(n.Value):
			return nil, fmt.Sprintf("%s has no unit: want %s, such as 100ms or 5s", show(n), want)
		case err != nil:
			return nil, fmt.Sprintf("%s is not %s, such as 100ms or 5s", show(n), want)
		case d < lo || d > hi || d%unit != 0:
			return nil, fmt.Sprintf("%s is not %s", Brief(n.Value), want)
		}
		return d, ""
	}, map[string]any{"type": "string", "pattern": `^([0-9]+[dw]|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`}}
}

// short formats a duration without the parts that are zero: 1m, 8784h.
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

// Choice returns the kind of a choice among some words. value returns the value for the word with an index.
func Choice[T any](value func(place int) T, words ...string) Kind {
	want := "one of " + strings.Join(words, ", ")
	return Kind{want, func(n *yaml.Node) (any, string) {
		if i := slices.Index(words, n.Value); n.Kind == yaml.ScalarNode && i >= 0 {
			return value(i), ""
		}
		msg := fmt.Sprintf("%s is not %s", show(n), want)
		if near := Closest(n.Value, words); near != "" {
			msg += fmt.Sprintf(": did you mean %s?", near)
		}
		return nil, msg
	}, map[string]any{"enum": words}}
}

// Truth returns the kind of true and false.
func Truth() Kind {
	k := Choice(func(place int) bool { return place == 1 }, "false", "true")
	k.Schema = map[string]any{"type": "boolean"}
	return k
}

// Credentials are the kinds of the fields that prove a client's identity.
var Credentials = Kinds{
	"user":     Text("a user's name", nil),
	"pem file": Text("the path of a PEM file", nil),
	"password": passwordKind(),
}

// passwordKind returns the kind of a password. The value is the path of its file, or the password itself if it is from
// a variable.
func passwordKind() Kind {
	k := Text("the path of a file", func(s string) (any, string) { return credential.FromFile(s), "" })
	path := k.Read
	k.Read = func(n *yaml.Node) (any, string) {
		if n.Tag == secretTag {
			return credential.Plain(n.Value), ""
		}
		return path(n)
	}
	return k
}
