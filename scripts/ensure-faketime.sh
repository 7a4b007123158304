#!/bin/sh
# Makes sure that libfaketime is there: the robustness suite steps the clock of
# Redis with it. A test that needs it fails and says so where it can't be had.
set -eu

found() {
	ls /usr/lib/*/faketime/libfaketime.so.1 /usr/lib/faketime/libfaketime.so.1 /usr/lib64/faketime/libfaketime.so.1 2>/dev/null | grep -q .
}

if ! found; then
	echo "ensure-faketime: libfaketime is missing, installing it"
	"$(dirname "$0")/install-package.sh" libfaketime libfaketime libfaketime || true
	found || echo "ensure-faketime: could not install libfaketime: tests that step the clock of Redis will fail" >&2
fi
