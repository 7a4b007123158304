package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

const templated = `# limits of the shop
version: 7 # raise it
redis: {url: "URL"}
buckets:
  - {key: a, capacity: 100, rate: 50/s}
templates:
  - {prefix: "user:", capacity: 60, rate: 1/s}
`

func TestBumpRaisesTheVersionOfAFile(t *testing.T) {
	path := writeConfig(t, templated)
	link := filepath.Join(t.TempDir(), "link.yaml")
	require.NoError(t, os.Symlink(path, link))
	code, stdout, stderr := runWith(t, nil, "bump", link)
	require.Zero(t, code, stderr)
	require.Equal(t, link+": version 7 → 8\n", stdout)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, strings.Replace(templated, "version: 7", "version: 8", 1), string(text))
	info, err := os.Lstat(link)
	require.NoError(t, err)
	require.NotZero(t, info.Mode()&os.ModeSymlink, "the link is still a symbolic link")
	require.Len(t, filesIn(t, filepath.Dir(path)), 1, "no other file is left")

	code, _, stderr = runWith(t, nil, "bump", path, "--pools")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "the file has no pools_version")
	code, _, _ = runWith(t, nil, "bump", filepath.Join(t.TempDir(), "none.yaml"))
	require.Equal(t, 1, code)
}

func filesIn(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	return entries
}

// If only the file is rolled back, the policies in force don't change. The check reports this. With a higher version,
// the file is accepted.
func TestARollBackIsRefusedUntilTheVersionIsRaised(t *testing.T) {
	server := testenv.Redis(t)
	rdb := server.Client()
	first := strings.Replace(templated, "URL", server.URL(), 1)
	path := writeConfig(t, first)
	check := func(text string) (code int, stdout, stderr string) {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return runWith(t, nil, "check", "--against-redis", path)
	}
	code, stdout, stderr := check(first)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, ": ok: ")

	putInForce(t, first, rdb, "a")
	lower := strings.NewReplacer("version: 7", "version: 8", "rate: 50/s", "rate: 5/s", "capacity: 60", "capacity: 6").
		Replace(first)
	code, _, stderr = check(lower)
	require.Zero(t, code, stderr)
	putInForce(t, lower, rdb, "a")

	code, stdout, stderr = check(first) // as after git revert
	require.Equal(t, 3, code, stdout)
	require.Empty(t, stdout)
	require.Equal(t, path+`: replicas would refuse this configuration:
! version 8 → 7: replicas would ignore it, because version 8 is in force: raise the version
! bucket "a" conflict: replicas would ignore it, because version 8 is in force: raise the version
    rate: 5/s → 50/s
! template "user:" conflict: replicas would ignore it, because version 8 is in force: raise the version
    capacity: 6 → 60
To raise the version, run: refiller bump --above-redis FILE
`, stderr)
	code, stdout, _ = runWith(t, nil, "check", "--against-redis", path, "-o", "json")
	require.Equal(t, 3, code)
	require.Contains(t, stdout, `"ok": false`)
	require.Contains(t, stdout, `"change": "conflict"`)

	code, stdout, stderr = runWith(t, nil, "bump", "--above-redis", path)
	require.Zero(t, code, stderr)
	require.Equal(t, path+": version 7 → 9\n", stdout)
	code, _, stderr = runWith(t, nil, "check", "--against-redis", path)
	require.Zero(t, code, stderr)
}

func TestACheckThatCanNotAskRedisFails(t *testing.T) {
	path := writeConfig(t, strings.Replace(templated, "URL", "redis://127.0.0.1:1", 1))
	code, _, stderr := runWith(t, nil, "check", "--against-redis", path)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "127.0.0.1:1")
}
