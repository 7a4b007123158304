package docs

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
	"github.com/tokenrefill/refiller/internal/sidecar/limits"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// checkYAML decodes a block as a configuration, a part of a configuration, limits, or limits for Envoy, depending on
// its fields. The tests of deploy/k8s check values of the chart and Kubernetes objects.
func checkYAML(t *testing.T, b block) {
	t.Helper()
	var top map[string]any
	decoder := yaml.NewDecoder(strings.NewReader(b.Text))
	require.NoError(t, decoder.Decode(&top))
	_, domain := top["domain"]
	_, named := top["limits"]
	_, values := top["config"]
	_, object := top["apiVersion"]
	switch {
	case domain:
		_, err := envoy.Parse(map[string][]byte{"limits.yaml": []byte(b.Text)}, nil)
		require.NoError(t, err)
	case named:
		_, err := limits.Parse("limits.yaml", []byte(b.Text), nil, nil)
		require.NoError(t, err)
	case values, object:
	default:
		_, err := config.Load(config.Source{Data: []byte(completed(b.Text, top))})
		require.NoError(t, err)
	}
}

// completed returns a part of a configuration, with the fields added that every configuration needs.
func completed(text string, top map[string]any) string {
	for field, rest := range map[string]string{"redis": `{url: "redis://127.0.0.1:6379"}`, "version": "1"} {
		if top[field] == nil {
			text = field + ": " + rest + "\n" + text
		}
	}
	return text
}

// packages that statements in the documentation use, by name.
var packages = map[string]string{
	"context": "context", "errors": "errors", "fmt": "fmt", "http": "net/http", "log": "log", "time": "time",
	"redis": "github.com/redis/go-redis/v9",
	"fetch": "github.com/tokenrefill/refiller/fetch", "policy": "github.com/tokenrefill/refiller/policy",
	"lazy":      "github.com/tokenrefill/refiller/limit/lazy",
	"httplimit": "github.com/tokenrefill/refiller/middleware/httplimit",
}

// checkGo checks a program with go vet. It makes a program of a block that has only statements. These may use a
// context, a Redis client and a client of the SDK.
func checkGo(t *testing.T, b block) {
	t.Helper()
	source := b.Text
	if !strings.HasPrefix(source, "package ") {
		source = wrapped(t, source)
	}
	file := filepath.Join(t.TempDir(), "main.go")
	require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
	vet := exec.CommandContext(t.Context(), "go", "vet", file)
	vet.Dir = "../.."
	out, err := vet.CombinedOutput()
	require.NoError(t, err, "%s\n%s", out, source)
}

// wrapped makes a program of statements. Variables that they declare need not be used.
func wrapped(t *testing.T, statements string) string {
	t.Helper()
	body := "func statements(ctx context.Context, rdb redis.UniversalClient, client *fetch.Client) (err error) {\n" +
		statements
	file, err := parser.ParseFile(token.NewFileSet(), "", "package main\n"+body+"}", 0)
	require.NoError(t, err)
	declared := map[string]bool{}
	for _, s := range file.Decls[0].(*ast.FuncDecl).Body.List {
		if a, ok := s.(*ast.AssignStmt); ok && a.Tok == token.DEFINE {
			for _, left := range a.Lhs {
				declared[left.(*ast.Ident).Name] = true
			}
		}
	}
	delete(declared, "_")
	if declared["client"] {
		body = strings.Replace(body, "client *fetch.Client", "_ *fetch.Client", 1)
	}
	for name := range declared {
		body += "\t_ = " + name + "\n"
	}
	body += "\treturn err\n}\n"
	program := "package main\n\nfunc main() { _ = statements }\n\n" + strings.Replace(
		body,
		"(err error) {",
		"(failed error) {\n\tvar err error",
		1,
	)
	if declared["err"] {
		program = strings.Replace(program, "\tvar err error\n", "", 1)
	}
	imports := ""
	for name, path := range packages {
		if regexp.MustCompile(`\b` + name + `\.[A-Z]`).MatchString(program) {
			imports += fmt.Sprintf("import %s %q\n", name, path)
		}
	}
	return strings.Replace(program, "\n\n", "\n\n"+imports+"\n", 1)
}

// checkCommand checks a command that isn't run. The files, flags and targets that it names must exist.
func checkCommand(t *testing.T, command string) {
	t.Helper()
	for part := range strings.SplitSeq(withoutComment(command), "&&") {
		args := strings.Fields(part)
		for len(args) > 0 && strings.Contains(args[0], "=") { // environment variables
			args = args[1:]
		}
		require.NotEmpty(t, args, command)
		switch args[0] {
		case "refiller", "consumer":
			checkProgram(t, args[0], args[1:])
		case "go":
			checkGoCommand(t, args[1:])
		case "make":
			checkMake(t, args[1:])
		case "kubectl", "helm", "docker":
			for _, arg := range args[1:] {
				if path, _, _ := strings.Cut(arg, ":"); strings.HasPrefix(path, "deploy/") &&
					!strings.HasPrefix(arg, "deploy/limits") {
					require.FileExists(t, existing(path), command)
				}
			}
		case "redis-cli", "etcdctl", "etcdutl", "crane", "cd", "git", "mkdir", "curl":
		default:
			t.Errorf("this test does not know %s: %s", args[0], command)
		}
	}
}

// existing returns a file that exists if the path exists: a file of the directory, or the path itself.
func existing(path string) string {
	path = "../../" + path
	if entries, err := os.ReadDir(path); err == nil {
		for _, e := range entries {
			if !e.IsDir() {
				return filepath.Join(path, e.Name())
			}
		}
	}
	return path
}

var quoted = regexp.MustCompile(`'[^']*'|"[^"]*"`)

// withoutComment removes comments and redirections from a command, and replaces quoted text by a word.
func withoutComment(command string) string {
	command, _, _ = strings.Cut(command, " #")
	command, _, _ = strings.Cut(command, " <")
	return quoted.ReplaceAllString(strings.NewReplacer("\\\n", " ", "\n", " ").Replace(command), "QUOTED")
}

// checkProgram runs a program of the project with the arguments and --help. The program fails if it doesn't know an
// argument.
func checkProgram(t *testing.T, name string, args []string) {
	t.Helper()
	args = slices.DeleteFunc(slices.Clone(args), func(arg string) bool { return arg == "&" })
	out, err := exec.CommandContext(t.Context(), testenv.Build(t, "./cmd/"+name), append(args, "--help")...).
		CombinedOutput()
	require.NoError(t, err, "%s %v\n%s", name, args, out)
	require.Contains(t, string(out), name+" "+args[0])
}

var testName = regexp.MustCompile(`(?m)^func (Test\w+|Benchmark\w+)`)

// checkGoCommand checks that the packages and the tests of a go command exist.
func checkGoCommand(t *testing.T, args []string) {
	t.Helper()
	dir := "../.."
	run := ""
	names := []string(nil)
	for i := 0; i < len(args); i++ {
		switch {
		case args[i] == "-args":
			args = args[:i]
		case args[i] == "-C":
			i++
			dir = filepath.Join(dir, args[i])
		case args[i] == "-run" || args[i] == "-bench":
			i++
			run = strings.Trim(args[i], "'^$")
		case strings.HasPrefix(args[i], "./cmd/") && args[0] == "run":
			checkProgram(t, filepath.Base(args[i]), args[i+1:])
			return
		case strings.HasPrefix(args[i], "./"):
			path := filepath.Join(dir, strings.TrimSuffix(args[i], "/..."))
			require.DirExists(t, path)
			sources, err := filepath.Glob(filepath.Join(path, "*_test.go"))
			require.NoError(t, err)
			for _, source := range sources {
				text, err := os.ReadFile(source)
				require.NoError(t, err)
				for _, m := range testName.FindAllSubmatch(text, -1) {
					names = append(names, string(m[1]))
				}
			}
		}
	}
	if run != "" && run != "TestName" {
		wanted := regexp.MustCompile(strings.Split(run, "/")[0])
		require.True(t, slices.ContainsFunc(names, wanted.MatchString), "no test is named %s in %v", run, args)
	}
}

// checkMake checks that targets and variables exist.
func checkMake(t *testing.T, args []string) {
	t.Helper()
	makefile, err := os.ReadFile("../../Makefile")
	require.NoError(t, err)
	for _, arg := range args {
		want := "\n" + arg + ":"
		if name, _, variable := strings.Cut(arg, "="); variable {
			want = "$(" + name + ")"
		}
		require.True(t, bytes.Contains(makefile, []byte(want)), "make %s: no %q", arg, want)
	}
}
