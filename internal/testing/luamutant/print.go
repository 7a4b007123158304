package luamutant

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/yuin/gopher-lua/ast"
)

// include matches a line of a script that a shared piece replaces. For the parser, the line becomes a call of
// includeFunc.
var include = regexp.MustCompile(`(?m)^--#include (\S+)$`)

const includeFunc = "include_piece"

// printer writes a tree as Lua.
type printer struct {
	strings.Builder
	depth int
}

func (p *printer) line(format string, args ...any) {
	p.WriteString(strings.Repeat("  ", p.depth))
	fmt.Fprintf(p, format, args...)
	p.WriteByte('\n')
}

func printed(stmts []ast.Stmt) string {
	var p printer
	p.stmts(stmts)
	return p.String()
}

func (p *printer) stmts(stmts []ast.Stmt) {
	for _, s := range stmts {
		p.stmt(s)
	}
}

func (p *printer) block(stmts []ast.Stmt) {
	p.depth++
	p.stmts(stmts)
	p.depth--
}

func (p *printer) stmt(s ast.Stmt) {
	switch s := s.(type) {
	case *ast.AssignStmt:
		p.line("%s = %s", list(s.Lhs), list(s.Rhs))
	case *ast.LocalAssignStmt:
		p.local(s)
	case *ast.FuncCallStmt:
		p.call(s)
	case *ast.DoBlockStmt:
		p.line("do")
		p.block(s.Stmts)
		p.line("end")
	case *ast.WhileStmt:
		p.line("while %s do", expr(s.Condition))
		p.block(s.Stmts)
		p.line("end")
	case *ast.IfStmt:
		p.line("if %s then", expr(s.Condition))
		p.block(s.Then)
		if len(s.Else) > 0 {
			p.line("else")
			p.block(s.Else)
		}
		p.line("end")
	case *ast.NumberForStmt:
		bounds := []ast.Expr{s.Init, s.Limit}
		if s.Step != nil {
			bounds = append(bounds, s.Step)
		}
		p.line("for %s = %s do", s.Name, list(bounds))
		p.block(s.Stmts)
		p.line("end")
	case *ast.GenericForStmt:
		p.line("for %s in %s do", strings.Join(s.Names, ", "), list(s.Exprs))
		p.block(s.Stmts)
		p.line("end")
	case *ast.ReturnStmt:
		p.line("%s", strings.TrimSpace("return "+list(s.Exprs)))
	case *ast.BreakStmt:
		p.line("break")
	default:
		panic(fmt.Sprintf("luamutant: a statement %T", s)) // the scripts have no such statement
	}
}

func (p *printer) local(s *ast.LocalAssignStmt) {
	if f, ok := function(s); ok {
		p.line("local function %s(%s)", s.Names[0], params(f))
		p.block(f.Stmts)
		p.line("end")
		return
	}
	text := "local " + strings.Join(s.Names, ", ")
	if len(s.Exprs) > 0 {
		text += " = " + list(s.Exprs)
	}
	p.line("%s", text)
}

// function returns the function that a statement declares.
func function(s *ast.LocalAssignStmt) (*ast.FunctionExpr, bool) {
	if len(s.Exprs) != 1 {
		return nil, false
	}
	f, ok := s.Exprs[0].(*ast.FunctionExpr)
	return f, ok
}

// call prints a call. A call of includeFunc becomes the line of the include again, without indentation.
func (p *printer) call(s *ast.FuncCallStmt) {
	if c, ok := s.Expr.(*ast.FuncCallExpr); ok && c.Func != nil && expr(c.Func) == includeFunc {
		fmt.Fprintf(p, "--#include %s\n", c.Args[0].(*ast.StringExpr).Value)
		return
	}
	p.line("%s", expr(s.Expr))
}

func params(f *ast.FunctionExpr) string {
	names := slices.Clone(f.ParList.Names)
	if f.ParList.HasVargs {
		names = append(names, "...")
	}
	return strings.Join(names, ", ")
}

func list(exprs []ast.Expr) string {
	texts := make([]string, len(exprs))
	for i, e := range exprs {
		texts[i] = expr(e)
	}
	return strings.Join(texts, ", ")
}

func expr(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.NilExpr:
		return "nil"
	case *ast.TrueExpr:
		return "true"
	case *ast.FalseExpr:
		return "false"
	case *ast.NumberExpr:
		return e.Value
	case *ast.StringExpr:
		return quoted(e.Value)
	case *ast.Comma3Expr:
		return single("...", e.AdjustRet)
	case *ast.IdentExpr:
		return e.Value
	case *ast.AttrGetExpr:
		if key, ok := e.Key.(*ast.StringExpr); ok && identifier.MatchString(key.Value) {
			return prefix(e.Object) + "." + key.Value
		}
		return prefix(e.Object) + "[" + expr(e.Key) + "]"
	case *ast.TableExpr:
		return table(e)
	case *ast.FuncCallExpr:
		if e.Func == nil {
			return single(prefix(e.Receiver)+":"+e.Method+"("+list(e.Args)+")", e.AdjustRet)
		}
		return single(prefix(e.Func)+"("+list(e.Args)+")", e.AdjustRet)
	case *ast.UnaryMinusOpExpr:
		return "-" + operand(e.Expr, unary+1)
	case *ast.UnaryNotOpExpr:
		return "not " + operand(e.Expr, unary)
	case *ast.UnaryLenOpExpr:
		return "#" + operand(e.Expr, unary)
	default:
		if l, operator, r, ok := operation(e); ok {
			binds := binding(e)
			return operand(l, binds) + " " + operator + " " + operand(r, binds+1)
		}
		panic(fmt.Sprintf("luamutant: an expression %T", e)) // the scripts have no such expression
	}
}

var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// single returns the text of an expression that may have several values. It adds parentheses if the script used them to
// cut the values to the first one.
func single(text string, adjusted bool) string {
	if adjusted {
		return "(" + text + ")"
	}
	return text
}

// prefix prints an expression that an index or a call follows.
func prefix(e ast.Expr) string {
	switch e.(type) {
	case *ast.IdentExpr, *ast.AttrGetExpr, *ast.FuncCallExpr:
		return expr(e)
	}
	return "(" + expr(e) + ")"
}

// operation returns the parts of an operation that has two operands.
func operation(e ast.Expr) (l ast.Expr, operator string, r ast.Expr, ok bool) {
	switch e := e.(type) {
	case *ast.LogicalOpExpr:
		return e.Lhs, e.Operator, e.Rhs, true
	case *ast.RelationalOpExpr:
		return e.Lhs, e.Operator, e.Rhs, true
	case *ast.StringConcatOpExpr:
		return e.Lhs, "..", e.Rhs, true
	case *ast.ArithmeticOpExpr:
		return e.Lhs, e.Operator, e.Rhs, true
	}
	return nil, "", nil, false
}

// strength is how strongly an operator binds. An operand that binds less strongly than its operator is printed in
// parentheses. A right operand is so too if it binds as strongly. The operators .. and ^, which group to the right, are
// printed in this way as well.
var strength = map[string]int{"or": 1, "and": 2, "..": 4, "+": 5, "-": 5, "*": 6, "/": 6, "%": 6, "^": 9}

const (
	relational = 3
	unary      = 7
	atom       = 10
)

func binding(e ast.Expr) int {
	switch e.(type) {
	case *ast.UnaryMinusOpExpr, *ast.UnaryNotOpExpr, *ast.UnaryLenOpExpr:
		return unary
	case *ast.RelationalOpExpr:
		return relational
	}
	if _, operator, _, ok := operation(e); ok {
		return strength[operator]
	}
	return atom
}

// operand prints an operand. It adds parentheses if the operand binds less strongly than binds.
func operand(e ast.Expr, binds int) string {
	if binding(e) < binds {
		return "(" + expr(e) + ")"
	}
	return expr(e)
}

func table(e *ast.TableExpr) string {
	fields := make([]string, len(e.Fields))
	for i, f := range e.Fields {
		fields[i] = expr(f.Value)
		if f.Key == nil {
			continue
		}
		key := "[" + expr(f.Key) + "]"
		if name, ok := f.Key.(*ast.StringExpr); ok && identifier.MatchString(name.Value) {
			key = name.Value
		}
		fields[i] = key + " = " + fields[i]
	}
	return "{" + strings.Join(fields, ", ") + "}"
}

func quoted(s string) string {
	return `'` + strings.NewReplacer(`\`, `\\`, `'`, `\'`, "\n", `\n`, "\r", `\r`, "\x00", `\0`).Replace(s) + `'`
}
