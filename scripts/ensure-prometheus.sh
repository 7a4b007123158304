#!/bin/sh
# Makes sure that the tests of rules and dashboards have prometheus and promtool.
set -eu

if ! command -v promtool >/dev/null 2>&1 || ! command -v prometheus >/dev/null 2>&1; then
	echo "ensure-prometheus: prometheus or promtool is missing, installing them"
	"$(dirname "$0")/install-package.sh" prometheus prometheus prometheus || {
		echo "ensure-prometheus: could not install prometheus: put prometheus and promtool into the PATH" >&2
		exit 1
	}
fi
echo "ensure-prometheus: $(promtool --version 2>&1 | sed -n 1p)"
