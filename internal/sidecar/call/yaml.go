package call

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/fields"
)

var goType = regexp.MustCompile(` in(to| type) [a-z]+\.\w+`)

// DecodeYAML reads the one document of a file and refuses fields that into doesn't have.
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
