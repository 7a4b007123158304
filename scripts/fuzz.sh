#!/bin/sh
# Runs every fuzz test below a directory, each for FUZZTIME.
#   fuzz.sh FUZZTIME [DIR]
set -eu

fuzztime=$1
dir=${2:-.}

# Lines of the form ./policy/rate_test.go:func FuzzParseRate(
found=$(grep -rEo --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*\(' "$dir") || {
	echo "fuzz: no fuzz test below $dir" >&2
	exit 1
}
printf '%s\n' "$found" | while IFS=: read -r file func; do
	name=${func#func }
	name=${name%(}
	echo "fuzz: $file $name for $fuzztime"
	go test -run '^$' -fuzz "^$name\$" -fuzztime "$fuzztime" "$(dirname "$file")"
done
echo "fuzz: passed"
