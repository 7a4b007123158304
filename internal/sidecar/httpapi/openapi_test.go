package httpapi

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/openapi"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestTheDocumentHasTheRoutesOfTheServerAndNoOther(t *testing.T) {
	t.Parallel()
	d := openapi.Read(t, OpenAPI)
	var documented, served []string
	for path, ops := range d.Paths {
		for method := range ops {
			documented = append(documented, strings.ToUpper(method)+" "+path)
		}
	}
	for _, r := range New(Config{}).Routes() {
		served = append(served, r.Method+" "+r.Path)
	}
	require.ElementsMatch(t, served, documented)
}

func TestTheDocumentHasTheFieldsOfTheRequests(t *testing.T) {
	t.Parallel()
	d := openapi.Read(t, OpenAPI)
	for path, want := range map[string]struct {
		fields   fields
		required []string
	}{
		"/v1/take":     {new(takeRequest).fields(), []string{"key"}},
		"/v1/take-all": {new(takeAllRequest).fields(), []string{"requests"}},
		"/v1/return":   {new(returnRequest).fields(), []string{"key"}},
		"/v1/wait":     {new(waitRequest).fields(time.Minute), []string{"key"}},
		"/v1/reserve":  {new(reserveRequest).fields(), []string{"key", "ttl_ms"}},
		"/v1/settle":   {new(settleRequest).fields(), []string{"key", "id", "used"}},
		"/v1/cancel":   {new(settleRequest).cancelFields(), []string{"key", "id"}},

		"/v1/limits/{limit}/take":    {new(takeLimitRequest).fields(), []string{"key"}},
		"/v1/limits/{limit}/undo":    {new(undoRequest).fields(), []string{"key", "undo"}},
		"/v1/limits/{limit}/reserve": {new(instantRequest).fields(), []string{"key", "id", "at"}},
		"/v1/limits/{limit}/cancel":  {new(settleRequest).cancelFields(), []string{"key", "id"}},
	} {
		op := d.Paths[path]["post"]
		require.True(t, op.Body.Required)
		require.Len(t, op.Body.Content, 1)
		s := d.Resolve(t, op.Body.Content["application/json"].Schema)
		require.Equal(t, want.required, s.Required, path)
		checkFields(t, d, s, want.fields, path)
	}
	tokens := d.Components.Schemas["Tokens"]
	require.EqualValues(t, 1, *tokens.Minimum)
	require.EqualValues(t, policy.MaxTokens, *tokens.Maximum)
	require.EqualValues(t, 1, *tokens.Default)
	require.Equal(t, lua.MaxKeyLen, *d.Components.Schemas["Key"].MaxLength)
	require.Equal(t, policy.MaxFlowLen, *d.Components.Schemas["Flow"].MaxLength)
	require.Equal(t, lua.MaxRequestIDLen, *d.Components.Schemas["RequestID"].MaxLength)
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

// checkFields compares a schema with the fields that the server reads.
func checkFields(t *testing.T, d *openapi.Document, s *openapi.Schema, want fields, what string) {
	t.Helper()
	require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(s.Properties)), what)
	require.False(t, *s.Additional, what)
	for name, target := range want {
		p := d.Resolve(t, s.Properties[name])
		switch target := target.(type) {
		case objects:
			require.Equal(t, "array", p.Type, name)
			checkFields(t, d, d.Resolve(t, p.Items), target(), what+"."+name)
		case *string, **string:
			require.Equal(t, "string", p.Type, name)
		default:
			require.Equal(t, "integer", p.Type, name)
		}
	}
}
