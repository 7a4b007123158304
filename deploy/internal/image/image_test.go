package image

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"github.com/stretchr/testify/require"
)

const root = "../../.."

// maxSize is the largest allowed size of the image's files in bytes. docs/operations.md has their present size.
const maxSize = 65e6

func TestTheImageIsBuiltFromItsContextAndItsProgramsRun(t *testing.T) {
	image, err := Build(t.Context(), root, v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, "v0.0.0-test")
	require.NoError(t, err)

	// Write the image and read it again, as a push and a pull do.
	path, err := layout.Write(t.TempDir(), empty.Index)
	require.NoError(t, err)
	require.NoError(t, path.AppendImage(image))
	digest, err := image.Digest()
	require.NoError(t, err)
	image, err = path.Image(digest)
	require.NoError(t, err)
	require.NoError(t, validate.Image(image))

	dir := t.TempDir()
	size, err := Unpack(image, dir)
	require.NoError(t, err)
	manifest, err := image.Manifest()
	require.NoError(t, err)
	var compressed int64
	for _, l := range manifest.Layers {
		compressed += l.Size
	}
	t.Logf("%.1f MB, compressed %.1f MB", float64(size)/1e6, float64(compressed)/1e6)
	require.Less(t, size, int64(maxSize))
	want := []string{"consumer", "etc/ssl/certs/ca-certificates.crt", "refiller"} // only these files
	require.Equal(t, want, files(t, dir))

	for _, name := range []string{"refiller", "consumer"} {
		out, err := exec.CommandContext(t.Context(), filepath.Join(dir, name), "version").CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, name+" version v0.0.0-test\n", string(out))
	}
	config, err := image.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "65532:65532", config.Config.User)
	require.Equal(t, "v0.0.0-test", config.Config.Labels["org.opencontainers.image.version"])
	require.Contains(t, config.Config.ExposedPorts, "9090/tcp")
	require.Equal(t, []string{"/refiller"}, config.Config.Entrypoint)
	program := filepath.Join(dir, config.Config.Entrypoint[0])
	out, err := exec.CommandContext(t.Context(), program, "check", root+"/deploy/k8s/base/config.yaml").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "mode race")
}

// files returns the names of all files below a directory.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	require.NoError(t, fs.WalkDir(os.DirFS(dir), ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			names = append(names, path)
		}
		return err
	}))
	return names
}

func TestTheContextHoldsNothingButSources(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, Context(root, dir))
	for _, name := range files(t, dir) {
		require.NotContains(t, name, "_test.go")
		require.NotContains(t, name, "testdata")
		require.NotRegexp(t, `^(\.|bin/|deploy/|docs/|dist/)`, name, "a build context with such a file is never cached")
	}
}

// An instruction of the Dockerfile that the package doesn't know is an error.
func TestAnUnknownInstructionIsAnError(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "Dockerfile")
	text := "FROM x AS build\nRUN go build -o /out/ .\nFROM scratch\nVOLUME /data\n"
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	d, err := parse(file)
	require.NoError(t, err)
	require.Error(t, (&builder{config: &v1.ConfigFile{}}).add(d.last[0]))
}
