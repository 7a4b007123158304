#!/bin/sh
# Makes sure that the programs that a target needs are installed. It prints the
# ones that it finds, installs the missing ones, and fails with a line for each
# one that can't be installed.
#   require.sh NAME...
# Packages come from apt-get, apk or brew, with sudo if it is needed.
set -eu

# The list of all programs that the project needs. The columns are the name, the
# packages of Debian and Ubuntu, of Alpine, and of Homebrew (- for none), and a
# description. If the program has another name, or needs a version, have() has
# its check. The list doesn't have etcd: the tests build it from go.mod.
list='
go         | -                 | go           | go         | Go of the version in go.mod: https://go.dev/dl
make       | make              | make         | make       | make
redis      | redis-server      | redis        | redis      | Redis 7.0, Valkey 7.2 or newer: redis-server in the PATH, or $REDIS_SERVER
cc         | gcc libc6-dev     | gcc musl-dev | gcc        | a C compiler and headers of the C library, for the race detector
faketime   | libfaketime       | libfaketime  | -          | libfaketime for Linux, which steps the clock of Redis
curl       | curl              | curl         | curl       | curl 7.82 or newer
prometheus | prometheus        | prometheus   | prometheus | prometheus and promtool in the PATH
chromium   | chromium          | chromium     | chromium   | chromium, chromium-browser or google-chrome
python     | python3 python3-redis | python3 py3-redis | - | Python 3 with redis-py at /usr/bin/python3, or as $PYTHON
node       | nodejs npm        | nodejs npm   | node       | Node 18 or newer, and npm
nginx      | nginx-light       | nginx        | nginx      | nginx with auth_request
caddy      | caddy             | caddy        | caddy      | Caddy 2.5 or newer
protoc     | protobuf-compiler | protoc       | protobuf   | protoc, the compiler of protocol buffers
'

say() { echo "require: $*"; }

# field NAME N prints a column of the list.
field() {
	printf '%s\n' "$list" | awk -F '[ ]*[|][ ]*' -v name="$1" -v n="$2" '$1 == name { print $n }'
}

# have NAME prints the program or version that is installed, or fails.
have() {
	case $1 in
	go) go list -m >/dev/null && go version ;; # fails if Go is older than go.mod wants and can't download that version
	redis) redis_version ;;
	cc) compiler ;;
	faketime) ls /usr/lib*/faketime/libfaketime.so.1 /usr/lib/*/faketime/libfaketime.so.1 | grep . ;;
	curl) curl --json '' --version | sed -n 1p && curl --json '' --version >/dev/null ;;
	prometheus) command -v prometheus && promtool --version ;;
	python) "${PYTHON:-/usr/bin/python3}" -c 'import redis, sys; print("Python", sys.version.split()[0], "redis-py", redis.__version__)' ;;
	node) node -e 'process.exit(parseInt(process.versions.node) < 18 ? 1 : 0)' && node --version && npm --version >/dev/null ;;
	nginx) PATH="$PATH:/usr/sbin" nginx -V 2>&1 | grep -o 'nginx version.*' && PATH="$PATH:/usr/sbin" nginx -V 2>&1 | grep -q auth_request ;;
	chromium) command -v chromium || command -v chromium-browser || command -v google-chrome ;;
	*) command -v "$1" ;;
	esac 2>/dev/null
}

# redis_version prints a line like "Redis server v=7.0.15 …" or "Valkey server v=8.1.0 …".
redis_version() {
	line=$("${REDIS_SERVER:-redis-server}" --version) || return 1
	major=$(printf '%s\n' "$line" | sed -n 's/.*v=\([0-9]*\)\..*/\1/p')
	echo "$line"
	[ "${major:-0}" -ge 7 ]
}

# compiler compiles a program, because the headers of the C library may be missing
# although gcc is installed. On macOS the race detector needs no C compiler.
compiler() {
	[ "$(uname -s)" != Darwin ] || { echo "not needed on macOS"; return; }
	cc=$(go env CC) || cc=gcc
	# shellcheck disable=SC2086 # CC may have flags
	printf '#include <stdlib.h>\nint main(void) { return 0; }\n' | $cc -x c -o /dev/null - && command -v "${cc%% *}"
}

# The package manager: its column in the list, and the command that installs packages.
if command -v apt-get >/dev/null 2>&1; then
	column=2 manager='apt-get install'
elif command -v apk >/dev/null 2>&1; then
	column=3 manager='apk add'
elif command -v brew >/dev/null 2>&1; then
	column=4 manager='brew install'
else
	column=0 manager=
fi

# allowed reports whether packages can be installed. It asks for a password at most once, if there is a terminal.
allowed() {
	sudo=
	case $manager in
	'') why='none of apt-get, apk and brew is here' ;;
	brew*) return 0 ;;
	*)
		[ "$(id -u)" -ne 0 ] || return 0
		sudo=sudo why='that takes root, or a user who may use sudo'
		if [ -t 0 ]; then sudo -v; else sudo -n true; fi 2>/dev/null && return 0
		;;
	esac
	return 1
}

# install PACKAGE... installs packages. If apt-get fails, it updates the lists of packages and tries again: the lists
# are empty in fresh containers, and may be old elsewhere.
install() {
	case $manager in
	apt*) apt_install "$@" || { $sudo apt-get update && apt_install "$@"; } ;;
	apk*) $sudo apk add --no-cache "$@" ;;
	brew*) brew install "$@" ;;
	esac
}

apt_install() { $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; }

missing=
for name; do
	[ -n "$(field "$name" 1)" ] || { say "no row is named $name" >&2; exit 2; }
	if found=$(have "$name"); then
		say "$name: $(printf '%s\n' "$found" | sed -n 1p)"
	else
		missing="$missing $name"
	fi
done
[ -n "$missing" ] || exit 0

log=$(mktemp)
trap 'rm -f "$log"' EXIT
absent=
for name in $missing; do
	packages=-
	[ "$column" = 0 ] || packages=$(field "$name" "$column")
	[ "$name" != redis ] || [ -z "${REDIS_SERVER:-}" ] || packages=- # REDIS_SERVER must name a program that works
	advice=
	if [ "$packages" != - ]; then
		advice=" ($manager $packages)"
		if allowed; then
			say "$name is missing: $manager $packages"
			# shellcheck disable=SC2086 # a list of packages
			install $packages >"$log" 2>&1 </dev/null || { tail -n 5 "$log" >&2; why='see above'; }
		fi
	fi
	if found=$(have "$name"); then
		say "$name: installed"
	else
		absent="$absent$name: $(field "$name" 5)$advice${found:+; found $(printf '%s\n' "$found" | sed -n 1p)}
"
	fi
done
[ -n "$absent" ] || exit 0

{
	say "nothing was run, as this is missing and could not be installed${why:+: $why}"
	printf '%s' "$absent" | sed 's/^/  /'
} >&2
exit 1
