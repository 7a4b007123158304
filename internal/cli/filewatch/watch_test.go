package filewatch

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// watched runs a File and returns the channel of its reports. It polls so slowly that only events can help, unless the
// test sets a shorter interval.
func watched(t *testing.T, path string, poll time.Duration) <-chan struct{} {
	t.Helper()
	f, err := New(path, Options{Poll: poll})
	require.NoError(t, err)
	changed := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx, func() { changed <- struct{}{} }) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return changed
}

func await(t *testing.T, changed <-chan struct{}, why string) {
	t.Helper()
	select {
	case <-changed:
	case <-time.After(20 * time.Second):
		require.Fail(t, "no report", why)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func TestChangesAreReportedHoweverTheyAreMade(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "config.yaml")
	write(t, path, "1")
	changed := watched(t, path, time.Hour)

	write(t, path, "2")
	await(t, changed, "the file was written in place")

	write(t, path+".new", "3")
	require.NoError(t, os.Rename(path+".new", path))
	await(t, changed, "the file was replaced by a rename")

	require.NoError(t, os.Remove(path))
	write(t, path, "4")
	await(t, changed, "the file was removed and written again")

	require.NoError(t, os.Remove(path))
	write(t, path, "4")
	await(t, changed, "the file was missing for a moment")
}

// swap changes a mounted ConfigMap as the kubelet does.
func swap(t *testing.T, mount, name, text string) {
	t.Helper()
	write(t, filepath.Join(mount, name, "config.yaml"), text)
	old, err := os.Readlink(filepath.Join(mount, "..data"))
	require.NoError(t, os.Symlink(name, filepath.Join(mount, "..data_tmp")))
	require.NoError(t, os.Rename(filepath.Join(mount, "..data_tmp"), filepath.Join(mount, "..data")))
	if err == nil {
		require.NoError(t, os.RemoveAll(filepath.Join(mount, old)))
	}
}

func TestSwapsOfAConfigMapAreReportedAgainAndAgain(t *testing.T) {
	t.Parallel()
	mount := t.TempDir()
	swap(t, mount, "..2026_1", "1")
	path := filepath.Join(mount, "config.yaml")
	require.NoError(t, os.Symlink(filepath.Join("..data", "config.yaml"), path))
	changed := watched(t, path, time.Hour)
	for i, name := range []string{"..2026_2", "..2026_3", "..2026_4"} {
		swap(t, mount, name, name)
		await(t, changed, name)
		require.Empty(t, changed, "swap %d is one change", i)
	}
}

func TestAFileBehindALinkElsewhereIsWatched(t *testing.T) {
	t.Parallel()
	real, path := filepath.Join(t.TempDir(), "real"), filepath.Join(t.TempDir(), "config.yaml")
	write(t, real, "1")
	require.NoError(t, os.Symlink(real, path))
	changed := watched(t, path, time.Hour)
	write(t, real, "2")
	await(t, changed, "the target of the link was written")
}

func TestSameContentIsNoChange(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "1")
	changed := watched(t, path, 20*time.Millisecond)
	write(t, path+".new", "1")
	require.NoError(t, os.Rename(path+".new", path))
	write(t, path, "1")
	write(t, path, "2")
	await(t, changed, "the content is new")
	require.Empty(t, changed)
}

func TestPollingFindsChangesWithoutEvents(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "1")
	f, err := New(path, Options{Poll: time.Hour})
	require.NoError(t, err)
	f.blind(os.ErrInvalid)
	require.LessOrEqual(t, f.poll, blindPoll, "polling is quick without events")
	f.poll = 10 * time.Millisecond
	changed := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.Run(ctx, func() { changed <- struct{}{} }) })
	defer func() {
		cancel()
		wg.Wait()
	}()
	write(t, path, "2")
	await(t, changed, "polling finds the change")
}

func TestADirectoryThatIsReplacedIsWatchedAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "dir")
	path := filepath.Join(dir, "config.yaml")
	write(t, path, "1")
	changed := watched(t, path, 20*time.Millisecond)
	require.NoError(t, os.RemoveAll(dir))
	write(t, path, "2")
	await(t, changed, "the file exists again with another content")
	write(t, path, "3")
	await(t, changed, "the file changes again")
}

func TestNewNeedsAReadableFile(t *testing.T) {
	t.Parallel()
	_, err := New(filepath.Join(t.TempDir(), "none"), Options{})
	require.ErrorIs(t, err, os.ErrNotExist)
}
