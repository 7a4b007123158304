#!/usr/bin/env bash
# Turn the pages over to the first release, once, in the commit that its tag names:
#   scripts/release-docs.sh [DIR]
# In every page of DIR (this repository) the lines from "<!-- unreleased -->" to "<!-- /unreleased -->" are deleted, and
# the lines from "<!-- released" to "released -->" are no longer a comment.
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
