package httpapi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// fields has the members that a JSON object may have, with their targets. A target is a pointer to a string or to a
// whole number, or objects for an array.
type fields map[string]any

// objects is the target of an array of JSON objects. Each call adds an object and returns its fields.
type objects func() fields

// escapes matches the escapes of JSON. Its group matches one half of a surrogate pair that lacks the other half.
// encoding/json would decode every such half as U+FFFD.
var escapes = regexp.MustCompile(`\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]|(u[dD][89a-fA-F])|.)`)

// decode reads one JSON object. It refuses members that are unknown, null, given twice or spelled in another case, and
// text that isn't UTF-8. encoding/json accepts all of these. A client that is misunderstood would then take from the
// wrong bucket.
func decode(body []byte, into fields) error {
	if !utf8.Valid(body) {
		return fmt.Errorf("%w: the body is not UTF-8", call.ErrBadRequest)
	}
	for _, e := range escapes.FindAllSubmatch(body, -1) {
		if e[1] != nil {
			return fmt.Errorf("%w: the body has \\%s, half of a surrogate pair without the other half", call.ErrBadRequest, e[1])
		}
	}
	if err := decodeObject("", body, into); err != nil {
		return fmt.Errorf("%w: %w", call.ErrBadRequest, err)
	}
	return nil
}

// decodeObject reads the object at a place in the body, such as requests[1]. The place of the body itself is "".
func decodeObject(at string, data []byte, into fields) error {
	what, within := "the body", ""
	if at != "" {
		what, within = at, at+"."
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return fmt.Errorf("%s is not a JSON object", what)
	}
	seen := make(map[string]bool, len(into))
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return fmt.Errorf("%s is not JSON: %w", what, err)
		}
		name, _ := t.(string) // the decoder accepts only strings as names
		target, known := into[name]
		if !known {
			names := slices.Sorted(maps.Keys(into))
			return fmt.Errorf("%q: unknown field; want one of %s", within+name, strings.Join(names, ", "))
		}
		if seen[name] {
			return fmt.Errorf("%s%s: given twice", within, name)
		}
		seen[name] = true
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return fmt.Errorf("%s is not JSON: %w", what, err)
		}
		if err := decodeValue(within+name, value, target); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return fmt.Errorf("%s is not JSON: %w", what, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("there is more than one JSON object in %s", what)
	}
	return nil
}

func decodeValue(at string, value json.RawMessage, target any) error {
	next, isArray := target.(objects)
	var members []json.RawMessage
	if isArray {
		target = &members
	}
	if string(value) == "null" || json.Unmarshal(value, target) != nil {
		return fmt.Errorf("%s: want %s", at, kind(target))
	}
	for i, m := range members {
		if err := decodeObject(fmt.Sprintf("%s[%d]", at, i), m, next()); err != nil {
			return err
		}
	}
	return nil
}

// kind returns a description of the values that a field accepts.
func kind(target any) string {
	switch target.(type) {
	case *string, **string:
		return "a string"
	case *[]json.RawMessage:
		return "an array of objects"
	}
	return "a whole number"
}
