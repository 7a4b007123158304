#!/bin/sh
# A consumer that imports fetch pays for go-redis and little else. The linter
# sees direct imports only; this script checks all that fetch depends on.
set -eu

deps=$(go list -deps ./fetch)
bad=$(printf '%s\n' "$deps" |
	grep -E '^(go\.etcd\.io|google\.golang\.org/grpc|github\.com/prometheus|github\.com/alicebob/miniredis|go\.opentelemetry\.io|(.*/)?yaml)(/|\.|$)' || true)
if [ -n "$bad" ]; then
	echo "check-fetch-deps: package fetch must not depend on:" >&2
	printf '%s\n' "$bad" >&2
	exit 1
fi
