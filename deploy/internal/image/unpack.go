package image

import (
	"archive/tar"
	"errors"
	"io"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
)

// Unpack writes the files of an image to a directory, in the form in which a container would have them. It returns
// their total size in bytes.
func Unpack(image v1.Image, dir string) (size int64, err error) {
	files := mutate.Extract(image)
	defer func() { err = errors.Join(err, files.Close()) }()
	r := tar.NewReader(files)
	for {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return size, nil
		}
		if err != nil {
			return size, err
		}
		path := filepath.Join(dir, filepath.FromSlash(header.Name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return size, err
		}
		text, err := io.ReadAll(r)
		if err != nil {
			return size, err
		}
		size += header.Size
		if err := os.WriteFile(path, text, header.FileInfo().Mode().Perm()); err != nil {
			return size, err
		}
	}
}
