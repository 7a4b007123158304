package cli

import "runtime/debug"

// stamp is the version of a released image. The linker sets it.
var stamp string

// Version returns the stamp if it is set. Otherwise it returns the version of the main module, as Go recorded it in the
// program.
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
