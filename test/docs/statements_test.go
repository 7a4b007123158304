package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestOneStatementOnALine checks three rules. The header of an if or a switch doesn't assign to variables, but it may
// declare some. A line has only one statement. An assignment has at most two values, unless it swaps variables.
func TestOneStatementOnALine(t *testing.T) {
	t.Parallel()
	sources(t, func(path string, text []byte) {
		switch filepath.Ext(path) {
		case ".go":
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
			require.NoError(t, err)
			for pos, problem := range packed(files, file) {
				t.Errorf("%s: %s", files.Position(pos), problem)
			}
		case ".lua":
			for i, line := range strings.Split(string(text), "\n") {
				if packedLua(line) {
					t.Errorf("%s:%d: more than two values in one assignment", path, i+1)
				}
			}
		}
	})
}

// packed returns the statements of a file that break a rule of TestOneStatementOnALine, with the reasons.
func packed(files *token.FileSet, file *ast.File) map[token.Pos]string {
	found := map[token.Pos]string{}
	header := func(init ast.Stmt) {
		if a, ok := init.(*ast.AssignStmt); init != nil && (!ok || a.Tok != token.DEFINE) {
			found[init.Pos()] = "a header declares, it doesn't assign"
		}
	}
	list := func(statements []ast.Stmt) {
		for i := 1; i < len(statements); i++ {
			if files.Position(statements[i-1].End()).Line == files.Position(statements[i].Pos()).Line {
				found[statements[i].Pos()] = "one statement on a line"
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.IfStmt:
			header(n.Init)
		case *ast.SwitchStmt:
			header(n.Init)
		case *ast.TypeSwitchStmt:
			header(n.Init)
		case *ast.BlockStmt:
			list(n.List)
		case *ast.CaseClause:
			list(n.Body)
		case *ast.CommClause:
			list(n.Body)
		case *ast.AssignStmt:
			if len(n.Rhs) > 2 && !swaps(n) {
				found[n.Pos()] = "more than two values in one assignment"
			}
		case *ast.ValueSpec:
			if len(n.Values) > 2 {
				found[n.Pos()] = "more than two values in one declaration"
			}
		}
		return true
	})
	return found
}

// swaps reports whether an assignment swaps variables: each value is one of the variables on the left.
func swaps(a *ast.AssignStmt) bool {
	name := func(e ast.Expr) string {
		if id, ok := e.(*ast.Ident); ok {
			return id.Name
		}
		return ""
	}
	return !slices.ContainsFunc(a.Rhs, func(value ast.Expr) bool {
		return name(value) == "" || !slices.ContainsFunc(a.Lhs, func(to ast.Expr) bool { return name(to) == name(value) })
	})
}

var (
	luaAssignment = regexp.MustCompile(`^\s*(?:local )?([\w.\[\]+ ]+(?:, [\w.\[\]+ ]+){2,}) = (.+?)(?: -- .*)?$`)
	luaNested     = regexp.MustCompile(`'[^']*'|\([^()]*\)|\{[^{}]*\}`)
)

// packedLua reports whether a line of Lua assigns more than two values. The results of one call count as one value.
func packedLua(line string) bool {
	m := luaAssignment.FindStringSubmatch(line)
	if m == nil {
		return false
	}
	values := m[2]
	for luaNested.MatchString(values) {
		values = luaNested.ReplaceAllString(values, "")
	}
	return strings.Count(values, ",") > 1
}

func TestPackedStatementsAreFound(t *testing.T) {
	t.Parallel()
	for statement, n := range map[string]int{
		"if x = f(); x > 0 {}":            1,
		"if x++; x > 0 {}":                1,
		"switch x = f(); x {}":            1,
		"x, y, z = 1, 2, 3":               1,
		"var x, y, z = 1, 2, 3":           1,
		"f := func() { g(); h() }; f()":   2,
		"if x := f(); x > 0 {}":           0,
		"x, y, z = y, z, x":               0,
		"x, y, z := f()":                  0,
		"x, y = 1, 2":                     0,
		"for i, j := 0, 1; i < j; i++ {}": 0,
	} {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, "", "package p\nfunc f() {\n"+statement+"\n}", parser.SkipObjectResolution)
		require.NoError(t, err)
		require.Len(t, packed(files, file), n, statement)
	}
	for line, want := range map[string]bool{
		"local a, b, c = 1, f(2, 3), {4}": true,
		"  s.a, s.b, s.c = 1, 2, 3 -- x":  true,
		"local a, b, c = f(1, 2, 3, 4)":   false,
		"local a, b = 1, 2":               false,
	} {
		require.Equal(t, want, packedLua(line), line)
	}
}
