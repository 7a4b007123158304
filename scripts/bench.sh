#!/bin/sh
# Runs benchmarks, stores the figures in bin/bench, and compares them with the
# figures of the run before, if bin/benchstat exists.
#   bench.sh COUNT BENCH PACKAGES...
# BENCH is a regular expression for the names of benchmarks.
set -eu

count=$1 bench=$2
shift 2

mkdir -p bin/bench
# Only the figures of a complete run are stored.
trap 'rm -f bin/bench/running.txt bin/bench/failed' EXIT
: >bin/bench/running.txt

# The figures go to the terminal and to running.txt. sh has no pipefail, so the
# file "failed" records that go test failed.
rm -f bin/bench/failed
{
	# With -p 1, only one package runs at a time. Otherwise packages would slow each other.
	go test -run '^$' -bench "$bench" -benchmem -count "$count" -timeout 0 -p 1 "$@" ||
		touch bin/bench/failed
} | tee -a bin/bench/running.txt
[ ! -e bin/bench/failed ]

[ ! -f bin/bench/new.txt ] || mv bin/bench/new.txt bin/bench/old.txt
mv bin/bench/running.txt bin/bench/new.txt
if [ -x bin/benchstat ]; then
	if [ -f bin/bench/old.txt ]; then
		bin/benchstat bin/bench/old.txt bin/bench/new.txt
	else
		bin/benchstat bin/bench/new.txt
	fi
fi
