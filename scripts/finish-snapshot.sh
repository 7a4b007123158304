#!/bin/sh
# Adds the image and the chart to the files that GoReleaser has written to dist/, and then checks everything: the
# checksums, the bills of materials, the two platforms of the image, and the programs for this machine. "make
# release-snapshot" runs it.
set -eu
cd "$(dirname "$0")/../dist"

version=$(sed -n 's/.*"version":"\([^"]*\)".*/\1/p' metadata.json)
os=$(go env GOOS) arch=$(go env GOARCH)

go -C ../deploy run ./cmd/image -version "v$version" -o ../dist/image
go -C ../deploy run ./cmd/chart -version "$version" -o ../dist

if command -v sha256sum >/dev/null; then
	sha256sum --check --quiet checksums.txt
else
	shasum -a 256 --check --quiet checksums.txt
fi
for platform in linux_amd64 linux_arm64 darwin_amd64 darwin_arm64; do
	grep -q "refiller_${version}_$platform.tar.gz\$" checksums.txt
	for program in refiller consumer; do
		for module in "tokenrefill/refiller@v$version\"" redis/go-redis/v9@; do
			grep -qF "\"purl\": \"pkg:golang/github.com/$module" "${program}_${version}_$platform.cdx.json"
		done
	done
done
[ "$(grep -o '"architecture": *"[a-z0-9]*"' image/index.json | sort -u | wc -l)" -eq 2 ]

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
tar -xzf "refiller_${version}_${os}_$arch.tar.gz" -C "$unpacked"
for program in refiller consumer; do
	[ "$("$unpacked/$program" version)" = "$program version v$version" ]
done
"$unpacked/refiller" check ../deploy/k8s/base/config.yaml
echo "dist/ has version v$version"
