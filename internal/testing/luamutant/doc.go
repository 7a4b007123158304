// Package luamutant makes mutants of Lua scripts. A mutant is a copy of a script with one change. If the tests pass
// with a mutant, they don't check the place of the change. The package doesn't run the tests: package lua does.
//
// The package parses a script, changes the syntax tree, and prints the tree. So a mutant doesn't have the comments and
// line breaks of its script.
package luamutant
