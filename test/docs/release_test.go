package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Before the first release, some pages say how to work without a release. A script changes them to say how to work with
// one. The script changes nothing else.
func TestOneSwitchTurnsThePagesOverToARelease(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	before := map[string]string{}
	documents(t, func(path, text string) {
		before[path] = text
		file := filepath.Join(dir, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o700))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	})
	out, err := exec.CommandContext(t.Context(), "../../scripts/release-docs.sh", dir).CombinedOutput()
	require.NoError(t, err, "%s", out)
	changed := strings.Fields(string(out))
	require.Subset(t, changed, []string{"README.md", "docs/tutorials/kubernetes.md", "docs/tutorials/sdk.md"})
	for path, text := range before {
		after, err := os.ReadFile(filepath.Join(dir, path))
		require.NoError(t, err)
		_, err = parseBlocks(string(after))
		require.NoError(t, err, path)
		for _, left := range []string{"unreleased -->", "released -->", "first release", "Nothing is released"} {
			if path != "CONTRIBUTING.md" {
				require.NotContains(t, string(after), left, path)
			}
		}
		if text == string(after) {
			require.NotContains(t, changed, path)
		}
	}
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	require.NoError(t, err)
	require.Contains(t, string(readme), "@latest` installs both programs")
	require.NotContains(t, string(readme), "clone is needed")
}
