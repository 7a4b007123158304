// Package openapi checks the sidecar's responses against its OpenAPI description. It is for tests only, and knows only
// the parts of OpenAPI that the description uses.
package openapi

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/sidecar/call"
)

// Document is an OpenAPI description. It has only the fields that the sidecar's description uses. An unknown field is
// an error.
type Document struct {
	OpenAPI    string                           `yaml:"openapi"`
	Info       map[string]string                `yaml:"info"`
	Paths      map[string]map[string]*Operation `yaml:"paths"`
	Components struct {
		Schemas   map[string]*Schema   `yaml:"schemas"`
		Responses map[string]*Response `yaml:"responses"`
		Headers   map[string]*Header   `yaml:"headers"`
	} `yaml:"components"`
}

// Operation is the description of one HTTP method of a path.
type Operation struct {
	ID          string `yaml:"operationId"`
	Summary     string `yaml:"summary"`
	Description string `yaml:"description"`
	Parameters  []struct {
		Name        string  `yaml:"name"`
		In          string  `yaml:"in"`
		Description string  `yaml:"description"`
		Required    bool    `yaml:"required"`
		Schema      *Schema `yaml:"schema"`
	} `yaml:"parameters"`
	Body *struct {
		Required bool    `yaml:"required"`
		Content  Content `yaml:"content"`
	} `yaml:"requestBody"`
	Responses map[string]*Response `yaml:"responses"`
}

// Response is the description of a response.
type Response struct {
	Ref         string             `yaml:"$ref"`
	Description string             `yaml:"description"`
	Headers     map[string]*Header `yaml:"headers"`
	Content     Content            `yaml:"content"`
}

// Header is the description of a header of a response.
type Header struct {
	Ref         string  `yaml:"$ref"`
	Description string  `yaml:"description"`
	Schema      *Schema `yaml:"schema"`
}

// Content has the schema of a body for each media type.
type Content map[string]struct {
	Schema *Schema `yaml:"schema"`
}

// Schema describes the type of a value and the values that are allowed.
type Schema struct {
	Ref         string             `yaml:"$ref"`
	Type        string             `yaml:"type"`
	Format      string             `yaml:"format"`
	Description string             `yaml:"description"`
	Nullable    bool               `yaml:"nullable"`
	Minimum     *int64             `yaml:"minimum"`
	Maximum     *int64             `yaml:"maximum"`
	MinLength   *int               `yaml:"minLength"`
	MaxLength   *int               `yaml:"maxLength"`
	Default     *int64             `yaml:"default"`
	Enum        []string           `yaml:"enum"`
	Items       *Schema            `yaml:"items"`
	MinItems    *int               `yaml:"minItems"`
	MaxItems    *int               `yaml:"maxItems"`
	Required    []string           `yaml:"required"`
	Properties  map[string]*Schema `yaml:"properties"`
	Additional  *bool              `yaml:"additionalProperties"`
}

// Read decodes a description.
func Read(t testing.TB, data []byte) *Document {
	t.Helper()
	d := new(Document)
	require.NoError(t, call.DecodeYAML(data, d))
	return d
}

// Resolve returns s or, if s is a reference, the schema that it refers to.
func (d *Document) Resolve(t testing.TB, s *Schema) *Schema {
	t.Helper()
	if s.Ref == "" {
		return s
	}
	name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/")
	require.True(t, ok, s.Ref)
	require.NotNil(t, d.Components.Schemas[name], s.Ref)
	return d.Resolve(t, d.Components.Schemas[name])
}

// Answer returns the description of the response of an operation with a status.
func (d *Document) Answer(t testing.TB, op *Operation, status int) *Response {
	t.Helper()
	r := op.Responses[strconv.Itoa(status)]
	require.NotNil(t, r, "%s: status %d is not in the document", op.ID, status)
	if name, ok := strings.CutPrefix(r.Ref, "#/components/responses/"); ok {
		r = d.Components.Responses[name]
		require.NotNil(t, r, name)
	}
	return r
}

// Check checks a body against the schema of its media type. If the description has no content, the body must be empty.
func (d *Document) Check(t testing.TB, r *Response, media string, body []byte, what string) {
	t.Helper()
	if r.Content == nil {
		require.Empty(t, body, what)
		return
	}
	content, ok := r.Content[media]
	require.True(t, ok, "%s: the document has no %q", what, media)
	s := d.Resolve(t, content.Schema)
	var v map[string]any
	require.NoError(t, json.Unmarshal(body, &v), "%s: %s", what, body)
	d.checkValue(t, s, v, what)
}

func (d *Document) checkValue(t testing.TB, s *Schema, value any, what string) {
	t.Helper()
	s = d.Resolve(t, s)
	switch value := value.(type) {
	case nil:
		require.True(t, s.Nullable, "%s is null", what)
	case string:
		require.Equal(t, "string", s.Type, what)
		if s.Format == "date-time" {
			_, err := time.Parse(time.RFC3339Nano, value)
			require.NoError(t, err, what)
		}
	case bool:
		require.Equal(t, "boolean", s.Type, what)
	case float64:
		require.Equal(t, "integer", s.Type, what)
		if s.Minimum != nil {
			require.GreaterOrEqual(t, value, float64(*s.Minimum), what)
		}
	case []any:
		require.Equal(t, "array", s.Type, what)
		for i, member := range value {
			d.checkValue(t, s.Items, member, fmt.Sprintf("%s[%d]", what, i))
		}
	case map[string]any:
		require.Equal(t, "object", s.Type, what)
		require.False(t, *s.Additional, what)
		for _, name := range s.Required {
			require.Contains(t, value, name, what)
		}
		for name, member := range value {
			require.Contains(t, s.Properties, name, what)
			d.checkValue(t, s.Properties[name], member, what+"."+name)
		}
	default:
		require.Fail(t, "unexpected type", "%s: %T", what, value)
	}
}
