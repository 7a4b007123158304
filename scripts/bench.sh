#!/bin/sh
# Runs benchmarks, keeps the figures in bin/bench and compares them with those
# of the run before.
#   bench.sh COUNT BENCH PACKAGES...
# BENCH is a regular expression of benchmark names. benchstat is used if
# bin/benchstat is there.
set -eu

count=$1 bench=$2
shift 2

mkdir -p bin/bench
# Only a complete run becomes the one to compare with.
trap 'rm -f bin/bench/running.txt bin/bench/failed' EXIT
: >bin/bench/running.txt

# The figures go to the terminal and to running.txt. The exit status of go test
# passes the pipe as a file, because sh has no pipefail.
rm -f bin/bench/failed
{
	# -p 1: two packages at once would measure each other.
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
