package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// The fields of a file that Bump can raise.
const (
	VersionField      = "version"
	PoolsVersionField = "pools_version"
)

// Bump raises a version in the text of a configuration file, or of a document that replicas share. The new version is
// the smallest one above the old version and above least. Bump returns the changed text with the versions before and
// after. Everything else in the text stays as it is, byte by byte. A file without the field gets it as its first line,
// unless the field is pools_version.
func Bump(text []byte, field string, least int64) (changed []byte, from, to int64, err error) {
	root, err := mappingOf(text)
	if err != nil {
		return nil, 0, 0, err
	}
	value := valueOf(root, field)
	if value != nil {
		from, err = strconv.ParseInt(value.Value, 10, 64)
		if err != nil || from < 0 || value.Kind != yaml.ScalarNode {
			return nil, 0, 0, fmt.Errorf("line %d: %s: want a whole number from 0 to %d", value.Line, field, int64(maxVersion))
		}
	}
	to = max(from, least) + 1
	switch {
	case to > maxVersion:
		return nil, 0, 0, fmt.Errorf("%s is %d already, the highest possible value", field, int64(maxVersion))
	case value != nil:
		at := offset(text, value)
		end := at + len(value.Value)
		if value.Style != 0 || !bytes.HasPrefix(text[at:], []byte(value.Value)) {
			return nil, 0, 0, fmt.Errorf("line %d: %s: want a plain number", value.Line, field)
		}
		changed = append(append(append(changed, text[:at]...), strconv.FormatInt(to, 10)...), text[end:]...)
	case field == PoolsVersionField:
		return nil, 0, 0, fmt.Errorf("the file has no %s: version also applies to its pools", field)
	case len(root.Content) == 0 || root.Style&yaml.FlowStyle != 0:
		return nil, 0, 0, fmt.Errorf("the file has no %s: add a line such as %s: 1", field, field)
	default:
		at := offset(text, root.Content[0])
		changed = append(append(append(changed, text[:at]...), fmt.Sprintf("%s: %d\n", field, to)...), text[at:]...)
	}
	return changed, from, to, nil
}

// mappingOf returns the mapping at the top of a document.
func mappingOf(text []byte) (*yaml.Node, error) {
	var doc yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&doc); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if len(doc.Content) != 1 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, errors.New("want fields such as version and buckets")
	}
	return doc.Content[0], nil
}

// valueOf returns the value of a field of a mapping, nil if the mapping lacks the field.
func valueOf(mapping *yaml.Node, field string) *yaml.Node {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == field {
			return mapping.Content[i+1]
		}
	}
	return nil
}

// offset returns where a node begins in the text. Columns count characters.
func offset(text []byte, n *yaml.Node) int {
	at := 0
	for range n.Line - 1 {
		at += bytes.IndexByte(text[at:], '\n') + 1
	}
	line := []rune(string(text[at:]))
	return at + len(string(line[:n.Column-1]))
}
