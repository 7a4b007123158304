#!/bin/sh
# Installs a system package with the package manager that is there.
#   install-package.sh APT_NAMES APK_NAMES BREW_NAMES
# Exits 1 where no known package manager is found. Uses sudo only when not root.
set -eu

apt=$1 apk=$2 brew=$3

as_root() {
	if [ "$(id -u)" -eq 0 ]; then
		"$@"
	elif command -v sudo >/dev/null 2>&1; then
		# Without a terminal nobody can type a password: fail instead of waiting.
		if [ -t 0 ]; then sudo "$@"; else sudo -n "$@"; fi
	else
		echo "install-package: need root or sudo to run: $*" >&2
		return 1
	fi
}

apt_install() {
	# shellcheck disable=SC2086 # a list of package names
	as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $apt
}

if command -v apt-get >/dev/null 2>&1; then
	# Package lists are empty in fresh containers and may be stale elsewhere.
	# shellcheck disable=SC2086
	if ! apt-cache show $apt >/dev/null 2>&1 || ! apt_install; then
		as_root apt-get update
		apt_install
	fi
elif command -v apk >/dev/null 2>&1; then
	# shellcheck disable=SC2086
	as_root apk add --no-cache $apk
elif command -v brew >/dev/null 2>&1; then
	# shellcheck disable=SC2086
	brew install $brew
else
	echo "install-package: none of apt-get, apk, brew is here" >&2
	exit 1
fi
