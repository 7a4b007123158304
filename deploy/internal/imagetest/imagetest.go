// Package imagetest provides the programs of the image to tests. It builds them once for each test binary. Package
// image builds the image.
package imagetest

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/deploy/internal/image"
)

var dir string

// Main is the TestMain of a package whose tests use Program. The package must be in a directory two levels below the
// root of the repository.
func Main(m *testing.M) {
	var err error
	dir, err = os.MkdirTemp("", "refiller-programs-")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	m.Run() // TestMain exits with the result of m.Run when it returns
}

var build = sync.OnceValue(func() error {
	platform := v1.Platform{OS: runtime.GOOS, Architecture: runtime.GOARCH}
	return image.Programs(context.Background(), "../..", dir, platform, "v0.0.0-test")
})

// Program returns the path of the program refiller or consumer.
func Program(t *testing.T, name string) string {
	t.Helper()
	require.NoError(t, build())
	return filepath.Join(dir, name)
}
