#!/bin/sh
# Makes sure that the tests have a Redis-compatible server, 7.0 or newer.
#   REDIS_SERVER=/path   use this binary; nothing is installed
#   otherwise            use redis-server of the PATH, installing it if missing
set -eu

here=$(dirname "$0")

fail() {
	echo "ensure-redis: $*" >&2
	exit 1
}

if [ -n "${REDIS_SERVER:-}" ]; then
	server=$REDIS_SERVER
	command -v "$server" >/dev/null 2>&1 || fail "REDIS_SERVER=$server is not an executable file"
else
	server=redis-server
	if ! command -v "$server" >/dev/null 2>&1; then
		echo "ensure-redis: redis-server is missing, installing it"
		"$here/install-package.sh" redis-server redis redis ||
			fail "could not install redis-server: install Redis 7.0 or newer (or Valkey 7.2 or newer), or set REDIS_SERVER=/path/to/redis-server"
		command -v "$server" >/dev/null 2>&1 ||
			fail "redis-server was installed but is not in the PATH: set REDIS_SERVER=/path/to/redis-server"
	fi
fi

# "Redis server v=7.0.15 sha=..." or "Valkey server v=8.1.0 sha=..."
line=$("$server" --version) || fail "$server --version failed"
version=$(printf '%s\n' "$line" | sed -n 's/.*v=\([0-9][0-9]*\.[0-9][0-9.]*\).*/\1/p')
[ -n "$version" ] || fail "cannot read a version from '$line' ($server --version)"
[ "${version%%.*}" -ge 7 ] ||
	fail "$server is version $version, 7.0 or newer is needed: install a newer one or set REDIS_SERVER=/path/to/redis-server"

echo "ensure-redis: $(command -v "$server") $version"
