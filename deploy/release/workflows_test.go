package release

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/rhysd/actionlint"
	"github.com/stretchr/testify/require"
)

const root = "../.."

func TestTheWorkflowsHaveNoFindings(t *testing.T) {
	files, err := filepath.Glob(root + "/.github/workflows/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 2)
	lint := func(path string, text []byte) (string, error) {
		var out bytes.Buffer
		linter, err := actionlint.NewLinter(&out, &actionlint.LinterOptions{})
		require.NoError(t, err)
		_, err = linter.Lint(path, text, nil)
		return out.String(), err
	}
	for _, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		found, err := lint(path, text)
		require.NoError(t, err)
		require.Empty(t, found)

		wrong := bytes.Replace(text, []byte("runs-on:"), []byte("run-on:"), 1)
		found, err = lint(path, wrong)
		require.NoError(t, err)
		require.Contains(t, found, "runs-on")
	}
}

// The tag of an action can be moved, but a commit can't. A comment names the release of the commit.
func TestActionsArePinnedByDigest(t *testing.T) {
	files, err := filepath.Glob(root + "/.github/workflows/*.yaml")
	require.NoError(t, err)
	used := 0
	for _, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, line := range regexp.MustCompile(`(?m)^.*uses: .*$`).FindAllString(string(text), -1) {
			require.Regexp(t, `uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`, line, path)
			used++
		}
	}
	require.NotZero(t, used)
}

// The first job of a release makes these checks for its tag. The test makes them for the next version.
func TestChartManifestsAndChangelogNameOneVersion(t *testing.T) {
	chart := find(t, "deploy/helm/refiller/Chart.yaml", `(?m)^appVersion: v(\S+)$`)
	require.Equal(t, chart, find(t, "deploy/helm/refiller/Chart.yaml", `(?m)^version: (\S+)$`))
	require.Equal(t, chart, find(t, "deploy/k8s/base/kustomization.yaml", `newTag: v(\S+)`))
	require.Equal(t, chart, find(t, "deploy/k8s/components/consumer-sidecar/kustomization.yaml", `newTag: v(\S+)`))
	require.Equal(t, chart, find(t, "CHANGELOG.md", `(?m)^## \[(\d\S*)\]`))
}

func find(t *testing.T, path, pattern string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)
	found := regexp.MustCompile(pattern).FindSubmatch(text)
	require.NotNil(t, found, "%s has no %s", path, pattern)
	return string(found[1])
}
