#!/bin/sh
# Makes sure that a C compiler is there: the race detector links through cgo
# everywhere but on macOS.
set -eu

cc=$(go env CC)
[ "$(go env GOOS)" != darwin ] || exit 0
# CC may carry flags ("gcc -m64"); its first word is the program.
if ! command -v "${cc%% *}" >/dev/null 2>&1; then
	echo "ensure-cc: ${cc%% *} is missing, installing a C compiler"
	"$(dirname "$0")/install-package.sh" "gcc libc6-dev" "gcc musl-dev" gcc || {
		echo "ensure-cc: could not install a C compiler: the race detector needs one (gcc or clang, with the C library's headers)" >&2
		exit 1
	}
fi
