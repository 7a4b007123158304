package k8s

import (
	"crypto/x509"
	"encoding/pem"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

// mounted writes the files of a sidecar's volumes below a directory, as the kubelet would. It returns the container's
// arguments with that directory before each path.
func mounted(t *testing.T, pod corev1.PodSpec, maps map[string]*corev1.ConfigMap) (args, files []string) {
	t.Helper()
	root := t.TempDir()
	sources := map[string]map[string]string{}
	for _, v := range pod.Volumes {
		if v.ConfigMap != nil {
			require.Contains(t, maps, v.ConfigMap.Name)
			sources[v.Name] = maps[v.ConfigMap.Name].Data
		} else {
			sources[v.Name] = certificate(t)
		}
	}
	args = append(args, pod.Containers[0].Args...)
	for _, m := range pod.Containers[0].VolumeMounts {
		require.NoError(t, os.MkdirAll(filepath.Join(root, m.MountPath), 0o755))
		for name, text := range sources[m.Name] {
			path := filepath.Join(root, m.MountPath, name)
			require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
			if strings.HasSuffix(name, ".yaml") {
				files = append(files, path)
			}
		}
	}
	for i, arg := range args {
		args[i] = strings.Replace(arg, "=/", "="+root+"/", 1)
	}
	return args, files
}

// certificate returns the content that cert-manager writes into a Secret.
func certificate(t *testing.T) map[string]string {
	t.Helper()
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	key, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	require.NoError(t, err)
	block := func(kind string, data []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}))
	}
	cert := block("CERTIFICATE", server.Certificate().Raw)
	return map[string]string{"tls.crt": cert, "tls.key": block("PRIVATE KEY", key), "ca.crt": cert}
}

// The program accepts the files of limits and the certificate where the chart mounts them.
func TestTheChartsSidecarHasLimitsAndACertificate(t *testing.T) {
	t.Parallel()
	chart, err := loadChart(charts[1])
	require.NoError(t, err)
	maps := map[string]*corev1.ConfigMap{}
	for _, m := range only[*corev1.ConfigMap](chart) {
		maps[m.Name] = m
	}
	pod := podsOf(t, chart, "sidecar").Spec
	args, files := mounted(t, pod, maps)
	require.Len(t, files, 3, "the limits, and a file for each domain")
	out, err := exec.CommandContext(t.Context(), imagetest.Program(t, "consumer"),
		append([]string{"check"}, files...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, flag := range []string{"limits", "envoy", "tls-cert", "tls-key", "tls-client-ca", "max-connection-age"} {
		require.Contains(t, strings.Join(args, " "), " --"+flag+"=")
	}
	understands(t, corev1.Container{Args: args})

	for _, s := range only[*corev1.Service](chart) {
		if s.Name == "refiller-sidecar" {
			for _, p := range s.Spec.Ports {
				require.Equal(t, "https", *p.AppProtocol)
			}
		}
	}
}

// A client's certificate can't be asked for over connections without TLS.
func TestClientCertificatesNeedTLS(t *testing.T) {
	t.Parallel()
	_, err := withValues(t, "sidecar: {enabled: true, tls: {clientCertificates: true}}")
	require.ErrorContains(t, err, "sidecar.tls.secret")
}

// Without limits and TLS nothing is mounted.
func TestTheChartsSidecarNeedsNoVolumes(t *testing.T) {
	t.Parallel()
	objects, err := withValues(t, "sidecar: {enabled: true, maxConnectionAge: 90s}")
	require.NoError(t, err)
	pod := podsOf(t, objects, "sidecar").Spec
	require.Empty(t, pod.Volumes)
	require.Empty(t, pod.Containers[0].VolumeMounts)
	require.Contains(t, pod.Containers[0].Args, "--max-connection-age=90s")
	understands(t, pod.Containers[0])
}
