#!/usr/bin/env bash
# Changes the pages of the documentation for the first release. Run it once, in the commit of the release:
#   scripts/release-docs.sh [DIR]
# DIR is a directory with pages; the default is this repository. In every page the script deletes the lines from
# "<!-- unreleased -->" to "<!-- /unreleased -->". It also removes the comment marks around the lines from
# "<!-- released" to "released -->".
set -euo pipefail
cd "${1:-$(dirname "${BASH_SOURCE[0]}")/..}"

find . -name '*.md' -not -path './.git/*' -not -path './bin/*' | while read -r page; do
	awk '
		$0 == "<!-- unreleased -->" { skipped = 1; next }
		$0 == "<!-- /unreleased -->" { skipped = 0; next }
		$0 == "<!-- released" || $0 == "released -->" { next }
		!skipped
	' "$page" >"$page.new"
	if cmp -s "$page" "$page.new"; then
		rm "$page.new"
	else
		mv "$page.new" "$page"
		echo "${page#./}"
	fi
done
