package release

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

const path = "github.com/tokenrefill/refiller"

// publish makes a proxy from files. It serves one version of the module, in the form in which the real proxy would
// serve a tag.
func publish(t *testing.T, version string) (proxy string) {
	t.Helper()
	proxy = t.TempDir()
	dir := filepath.Join(proxy, path, "@v")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	file, err := os.Create(filepath.Join(dir, version+".zip"))
	require.NoError(t, err)
	m := module.Version{Path: path, Version: version}
	require.NoError(t, zip.CreateFromDir(file, m, committed(t)))
	require.NoError(t, file.Close())
	text, err := os.ReadFile(root + "/go.mod")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, version+".mod"), text, 0o600))
	info, err := json.Marshal(map[string]any{"Version": version, "Time": time.Now().UTC()})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, version+".info"), info, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "list"), []byte(version+"\n"), 0o600))
	return proxy
}

// committed returns a directory that has only committed files, without others that exist or are generated. If root is
// not a clone, all of its files count as committed.
func committed(t *testing.T) string {
	t.Helper()
	if exec.CommandContext(t.Context(), "git", "-C", root, "rev-parse", "HEAD").Run() != nil {
		return root
	}
	dir := t.TempDir()
	archive := filepath.Join(dir, "archive.tar")
	out, err := exec.CommandContext(t.Context(), "git", "-C", root, "archive", "-o", archive, "HEAD").CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.CommandContext(t.Context(), "tar", "-xf", archive, "-C", dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Remove(archive))
	return dir
}

// goEnv returns a setting of the go command.
func goEnv(t *testing.T, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "env", name).Output()
	require.NoError(t, err)
	return strings.TrimSpace(string(out))
}

func TestGoInstallBuildsThePrograms(t *testing.T) {
	version := fmt.Sprintf("v0.0.0-test.%d", time.Now().UnixNano()) // the module cache keeps versions forever
	proxy, bin := publish(t, version), t.TempDir()
	cache := goEnv(t, "GOMODCACHE")
	t.Cleanup(func() { forget(t, cache, version) })
	install := exec.CommandContext(t.Context(), "go", "install", path+"/cmd/refiller@latest", path+"/cmd/consumer@latest")
	install.Dir = bin // outside of any module
	// The flags are the same as in other tests, so the dependencies are compiled already.
	install.Env = append(os.Environ(), "GOBIN="+bin, "GOWORK=off",
		"GOPROXY=file://"+filepath.ToSlash(proxy)+","+goEnv(t, "GOPROXY"), "GONOSUMDB="+path)
	out, err := install.CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, name := range []string{"refiller", "consumer"} {
		out, err = exec.CommandContext(t.Context(), filepath.Join(bin, name), "version").CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, name+" version "+version+"\n", string(out))
	}
}

// forget removes a version of the module from the cache, which is read-only.
func forget(t *testing.T, cache, version string) {
	t.Helper()
	dir := filepath.Join(cache, path+"@"+version)
	require.NoError(t, filepath.WalkDir(dir, func(name string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			return os.Chmod(name, 0o755)
		}
		return err
	}))
	require.NoError(t, os.RemoveAll(dir))
	files, err := filepath.Glob(filepath.Join(cache, "cache/download", path, "@v", version+".*"))
	require.NoError(t, err)
	for _, name := range files {
		require.NoError(t, os.Remove(name))
	}
}
