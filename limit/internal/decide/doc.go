// Package decide takes tokens from one or more limits in one script call, from all of them or from none. It is not for
// buckets that refillers fill: see package lua.
//
// A limit is a [Rule]: a Lua function for Redis, and a [Model] in Go that computes the same in the memory of a process.
// The script is decide.lua with the rules put into it. So a limit behaves in the same way alone and together with
// others.
package decide
