package config

import (
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/fields"
)

// The reference and the schema are generated from the structs that a file is decoded into. The tags of the fields have
// their kinds, defaults and variables. The comments have their descriptions.

var writeReference = flag.Bool("write", false, "write docs/configuration.md and schema.json")

func TestReferenceAndSchemaAreThoseOfTheStructs(t *testing.T) {
	t.Parallel()
	comments := commentsOf(t, "file.go", "redisconn/options.go", "etcdconn/etcdconn.go", "credential/tls.go")
	described := fields.New(kinds, &file{}).Describe()
	schema, err := json.MarshalIndent(schemaOf(t, described, comments, "config.file"), "", "  ")
	require.NoError(t, err)
	for path, text := range map[string]string{
		"schema.json": string(schema) + "\n", "../../docs/configuration.md": referenceOf(t, described, comments),
	} {
		if *writeReference {
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		}
		there, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, text, string(there), "%s is not current: run make config-docs", path)
	}
}

// commentsOf returns the comments of the fields of structs by type and field.
func commentsOf(t *testing.T, files ...string) map[string]string {
	t.Helper()
	comments := map[string]string{}
	for _, name := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		ast.Inspect(parsed, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, name := range f.Names {
						comments[parsed.Name.Name+"."+spec.Name.Name+"."+name.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
					}
				}
			}
			return true
		})
	}
	return comments
}

// comment returns the description of a field.
func comment(t *testing.T, comments map[string]string, f fields.Field) string {
	t.Helper()
	text := comments[f.Type+"."+f.Go]
	require.NotEmpty(t, text, "%s: %s.%s has no comment", f.Path, f.Type, f.Go)
	return text
}

// schemaOf returns the JSON Schema of a section.
func schemaOf(t *testing.T, list []fields.Field, comments map[string]string, section string) map[string]any {
	t.Helper()
	properties, required := map[string]any{}, []string{}
	for _, f := range list {
		var s map[string]any
		switch {
		case f.Kind != nil:
			s = map[string]any{}
			for k, v := range f.Kind.Schema {
				s[k] = v
			}
			if f.List {
				s = map[string]any{"type": "array", "items": s}
			}
		case f.Keyed:
			s = map[string]any{"type": "object", "additionalProperties": map[string]any{
				"anyOf": []any{map[string]any{"type": "null"}, schemaOf(t, f.Fields, comments, f.Section)},
			}}
		case f.List:
			s = map[string]any{"type": "array", "items": schemaOf(t, f.Fields, comments, f.Section)}
		default:
			s = schemaOf(t, f.Fields, comments, f.Section)
			s["type"] = []string{"object", "null"}
		}
		s["description"] = comment(t, comments, f)
		if f.Default != "" {
			s["default"] = f.Default
			if n := json.Number(f.Default); s["type"] == "integer" || s["type"] == "boolean" {
				s["default"] = json.RawMessage(n)
			}
		}
		properties[f.Name] = s
		if f.Required && f.Env == "" {
			required = append(required, f.Name)
		}
	}
	out := map[string]any{"type": "object", "additionalProperties": false, "properties": properties}
	if len(required) > 0 {
		out["required"] = required
	}
	need := func(names ...string) map[string]any { return map[string]any{"required": names} }
	switch section {
	case "config.file":
		out["$schema"] = "https://json-schema.org/draft/2020-12/schema"
		out["title"] = "Configuration of a refiller"
		out["anyOf"] = []any{need("buckets"), need("templates"), need("pools")}
	case "config.bucket":
		out["oneOf"] = []any{need("rate"), need("every", "tokens"), need("cron", "tokens")}
	case "config.template":
		out["required"] = append(required, "rate")
	}
	return out
}

// referenceHead is the beginning of the reference. In it @ means a backquote.
const referenceHead = `# Configuration

<!-- "make config-docs" makes this page from the structs in internal/config/file.go and their comments. -->

@refiller run --config FILE@ reads one YAML file. [The README](../README.md#use-it) has a short one. Check a file with
@refiller check FILE@, which prints each problem with its line. @refiller config schema@ prints a JSON Schema for
editors.

- **Values.** A duration is written as @100ms@, @5s@, @1h30m@ or @7d@, and a rate as @500/s@, @10/m@ or @1000/24h@. Put
  text that looks like a number in quotes.
- **YAML.** Unknown fields and fields that are given twice are refused. So are YAML's anchors, aliases, merge keys and
  tags.
- **Flags and environment variables.** A flag has precedence over its environment variable, and the variable over the
  file. For example, the variable @REFILLER_REDIS_CA@ belongs to the flag @--redis-ca@. The flags @--redis@ and @--etcd@
  set the addresses. An empty variable is ignored. A variable that no program reads is refused if its name seems
  misspelled, as in @REFILLER_REDIS_PASSWRD@.
- **Passwords.** The configuration file itself contains no password. Store a password in the file that @password_file@
  names, or in its environment variable, such as @REFILLER_REDIS_PASSWORD@. For Redis you can also put it,
  percent-encoded, into the URL of @REFILLER_REDIS_URL@ or @--redis@: @redis://user:password(at)host@.
- **Files with passwords, certificates and keys** are read again for each new connection and login.
- **Changes.** Replicas apply a changed file without a restart, except for [some
  fields](operations.md#change-a-limit).

Below, each field has its meaning and, in parentheses, its values, its default and its environment variable.

`

// referenceOf returns the text of docs/configuration.md.
func referenceOf(t *testing.T, list []fields.Field, comments map[string]string) string {
	t.Helper()
	r := reference{t: t, comments: comments, first: map[string]string{}}
	r.b.WriteString(strings.NewReplacer("@", "`", "(at)", "@").Replace(referenceHead))
	r.section("The whole file", list)
	return r.b.String()
}

// reference writes the sections. It describes the fields of a Go struct in the first section that has them.
type reference struct {
	t        *testing.T
	comments map[string]string
	b        strings.Builder
	first    map[string]string // sections by struct
}

func (r *reference) section(title string, list []fields.Field) {
	fmt.Fprintf(&r.b, "## %s\n\n", title)
	r.list(title, "", list)
	for _, f := range list {
		if len(f.Fields) > 0 && f.Name != "tls" {
			r.b.WriteString("\n")
			r.section(f.Path, f.Fields)
		}
	}
}

func (r *reference) list(title, before string, list []fields.Field) {
	again := map[string][]string{}     // names of fields, by the section that describes them
	variables := map[string][]string{} // variables of these fields, by the same section
	for _, f := range list {
		if f.Name == "tls" {
			r.list(title, "tls.", f.Fields)
			continue
		}
		if r.first[f.Type] == "" {
			r.first[f.Type] = title
		}
		name, other := "**`"+before+f.Name+"`**", r.first[f.Type]
		if other == title {
			r.b.WriteString(wrapped(comment(r.t, r.comments, f)+facts(f), "- "+name+": ", "  ") + "\n")
			continue
		}
		again[other] = append(again[other], name)
		variables[other] = append(variables[other], variablesOf(f)...)
	}
	for _, other := range slices.Sorted(maps.Keys(again)) {
		text := strings.Join(again[other], ", ") + ": As in " + other + "." + inParentheses(variables[other])
		r.b.WriteString(wrapped(text, "- ", "  ") + "\n")
	}
}

// facts returns the information that the tags have about a field, in parentheses.
func facts(f fields.Field) string {
	var facts []string
	add := func(is bool, text string) {
		if is {
			facts = append(facts, text)
		}
	}
	if f.Kind != nil {
		want := brief.Replace(f.Kind.Want)
		add(want != "", want)
	}
	add(f.Required, "required")
	add(f.Default != "", "default `"+f.Default+"`")
	return inParentheses(append(facts, variablesOf(f)...))
}

// brief shortens the description of a value in messages to the part that a reader of the page needs.
var brief = strings.NewReplacer(
	"one of false, true", "",
	"a whole number from ", "", "a duration from ", "", " in whole multiples of 1µs", "", "one of ", "",
	"a percentage from ", "", "tokens/time such as 500/s, 10/m or 1000/24h", "", "the path of a PEM file", "PEM",
	"the path of a file", "", "a user's name", "", "the name of a time zone such as ", "such as ",
	"host:port with a port from 0 to 65535, such as 127.0.0.1:9090, or ", "host:port, or ",
	"the beginning of the buckets' names, such as ", "such as ", "a bucket's name of ", "",
)

// variablesOf returns the environment variables of a field and of the secret that it names.
func variablesOf(f fields.Field) (names []string) {
	for _, name := range []string{f.Env, f.Secret} {
		if name != "" {
			names = append(names, "`"+name+"`")
		}
	}
	return names
}

func inParentheses(facts []string) string {
	if len(facts) == 0 {
		return ""
	}
	return " *(" + strings.Join(facts, "; ") + ")*"
}

// wrapped breaks text into lines of at most 120 columns.
func wrapped(text, first, others string) string {
	var b strings.Builder
	line := first
	for i, word := range strings.Fields(text) {
		switch {
		case i > 0 && len([]rune(line))+1+len([]rune(word)) > 120:
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			line = others + word
		case i > 0:
			line += " " + word
		default:
			line += word
		}
	}
	return b.String() + line
}
