#!/bin/sh
# Makes sure that curl is there, 7.82 or newer (--json): a test runs the
# transcript in docs/sidecar.md.
set -eu

if ! command -v curl >/dev/null 2>&1; then
	echo "ensure-curl: curl is missing, installing it"
	"$(dirname "$0")/install-package.sh" curl curl curl || {
		echo "ensure-curl: could not install curl: a test of the documentation needs it" >&2
		exit 1
	}
fi
curl --json '' --version >/dev/null 2>&1 || {
	echo "ensure-curl: $(curl --version | sed -n 1p) has no --json: install 7.82 or newer" >&2
	exit 1
}
