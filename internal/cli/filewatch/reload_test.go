package filewatch_test

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli/filewatch"
)

// TestReloadReportsEachCause shows that a changed file, another source and SIGHUP each have the files read again.
func TestReloadReportsEachCause(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	require.NoError(t, os.WriteFile(path, []byte("a"), 0o600))
	r := filewatch.NewReload()
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	require.NoError(t, r.Watch(path, filewatch.Options{}))
	require.Error(t, r.Watch(path+"-missing", filewatch.Options{}))
	require.Equal(t, 1, r.Files())
	news := make(chan struct{})
	r.Follow("news", func(ctx context.Context, changed func()) {
		for {
			select {
			case <-ctx.Done():
				return
			case <-news:
				changed()
			}
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	causes := make(chan string)
	running.Go(func() {
		r.Run(ctx, func(cause string) {
			select {
			case <-ctx.Done():
			case causes <- cause:
			}
		})
	})

	news <- struct{}{}
	require.Equal(t, "news", <-causes)
	require.NoError(t, os.WriteFile(path, []byte("b"), 0o600))
	require.Equal(t, "file changed", <-causes)
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	require.Equal(t, "SIGHUP", <-causes)

	for range 3 { // while read handles the first, the others are combined
		news <- struct{}{}
	}
	require.Equal(t, "news", <-causes)
}
