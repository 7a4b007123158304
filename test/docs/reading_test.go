package docs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// core has the packages that docs/reading.md names.
var core = []string{"policy", "lua", "refill", "election", "fetch", "internal/engine", "pool", "internal/replica"}

var qualified = regexp.MustCompile("`([a-z]+(?:\\.[A-Za-z]+)+)`")

// declared returns the types, functions and methods of a package, each as package.Name or package.Type.Name.
func declared(t *testing.T, dir string) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	paths, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
	require.NoError(t, err)
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, d := range file.Decls {
			switch d := d.(type) {
			case *ast.FuncDecl:
				names[file.Name.Name+"."+receiver(d)+d.Name.Name] = true
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if s, ok := s.(*ast.TypeSpec); ok {
						names[file.Name.Name+"."+s.Name.Name] = true
					}
				}
			}
		}
	}
	return names
}

// receiver returns the name of a method's type with a dot after it. For a function it returns the empty string.
func receiver(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return ""
	}
	of := d.Recv.List[0].Type
	for {
		switch e := of.(type) {
		case *ast.StarExpr:
			of = e.X
		case *ast.IndexExpr:
			of = e.X
		case *ast.Ident:
			return e.Name + "."
		default:
			return ""
		}
	}
}

// Each type, function and method that docs/reading.md names must exist.
func TestTheReadingOrderNamesWhatIsThere(t *testing.T) {
	t.Parallel()
	names := map[string]bool{}
	for _, dir := range core {
		for name := range declared(t, dir) {
			names[name] = true
		}
	}
	page, err := os.ReadFile(filepath.Join("../..", "docs/reading.md"))
	require.NoError(t, err)
	found := 0
	for _, m := range qualified.FindAllStringSubmatch(string(page), -1) {
		if strings.HasSuffix(m[1], ".lua") {
			continue
		}
		found++
		require.True(t, names[m[1]], "docs/reading.md: there is no %s", m[1])
	}
	require.Greater(t, found, 25)
}
