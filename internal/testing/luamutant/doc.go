// Package luamutant makes mutants of Lua scripts: copies that differ from the script in one place. A test suite that
// passes with a mutant doesn't guard that place. The package doesn't run tests: package lua does.
//
// A script is parsed, changed in its tree and printed again, so a mutant has neither the comments nor the lines of its
// script.
package luamutant
