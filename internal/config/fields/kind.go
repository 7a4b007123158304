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

// Kind is what a single value may be.
type Kind struct {
	// Want says what is allowed, for messages and the reference: "a whole number from 1 to 9".
	Want string
	// Read returns the value, of the field's type, or what is wrong with it.
	Read func(n *yaml.Node) (v any, wrong string)
	// Schema is the JSON Schema of the value.
	Schema map[string]any
}

// Kinds are kinds by their names in tags.
type Kinds map[string]Kind

// And are the kinds of both.
func (k Kinds) And(others Kinds) Kinds {
	all := maps.Clone(k)
	maps.Copy(all, others)
	return all
}

// secretTag is the tag of a value that is a secret itself, and not the name of its file.
const secretTag = "secret"

// laid is a node for the value of a variable or a flag, which is on no line.
func laid(text string, secret bool) *yaml.Node {
	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text}
	if secret {
		n.Tag = secretTag
	}
	return n
}

// IsLaid reports whether a node is the value of a variable or a flag.
func IsLaid(n *yaml.Node) bool { return n.Line == 0 }

// show is a node in a message: its kind, or the scalar as it is written.
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

// Text is text that isn't empty; parse, if there is one, reads it or says what is wrong.
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

// Matching is text of a form.
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

// Integer is a whole number from lo to hi, in decimal digits.
func Integer(lo, hi int64) Kind {
	return integer(fmt.Sprintf("a whole number from %d to %d", lo, hi), lo, hi)
}

// Whole is a whole number in decimal digits, whose range others know.
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

// Percent is a percentage from lo to hi, such as 40%, as a whole number.
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

// Duration is a duration from lo to hi in whole multiples of unit.
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
	}, map[string]any{"type": "string", "pattern": `^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h|d))+$`}}
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

// Choice is one of some words. value returns the meaning of the word at a place among them.
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

// Truth is true or false.
func Truth() Kind {
	k := Choice(func(place int) bool { return place == 1 }, "false", "true")
	k.Schema = map[string]any{"type": "boolean"}
	return k
}

// Credentials are the kinds of what proves a client's identity.
var Credentials = Kinds{
	"user":     Text("a user's name", nil),
	"pem file": Text("the path of a PEM file", nil),
	"password": passwordKind(),
}

// passwordKind is the path of a password's file, or the password itself if a variable holds it.
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
