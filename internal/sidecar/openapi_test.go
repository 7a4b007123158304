package sidecar

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// document is the part of OpenAPI that ours uses; anything else in it is an error.
type document struct {
	OpenAPI    string                           `yaml:"openapi"`
	Info       map[string]string                `yaml:"info"`
	Paths      map[string]map[string]*operation `yaml:"paths"`
	Components struct {
		Schemas   map[string]*schema   `yaml:"schemas"`
		Responses map[string]*response `yaml:"responses"`
	} `yaml:"components"`
}

type operation struct {
	ID         string `yaml:"operationId"`
	Summary    string `yaml:"summary"`
	Parameters []struct {
		Name     string  `yaml:"name"`
		In       string  `yaml:"in"`
		Required bool    `yaml:"required"`
		Schema   *schema `yaml:"schema"`
	} `yaml:"parameters"`
	Body *struct {
		Required bool    `yaml:"required"`
		Content  content `yaml:"content"`
	} `yaml:"requestBody"`
	Responses map[string]*response `yaml:"responses"`
}

type response struct {
	Ref         string  `yaml:"$ref"`
	Description string  `yaml:"description"`
	Content     content `yaml:"content"`
}

type content map[string]struct {
	Schema *schema `yaml:"schema"`
}

type schema struct {
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
	Items       *schema            `yaml:"items"`
	MinItems    *int               `yaml:"minItems"`
	MaxItems    *int               `yaml:"maxItems"`
	Required    []string           `yaml:"required"`
	Properties  map[string]*schema `yaml:"properties"`
	Additional  *bool              `yaml:"additionalProperties"`
}

func readDocument(t *testing.T) *document {
	t.Helper()
	d := new(document)
	require.NoError(t, strictYAML(openAPI, d))
	return d
}

func (d *document) schema(t *testing.T, s *schema) *schema {
	t.Helper()
	if s.Ref == "" {
		return s
	}
	name, ok := strings.CutPrefix(s.Ref, "#/components/schemas/")
	require.True(t, ok, s.Ref)
	require.NotNil(t, d.Components.Schemas[name], s.Ref)
	return d.schema(t, d.Components.Schemas[name])
}

// answer is the schema of a status of an operation.
func (d *document) answer(t *testing.T, op *operation, status int) *schema {
	t.Helper()
	r := op.Responses[strconv.Itoa(status)]
	require.NotNil(t, r, "%s: status %d is not in the document", op.ID, status)
	if name, ok := strings.CutPrefix(r.Ref, "#/components/responses/"); ok {
		r = d.Components.Responses[name]
		require.NotNil(t, r, name)
	}
	return d.schema(t, r.Content["application/json"].Schema)
}

// check holds a JSON body against its schema.
func (d *document) check(t *testing.T, s *schema, body []byte, what string) {
	t.Helper()
	var v map[string]any
	require.NoError(t, json.Unmarshal(body, &v), "%s: %s", what, body)
	d.checkValue(t, s, v, what)
}

func (d *document) checkValue(t *testing.T, s *schema, value any, what string) {
	t.Helper()
	s = d.schema(t, s)
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

func TestTheDocumentHasTheRoutesOfTheServerAndNoOther(t *testing.T) {
	t.Parallel()
	d := readDocument(t)
	var documented, served []string
	for path, ops := range d.Paths {
		for method := range ops {
			documented = append(documented, strings.ToUpper(method)+" "+path)
		}
	}
	for _, r := range newFront(nil, DefaultLimits(), nil, nil, nil).routes {
		served = append(served, r.method+" "+r.path)
	}
	require.ElementsMatch(t, served, documented)
}

func TestTheDocumentHasTheFieldsOfTheRequests(t *testing.T) {
	t.Parallel()
	d := readDocument(t)
	for path, want := range map[string]struct {
		fields   fields
		required []string
	}{
		"/v1/take":     {new(takeRequest).fields(), []string{"key"}},
		"/v1/take-all": {new(takeAllRequest).fields(), []string{"requests"}},
		"/v1/return":   {new(amount).fields(), []string{"key"}},
		"/v1/wait":     {new(waitRequest).fields(time.Minute), []string{"key"}},
		"/v1/reserve":  {new(reserveRequest).fields(), []string{"key", "ttl_ms"}},
		"/v1/settle":   {new(settleRequest).fields(), []string{"key", "id", "used"}},
		"/v1/cancel":   {new(settleRequest).cancelFields(), []string{"key", "id"}},
	} {
		op := d.Paths[path]["post"]
		require.True(t, op.Body.Required)
		require.Len(t, op.Body.Content, 1)
		s := d.schema(t, op.Body.Content["application/json"].Schema)
		require.Equal(t, want.required, s.Required, path)
		d.checkFields(t, s, want.fields, path)
	}
	tokens := d.Components.Schemas["Tokens"]
	require.EqualValues(t, 1, *tokens.Minimum)
	require.EqualValues(t, policy.MaxTokens, *tokens.Maximum)
	require.EqualValues(t, 1, *tokens.Default)
	require.Equal(t, lua.MaxKeyLen, *d.Components.Schemas["Key"].MaxLength)
	require.Equal(t, lua.MaxIDLen, *d.Components.Schemas["ID"].MaxLength)
	require.Equal(t, fetch.MaxAll, *d.Components.Schemas["TakeAllRequest"].Properties["requests"].MaxItems)
	reserve, settle := d.Components.Schemas["ReserveRequest"].Properties, d.Components.Schemas["SettleRequest"].Properties
	require.EqualValues(t, policy.MinHold.Milliseconds(), *reserve["ttl_ms"].Minimum)
	require.EqualValues(t, policy.MaxHold.Milliseconds(), *reserve["ttl_ms"].Maximum)
	require.ElementsMatch(t, slices.Collect(maps.Values(overruns)), reserve["overrun"].Enum)
	require.EqualValues(t, policy.MaxTokens, *settle["used"].Maximum)
	params := d.Paths["/v1/peek"]["get"].Parameters
	require.Len(t, params, 1)
	require.Equal(t, "key", params[0].Name)
	require.Equal(t, "query", params[0].In)
	require.True(t, params[0].Required)
}

// checkFields holds a schema against the fields that the server reads.
func (d *document) checkFields(t *testing.T, s *schema, want fields, what string) {
	t.Helper()
	require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(s.Properties)), what)
	require.False(t, *s.Additional, what)
	for name, target := range want {
		p := d.schema(t, s.Properties[name])
		switch target := target.(type) {
		case objects:
			require.Equal(t, "array", p.Type, name)
			d.checkFields(t, d.schema(t, p.Items), target(), what+"."+name)
		case *string, **string:
			require.Equal(t, "string", p.Type, name)
		default:
			require.Equal(t, "integer", p.Type, name)
		}
	}
}

// Every status that an operation answers with is in the document, and the
// document has no status that none of these requests can bring about: real
// requests, except for what no request can cause on demand.
func TestTheDocumentHasTheStatusesOfTheAnswers(t *testing.T) {
	t.Parallel()
	d := readDocument(t)
	b := start(t, func(o *Options, _ *bench) { o.Limits.Patience = 500 * time.Millisecond })
	b.bucket("checkout", 3)
	require.NoError(t, b.rdb.MSet(t.Context(), "other", "no number", "{other}:ctl", "no hash").Err())
	for _, id := range []string{"settled", "cancelled"} {
		require.Equal(t, http.StatusOK, b.post("/v1/reserve", `{"key":"checkout","ttl_ms":60000,"id":"`+id+`"}`).status)
	}
	seen := make(map[string]map[int]bool) // by path
	see := func(path string, r reply, what string) {
		path, _, _ = strings.Cut(path, "?")
		ops := d.Paths[path]
		if len(ops) == 0 || r.status == http.StatusMethodNotAllowed {
			return // not an operation
		}
		for _, op := range ops {
			d.check(t, d.answer(t, op, r.status), r.body, what)
		}
		if seen[path] == nil {
			seen[path] = make(map[int]bool)
		}
		seen[path][r.status] = true
	}
	for path, ops := range d.Paths {
		see(path, onPath(b, path), path)
		if ops["post"] != nil {
			see(path, reply{status: http.StatusRequestTimeout, body: sendHalf(t, b, path)}, path+" slowly")
		}
	}
	see("/v1/wait", b.post("/v1/wait", `{"key":"checkout","tokens":3,"timeout_ms":1}`), "a wait that is denied")
	see("/v1/take", b.post("/v1/take", `{"key":"checkout","tokens":3}`), "a take that is denied")
	see("/v1/take-all", b.post("/v1/take-all", `{"requests":[{"key":"checkout","tokens":3}]}`), "a take of all that is denied")
	see("/v1/reserve", b.post("/v1/reserve", `{"key":"checkout","tokens":3,"ttl_ms":1000}`), "a reservation that is denied")
	for _, c := range badRequests() {
		see(c.path, b.do(c.method, c.path, c.body, c.header...), c.name)
	}
	b.redis.Kill()
	for path := range d.Paths {
		see(path, onPath(b, path), path+" without Redis")
	}
	for path := range d.Paths {
		// A client's other calls, a bug, and the end of a call's time.
		for _, err := range []error{errBusy, fmt.Errorf("bug"), contextDeadline} {
			see(path, failing(t, err), path)
		}
		for _, op := range d.Paths[path] {
			var documented []int
			for status := range op.Responses {
				n, err := strconv.Atoi(status)
				require.NoError(t, err)
				documented = append(documented, n)
			}
			require.ElementsMatch(t, slices.Collect(maps.Keys(seen[path])), documented, path)
		}
	}
}

func TestTheDocumentIsServed(t *testing.T) {
	t.Parallel()
	b := start(t, nil)
	r := b.do(http.MethodGet, "/openapi.yaml", "")
	require.Equal(t, http.StatusOK, r.status)
	require.Equal(t, "application/yaml", r.header.Get("Content-Type"))
	require.Equal(t, openAPI, r.body)
	var v any
	require.NoError(t, yaml.Unmarshal(r.body, &v))
}
