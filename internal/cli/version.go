package cli

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
