package call

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

var goType = regexp.MustCompile(` in(to| type) [a-z]+\.\w+`)

// DecodeYAML decodes the only document of a file. It refuses fields that into doesn't have.
func DecodeYAML(data []byte, into any) error {
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		if errors.Is(err, io.EOF) {
			return errors.New("it is empty")
		}
		var wrong *yaml.TypeError
		if errors.As(err, &wrong) {
			return errors.New(goType.ReplaceAllString(strings.Join(wrong.Errors, "; "), ""))
		}
		line, msg := fields.Malformed(err, data)
		return fmt.Errorf("line %d: %s", line, msg)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("there is more than one document")
	}
	return nil
}

// Number is a whole number in a file. Without this type, package yaml would read 0.5 as 0, and 0100 as 64.
type Number struct{ node *yaml.Node }

// UnmarshalYAML implements yaml.Unmarshaler.
func (n *Number) UnmarshalYAML(node *yaml.Node) error {
	n.node = node
	return nil
}

// Read returns the number. It returns 0 if the file has none, and an error if it is not a whole number of the kind.
func (n Number) Read(kind fields.Kind) (int64, error) {
	if n.node == nil {
		return 0, nil
	}
	v, wrong := kind.Read(n.node)
	if wrong != "" {
		return 0, fmt.Errorf("line %d: %s", n.node.Line, wrong)
	}
	return v.(int64), nil
}
