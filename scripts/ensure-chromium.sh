#!/bin/sh
# Makes sure that the test of the status page has a Chromium.
set -eu

for name in chromium chromium-browser google-chrome; do
	if command -v "$name" >/dev/null 2>&1; then
		echo "ensure-chromium: $(command -v "$name")"
		exit 0
	fi
done
echo "ensure-chromium: chromium is missing, installing it"
"$(dirname "$0")/install-package.sh" chromium chromium chromium || {
	echo "ensure-chromium: could not install chromium: put chromium or google-chrome into the PATH" >&2
	exit 1
}
