package envoy

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/tokenrefill/refiller/internal/bucketname"
	"github.com/tokenrefill/refiller/internal/flowname"
	"github.com/tokenrefill/refiller/policy"
)

// template makes the name of a bucket from a domain and a descriptor's entries.
type template struct {
	source string // as it is in the file
	parts  []part
	escape string // the bytes that are escaped in values
}

// part is text or a placeholder.
type part struct {
	text  string
	what  placeholder
	entry int // index of the value's entry
}

type placeholder int

const (
	text       placeholder = iota
	domain                 // {domain}
	descriptor             // {descriptor}: key=value of each entry, with commas between
	key                    // {key}, of the last entry
	value                  // {value}, of the last entry, or {value:KEY}
)

// always has the bytes that are escaped in every key and value. A name must not contain a closing brace. The percent
// sign and the comma are escaped so that those in a value differ from those that the template adds.
const always = "%{},"

// parseTemplate reads a template for descriptors with these keys.
func parseTemplate(s string, path []fileDescriptor) (template, error) {
	t := template{source: s, escape: always}
	values, separate := 0, true // separate: there is a mark between the last value and the next
	for rest := s; rest != ""; {
		before, after, found := strings.Cut(rest, "{")
		if strings.Contains(before, "}") {
			return template{}, fmt.Errorf("%q: a closing brace without an opening one", s)
		}
		if before != "" {
			t.parts = append(t.parts, part{text: before})
			marks := strings.Map(onlyMarks, before)
			if values > 0 {
				t.escape += marks
			}
			separate = separate || marks != ""
		}
		if !found {
			break
		}
		name, tail, closed := strings.Cut(after, "}")
		if !closed {
			return template{}, fmt.Errorf("%q: an opening brace without a closing one", s)
		}
		p := part{entry: len(path) - 1}
		switch of, isValue := strings.CutPrefix(name, "value:"); {
		case name == "domain":
			p.what = domain
		case name == "key":
			p.what = key
		case name == "descriptor":
			p.what = descriptor
		case name == "value" || isValue:
			p.what = value
			if isValue {
				for p.entry >= 0 && path[p.entry].Key != of {
					p.entry--
				}
				if p.entry < 0 {
					return template{}, fmt.Errorf("%q: neither this descriptor nor a descriptor above it has the key %q", s, of)
				}
			}
		default:
			return template{}, fmt.Errorf("%q: {%s} is not one of {domain}, {descriptor}, {key}, {value} and {value:KEY}", s,
				name)
		}
		if p.what == value || p.what == descriptor {
			if !separate {
				return template{}, fmt.Errorf("%q: want a separator, such as a colon, between two values", s)
			}
			values, separate = values+1, false
		}
		t.parts = append(t.parts, p)
		rest = tail
	}
	if values < 2 { // a single value needs no mark that separates it
		t.escape = always
	}
	return t, nil
}

// parseFlow reads a template of the names of flows for descriptors with these keys.
func parseFlow(s string, path []fileDescriptor) (template, error) {
	t, err := parseTemplate(s, path)
	if err != nil {
		return template{}, err
	}
	entries := make([]entry, len(path))
	for i, d := range path {
		entries[i] = entry{d.Key, "value"}
	}
	if err := policy.CheckFlow(t.flow("domain", entries)); err != nil {
		return template{}, err
	}
	return t, nil
}

// onlyMarks removes letters and digits. A single mark between two values is enough to distinguish them, because it is
// escaped in values.
func onlyMarks(r rune) rune {
	if r > unicode.MaxASCII || unicode.IsLetter(r) || unicode.IsDigit(r) {
		return -1
	}
	return r
}

// name returns the name for a domain and entries. Different entries give different names, because values are escaped.
// The end of a name that is too long is replaced by a hash.
func (t template) name(inDomain string, entries []entry) string {
	var b strings.Builder
	for _, p := range t.parts {
		b.WriteString(t.fill(p, inDomain, entries))
	}
	return bucketname.Fit(b.String())
}

// flow returns the name of a flow for a domain and entries. The name is empty if the template is. The text for a
// placeholder has no slash and is not empty. Otherwise a client that controls a value could choose a team.
func (t template) flow(inDomain string, entries []entry) string {
	var b strings.Builder
	for _, p := range t.parts {
		filled := t.fill(p, inDomain, entries)
		if p.what != text {
			filled = flowname.Encoded(filled)
		}
		b.WriteString(filled)
	}
	return flowname.Fit(b.String())
}

// fill returns the text for a part.
func (t template) fill(p part, inDomain string, entries []entry) string {
	switch p.what {
	case domain:
		return escaped(inDomain, always)
	case key:
		return escaped(entries[len(entries)-1].key, always)
	case value:
		return escaped(entries[p.entry].value, t.escape)
	case descriptor:
		return describe(entries, t.escape)
	}
	return p.text
}

// describe returns key=value of each entry, with commas between.
func describe(entries []entry, escaped string) string {
	var b strings.Builder
	for i, e := range entries {
		if i > 0 {
			b.WriteByte(',')
		}
		escape(&b, e.key, always+"=")
		b.WriteByte('=')
		escape(&b, e.value, escaped)
	}
	return b.String()
}

// windowKey returns the name of the window of a descriptor.
func windowKey(prefix, inDomain string, entries []entry) string {
	var b strings.Builder
	b.WriteString(prefix)
	escape(&b, inDomain, always+":")
	b.WriteByte(':')
	b.WriteString(describe(entries, always))
	return bucketname.Fit(b.String())
}

func escaped(s, marks string) string {
	var b strings.Builder
	escape(&b, s, marks)
	return b.String()
}

func escape(b *strings.Builder, s, escaped string) {
	for i := range len(s) {
		if strings.IndexByte(escaped, s[i]) >= 0 {
			fmt.Fprintf(b, "%%%02X", s[i])
		} else {
			b.WriteByte(s[i])
		}
	}
}
