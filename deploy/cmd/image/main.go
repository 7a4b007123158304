// Command image builds the image of the Dockerfile without Docker. It writes the image to a directory in the layout of
// OCI, with one image for each platform:
//
//	go -C deploy run ./cmd/image -version v0.1.0 -o ../dist/image
//
// skopeo, crane and docker buildx read such a directory. Releases are built with the Dockerfile itself. This command is
// for trying a release without Docker.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/tokenrefill/refiller/deploy/internal/image"
)

func main() {
	root := flag.String("root", "..", "the root of the repository")
	out := flag.String("o", "../dist/image", "the directory to write, anew")
	version := flag.String("version", "devel", "the version to stamp")
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "the platforms, with commas between")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := write(ctx, *root, *out, *version, strings.Split(*platforms, ",")); err != nil {
		stop()
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func write(ctx context.Context, root, out, version string, platforms []string) error {
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	index, err := layout.Write(out, empty.Index)
	if err != nil {
		return err
	}
	for _, name := range platforms {
		platform, err := v1.ParsePlatform(name)
		if err != nil {
			return err
		}
		built, err := image.Build(ctx, root, *platform, version)
		if err != nil {
			return err
		}
		if err := index.AppendImage(built, layout.WithPlatform(*platform)); err != nil {
			return err
		}
		digest, err := built.Digest()
		if err != nil {
			return err
		}
		fmt.Println(name, digest)
	}
	return nil
}
