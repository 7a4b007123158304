// Package decide asks limits for tokens: one script call, all of them or none.
//
// A limit is a [Rule]: a Lua function for Redis and, for one process alone, a
// [Model] in Go that computes the same. The script is decide.lua with the rules
// put into it, so a limit behaves alike alone and among others.
package decide
