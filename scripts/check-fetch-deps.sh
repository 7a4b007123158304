#!/bin/sh
# Fails if package fetch depends on large modules other than go-redis, since every
# consumer gets them too. The linter checks only direct imports. This script
# checks all dependencies of fetch.
set -eu

deps=$(go list -deps ./fetch)
bad=$(printf '%s\n' "$deps" |
	grep -E '^(go\.etcd\.io|google\.golang\.org/grpc|github\.com/prometheus|github\.com/alicebob/miniredis|go\.opentelemetry\.io|(.*/)?yaml)(/|\.|$)' || true)
if [ -n "$bad" ]; then
	echo "check-fetch-deps: package fetch must not depend on:" >&2
	printf '%s\n' "$bad" >&2
	exit 1
fi
