package filewatch

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A directory changes with its YAML files: with their content, their names and their number.
func TestADirectoryIsWatchedLikeAFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("edge.yaml", "a")
	write(".hidden.yaml", "a")
	write("other.txt", "a")
	require.NoError(t, os.Mkdir(filepath.Join(dir, "nested.yaml"), 0o700))
	files, err := Files(dir)
	require.NoError(t, err)
	require.Equal(t, []string{filepath.Join(dir, "edge.yaml")}, files)

	f, err := New(dir, Options{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	changed, ended := make(chan bool, 1), make(chan bool)
	go func() {
		defer close(ended)
		f.Run(ctx, func() { changed <- true })
	}()
	for _, change := range []func(){
		func() { write("edge.yaml", "b") },
		func() { write("mail.yml", "a") },
		func() { require.NoError(t, os.Remove(filepath.Join(dir, "mail.yml"))) },
	} {
		change()
		select {
		case <-changed:
		case <-time.After(20 * time.Second):
			require.Fail(t, "the change is not reported")
		}
	}
	before, err := Sum(dir)
	require.NoError(t, err)
	write("other.txt", "b")
	after, err := Sum(dir)
	require.NoError(t, err)
	require.Equal(t, before, after, "other files don't change the sum")
	cancel()
	<-ended
}
