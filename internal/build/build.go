// Package build tells which version of a program this is.
package build

import "runtime/debug"

// stamp is the version of a released image: the linker sets it.
var stamp string

// Version is the stamp, the module's version, or the commit that the program was
// built from.
func Version() string {
	if stamp != "" {
		return stamp
	}
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// Args are a program's arguments with -version as programs of Go have it written as --version, as cobra wants it.
func Args(args []string) []string {
	if len(args) == 1 && args[0] == "-version" {
		return []string{"--version"}
	}
	return args
}
