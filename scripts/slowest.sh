#!/bin/sh
# Runs a command that calls go test. Then it prints the ten slowest packages and
# the time of the whole command. It fails if the command fails.
#   slowest.sh COMMAND...
set -eu

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
began=$(date +%s)
# sh has no pipefail, so the file "status" records that the command succeeded.
{ "$@" && echo 0 >"$dir/status"; } | tee "$dir/log" || true

echo "slowest packages:"
# Lines of the form "ok <tab> example.org/package <tab> 1.234s".
awk '($1 == "ok" || $1 == "FAIL") && $3 ~ /^[0-9.]+s$/ { printf "%10s  %s\n", $3, $2 }' "$dir/log" |
	sort -rn | head -n 10
seconds=$(($(date +%s) - began))
echo "all of it: $((seconds / 60))m$((seconds % 60))s"
[ -e "$dir/status" ]
