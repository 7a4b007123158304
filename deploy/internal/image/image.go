package image

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/moby/buildkit/frontend/dockerfile/instructions"
)

// Build builds the image for a platform from a repository. version is stamped into the programs.
func Build(ctx context.Context, root string, platform v1.Platform, version string) (v1.Image, error) {
	file, err := parse(filepath.Join(root, "Dockerfile"))
	if err != nil {
		return nil, err
	}
	out, err := os.MkdirTemp("", "refiller-programs-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(out) }()
	if err := Programs(ctx, root, out, platform, version); err != nil {
		return nil, err
	}
	b := builder{out: out, version: version, config: &v1.ConfigFile{
		OS: platform.OS, Architecture: platform.Architecture, Created: v1.Time{Time: time.Unix(0, 0)},
		RootFS: v1.RootFS{Type: "layers"},
	}}
	for _, c := range file.last {
		if err := b.add(c); err != nil {
			return nil, err
		}
	}
	return b.image()
}

// Programs builds only the image's programs, into a directory.
func Programs(ctx context.Context, root, out string, platform v1.Platform, version string) error {
	file, err := parse(filepath.Join(root, "Dockerfile"))
	if err != nil {
		return err
	}
	source, err := os.MkdirTemp("", "refiller-context-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(source) }()
	if err := Context(root, source); err != nil {
		return err
	}
	build := exec.CommandContext(ctx, "sh", "-ec", strings.ReplaceAll(file.compile, "/out/", `"$OUT/"`))
	build.Dir = source
	build.Env = append(os.Environ(), "OUT="+out, "TARGETOS="+platform.OS, "TARGETARCH="+platform.Architecture,
		"VERSION="+version, "GOWORK=off")
	if text, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", file.compile, err, text)
	}
	return nil
}

// builder follows the instructions of the last stage.
type builder struct {
	out     string // directory of the programs
	version string
	config  *v1.ConfigFile
	layers  []v1.Layer
}

func (b *builder) add(command instructions.Command) error {
	expand := strings.NewReplacer("${VERSION}", b.version, "$VERSION", b.version).Replace
	switch c := command.(type) {
	case *instructions.ArgCommand: // the only argument is the version, which is given
	case *instructions.LabelCommand:
		b.config.Config.Labels = map[string]string{}
		for _, l := range c.Labels {
			b.config.Config.Labels[l.Key] = expand(l.Value)
		}
	case *instructions.CopyCommand:
		return b.copy(c)
	case *instructions.UserCommand:
		b.config.Config.User = c.User
	case *instructions.ExposeCommand:
		b.config.Config.ExposedPorts = map[string]struct{}{}
		for _, p := range c.Ports {
			b.config.Config.ExposedPorts[p+"/tcp"] = struct{}{}
		}
	case *instructions.EntrypointCommand:
		b.config.Config.Entrypoint = c.CmdLine
	default:
		return fmt.Errorf("an instruction that isn't understood here: %s", command)
	}
	return nil
}

// copy makes a layer of files of the first stage.
func (b *builder) copy(c *instructions.CopyCommand) error {
	if c.From != "build" {
		return fmt.Errorf("%s: only what the stage build has is copied here", c)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, from := range c.SourcePaths {
		here := from // the only other files are the certificates of this machine
		if program, ok := strings.CutPrefix(from, "/out/"); ok {
			here = filepath.Join(b.out, program)
		}
		text, err := os.ReadFile(here)
		if err != nil {
			return fmt.Errorf("%s: %w", c, err)
		}
		to := strings.TrimPrefix(path.Join(c.DestPath, path.Base(from)), "/")
		mode := int64(0o644)
		if here != from {
			mode = 0o755
		}
		header := &tar.Header{Name: to, Mode: mode, Size: int64(len(text)), Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		if _, err := w.Write(text); err != nil {
			return err
		}
	}
	if err := w.Close(); err != nil {
		return err
	}
	text := layer.Bytes()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(text)), nil })
	b.layers = append(b.layers, l)
	return err
}

func (b *builder) image() (v1.Image, error) {
	image, err := mutate.ConfigFile(mutate.MediaType(empty.Image, types.OCIManifestSchema1), b.config)
	if err != nil {
		return nil, err
	}
	return mutate.AppendLayers(mutate.ConfigMediaType(image, types.OCIConfigJSON), b.layers...)
}
