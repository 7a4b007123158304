#!/bin/sh
# Checks that each function that no program of the project reaches is public API. scripts/public-api.txt lists these.
# Any other unreachable function is dead, or is used by tests only.
#   deadcode.sh           fails if a function is unreachable and not listed, or listed and reachable
#   deadcode.sh -write    writes the list
set -eu

list=scripts/public-api.txt
found=$(bin/deadcode -f '{{range .Funcs}}{{printf "%s %s\n" $.Path .Name}}{{end}}' ./cmd/... |
	sed -n 's#^github.com/tokenrefill/refiller/##p' | LC_ALL=C sort)
if [ "${1:-}" = -write ]; then
	printf '%s\n' "$found" >$list
fi
printf '%s\n' "$found" | diff $list - || {
	echo "deadcode: > is reached by no program: use it, remove it or, if it is public API, list it in $list" >&2
	echo "deadcode: < is listed there and needn't be" >&2
	exit 1
}
