package k8s

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

const tutorial = "../../docs/tutorials/kubernetes.md"

// The tutorial's files render, its commands name the rendered objects, and the programs accept them. `make
// test-apiserver` runs the commands with the API server of a cluster.
func TestTheTutorialOnKubernetesNamesWhatItInstalls(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(tutorial)
	require.NoError(t, err)
	files := map[string]string{}
	for _, m := range regexp.MustCompile("(?s)\n```yaml file=(\\S+)\n(.*?)\n```").FindAllStringSubmatch(string(text), -1) {
		files[m[1]] = m[2]
	}
	require.Len(t, files, 2)
	for doc := range strings.SplitSeq(files["redis.yaml"], "\n---\n") {
		_, _, err := decoder.Decode([]byte(doc), nil, nil)
		require.NoError(t, err)
	}
	values, err := loader.LoadValues(strings.NewReader(files["limits.yaml"]))
	require.NoError(t, err)
	rendered, err := renderRelease("limits", values)
	require.NoError(t, err)
	objects, err := objectsOf(rendered)
	require.NoError(t, err)

	deployments, services := []string{"redis"}, []string{"redis"}
	for _, d := range only[*appsv1.Deployment](objects) {
		deployments = append(deployments, d.Name)
	}
	for _, s := range only[*corev1.Service](objects) {
		services = append(services, s.Name)
	}
	commands := 0
	for _, m := range regexp.MustCompile(`(?m)^(kubectl|helm|curl) .*`).FindAllString(string(text), -1) {
		commands++
		if _, name, found := strings.Cut(m, "deployment/"); found {
			name, _, _ = strings.Cut(name, " ")
			require.True(t, slices.Contains(deployments, name), m)
		}
		if _, name, found := strings.Cut(m, "http://"); found {
			name, _, _ = strings.Cut(name, ":")
			require.True(t, slices.Contains(services, name), m)
		}
		if _, program, found := strings.Cut(m, " -- /"); found {
			args := append(strings.Fields(program), "--help")
			out, err := exec.CommandContext(t.Context(), imagetest.Program(t, args[0]), args[1:]...).CombinedOutput()
			require.NoError(t, err, "%s: %s", m, out)
		}
	}
	require.Equal(t, 10, commands)

	check := exec.CommandContext(t.Context(), imagetest.Program(t, "refiller"), "check", "-")
	check.Stdin = bytes.NewBufferString(only[*corev1.ConfigMap](objects)[0].Data["config.yaml"])
	out, err := check.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
