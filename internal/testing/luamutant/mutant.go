package luamutant

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/yuin/gopher-lua/ast"
	"github.com/yuin/gopher-lua/parse"
)

// Mutant is a script with one change.
type Mutant struct {
	Name string // the script and the change; mutants of one script have different names
	Line int    // line of the changed statement in the script
	Text string // the changed script
}

// Of returns the mutants of a script, in the order of its statements.
func Of(name, source string) ([]Mutant, error) {
	stmts, err := parsed(name, source)
	if err != nil {
		return nil, err
	}
	m := &maker{name: name, stmts: stmts, seen: map[string]int{}}
	m.block(&m.stmts)
	return m.mutants, nil
}

// Printed returns a script in the form in which its mutants are printed, but without a change.
func Printed(name, source string) (string, error) {
	stmts, err := parsed(name, source)
	return printed(stmts), err
}

func parsed(name, source string) ([]ast.Stmt, error) {
	source = include.ReplaceAllString(source, includeFunc+"('$1')")
	stmts, err := parse.Parse(strings.NewReader(source), name)
	if err != nil {
		return nil, fmt.Errorf("luamutant: %w", err)
	}
	return stmts, nil
}

// maker changes the tree of a script, prints it, and undoes the change.
type maker struct {
	name    string
	stmts   []ast.Stmt
	within  string   // name of the Lua function that is being changed; empty outside of functions
	at      ast.Stmt // the statement that is being changed
	mutants []Mutant
	seen    map[string]int // number of mutants with a name, before numbers are appended
}

// add calls change, adds the changed tree as a mutant, and calls restore to undo the change. what describes the change
// in the name of the mutant.
func (m *maker) add(what string, change, restore func()) {
	name := m.name
	if m.within != "" {
		name += " " + m.within
	}
	name += ": " + what
	m.seen[name]++
	if n := m.seen[name]; n > 1 {
		name = fmt.Sprintf("%s #%d", name, n)
	}
	change()
	m.mutants = append(m.mutants, Mutant{Name: name, Line: m.at.Line(), Text: printed(m.stmts)})
	restore()
}

// changed adds a mutant in which the expression at place, in the present statement, is replaced.
func (m *maker) changed(place *ast.Expr, becomes ast.Expr) {
	was := *place
	before := head(m.at)
	*place = becomes
	what := fmt.Sprintf("%s -> %s in %s", expr(was), expr(becomes), before)
	*place = was
	m.add(what, func() { *place = becomes }, func() { *place = was })
}

// head returns the first line of a statement, shortened if it is long.
func head(s ast.Stmt) string {
	const most = 72
	text, _, _ := strings.Cut(printed([]ast.Stmt{s}), "\n")
	if len(text) > most {
		text = text[:most] + "..."
	}
	return text
}

func (m *maker) block(stmts *[]ast.Stmt) {
	for i := range *stmts {
		m.at = (*stmts)[i]
		m.stmt(stmts, i)
	}
}

// deleted adds the mutant without statement i.
func (m *maker) deleted(stmts *[]ast.Stmt, i int) {
	was := *stmts
	m.add("delete "+head(was[i]),
		func() { *stmts = append(append([]ast.Stmt{}, was[:i]...), was[i+1:]...) },
		func() { *stmts = was })
}

func (m *maker) stmt(stmts *[]ast.Stmt, i int) {
	switch s := (*stmts)[i].(type) {
	case *ast.LocalAssignStmt:
		m.local(s)
	case *ast.AssignStmt:
		m.deleted(stmts, i)
		m.values(s.Lhs)
		m.values(s.Rhs)
	case *ast.FuncCallStmt:
		if strings.HasPrefix(head(s), "--#include") {
			return
		}
		m.deleted(stmts, i)
		m.value(&s.Expr)
	case *ast.ReturnStmt:
		m.deleted(stmts, i)
		m.values(s.Exprs)
	case *ast.BreakStmt:
		m.deleted(stmts, i)
	case *ast.DoBlockStmt:
		m.block(&s.Stmts)
	case *ast.WhileStmt:
		m.condition(&s.Condition)
		m.block(&s.Stmts)
	case *ast.IfStmt:
		m.condition(&s.Condition)
		m.block(&s.Then)
		m.block(&s.Else)
	case *ast.NumberForStmt:
		m.value(&s.Init)
		m.value(&s.Limit)
		if s.Step != nil {
			m.value(&s.Step)
		}
		m.block(&s.Stmts)
	case *ast.GenericForStmt:
		m.values(s.Exprs)
		m.block(&s.Stmts)
	}
}

// local adds the mutants of a declaration. For a local function, these are the mutants of its body. For other
// variables, one mutant lacks the initial values, and the others change them.
func (m *maker) local(s *ast.LocalAssignStmt) {
	if f, ok := function(s); ok {
		outside := m.within
		m.within = s.Names[0]
		m.block(&f.Stmts)
		m.within = outside
		return
	}
	if len(s.Exprs) == 0 {
		return
	}
	was := s.Exprs
	m.add("delete the values of "+head(s), func() { s.Exprs = nil }, func() { s.Exprs = was })
	m.values(s.Exprs)
}

func (m *maker) values(exprs []ast.Expr) {
	for i := range exprs {
		m.value(&exprs[i])
	}
}

// value adds the mutants of an expression that isn't a condition.
func (m *maker) value(place *ast.Expr) {
	switch e := (*place).(type) {
	case *ast.NumberExpr:
		m.changed(place, offByOne(e))
	case *ast.TrueExpr:
		m.changed(place, &ast.FalseExpr{})
	case *ast.FalseExpr:
		m.changed(place, &ast.TrueExpr{})
	case *ast.AttrGetExpr:
		m.value(&e.Object)
		m.value(&e.Key)
	case *ast.TableExpr:
		for _, f := range e.Fields {
			m.value(&f.Value)
		}
	case *ast.FuncCallExpr:
		if e.Func == nil {
			m.value(&e.Receiver)
		}
		m.values(e.Args)
	case *ast.LogicalOpExpr:
		if e.Operator == "and" {
			m.condition(&e.Lhs)
		} else {
			m.value(&e.Lhs)
		}
		m.value(&e.Rhs)
	case *ast.RelationalOpExpr, *ast.UnaryNotOpExpr:
		m.condition(place)
	case *ast.StringConcatOpExpr:
		m.value(&e.Lhs)
		m.value(&e.Rhs)
	case *ast.ArithmeticOpExpr:
		m.value(&e.Lhs)
		m.value(&e.Rhs)
	case *ast.UnaryMinusOpExpr:
		m.value(&e.Expr)
	case *ast.UnaryLenOpExpr:
		m.value(&e.Expr)
	}
}

var (
	opposite = map[string]string{"==": "~=", "~=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
	adjacent = map[string]string{"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
)

// condition adds the mutants of an expression that is used only as a condition. Each mutant negates a part of it,
// includes or excludes the limit of a comparison, or changes a value in it.
func (m *maker) condition(place *ast.Expr) {
	switch e := (*place).(type) {
	case *ast.LogicalOpExpr:
		m.condition(&e.Lhs)
		m.condition(&e.Rhs)
	case *ast.RelationalOpExpr:
		m.changed(place, &ast.RelationalOpExpr{Lhs: e.Lhs, Operator: opposite[e.Operator], Rhs: e.Rhs})
		if operator := adjacent[e.Operator]; operator != "" {
			m.changed(place, &ast.RelationalOpExpr{Lhs: e.Lhs, Operator: operator, Rhs: e.Rhs})
		}
		m.value(&e.Lhs)
		m.value(&e.Rhs)
	case *ast.UnaryNotOpExpr:
		m.changed(place, e.Expr)
		m.value(&e.Expr)
	default:
		m.changed(place, &ast.UnaryNotOpExpr{Expr: e})
		m.value(place)
	}
}

// offByOne returns e plus one. From 2^53 on it returns e minus one, because a double can't represent 2^53 plus one.
func offByOne(e *ast.NumberExpr) ast.Expr {
	const exact = 1 << 53
	n, err := strconv.ParseFloat(e.Value, 64)
	if err != nil {
		panic(fmt.Sprintf("luamutant: number %q", e.Value)) // the scripts have only decimal numbers
	}
	if n < exact {
		n++
	} else {
		n--
	}
	return &ast.NumberExpr{Value: strconv.FormatFloat(n, 'f', -1, 64)}
}
