package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	root  = "../.."
	token = "secret" // of the only user
)

// server is an API server with its etcd.
type server struct {
	t   *testing.T
	dir string
	bin string // directory of the programs
	url string
}

// start runs etcd and the API server until the test ends, and waits until it is ready.
func start(t *testing.T) *server {
	t.Helper()
	bin, err := filepath.Abs(root + "/bin")
	require.NoError(t, err)
	s := &server{t: t, dir: t.TempDir(), bin: bin}
	s.writeKeys()
	client := address(t)
	peer := address(t)
	port := address(t)
	s.run(
		"etcd",
		"--data-dir",
		s.dir+"/etcd",
		"--listen-client-urls",
		"http://"+client,
		"--advertise-client-urls",
		"http://"+client,
		"--listen-peer-urls",
		"http://"+peer,
		"--initial-advertise-peer-urls",
		"http://"+peer,
		"--initial-cluster",
		"default=http://"+peer,
	)
	_, number, err := net.SplitHostPort(port)
	require.NoError(t, err)
	s.run("kube-apiserver", "--etcd-servers", "http://"+client, "--bind-address", "127.0.0.1", "--secure-port", number,
		"--cert-dir", s.dir+"/certs", "--service-cluster-ip-range", "10.0.0.0/24", "--token-auth-file", s.dir+"/tokens.csv",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", s.dir+"/accounts.pem",
		"--service-account-signing-key-file", s.dir+"/accounts.pem", "--authorization-mode", "RBAC",
		"--disable-admission-plugins", "ServiceAccount") // the controller that makes the accounts doesn't run
	s.url = "https://" + port
	s.writeKubeconfig()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		out, err := s.command("kubectl get --raw /readyz").CombinedOutput()
		if err == nil {
			return s
		}
		require.True(t, time.Now().Before(deadline), "the API server isn't ready: %s", out)
		time.Sleep(200 * time.Millisecond) // poll, because there is no signal
	}
}

// address returns a free address on loopback.
func address(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	return l.Addr().String()
}

// run starts a program, which ends with the test. A failed test shows the end of its log.
func (s *server) run(name string, args ...string) {
	s.t.Helper()
	log, err := os.Create(filepath.Join(s.dir, name+".log"))
	require.NoError(s.t, err)
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(s.t, cmd.Start(), "build the programs with make test-apiserver")
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // an error is expected, because it was killed
		if text, err := os.ReadFile(log.Name()); err == nil && s.t.Failed() {
			s.t.Logf("%s:\n%s", name, text[max(0, len(text)-3000):])
		}
	})
}

func (s *server) writeKeys() {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(s.t, err)
	s.write(
		"accounts.pem",
		string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})),
	)
	s.write("tokens.csv", token+",tester,1,system:masters\n")
}

func (s *server) writeKubeconfig() {
	s.write("config", fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: test
contexts: [{name: test, context: {cluster: test, user: test}}]
clusters: [{name: test, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: test, user: {token: %s}}]
`, s.url, token))
}

func (s *server) write(name, text string) {
	require.NoError(s.t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600))
}

// command returns a command that runs a command line in the repository's root. Its kubectl refuses unknown and repeated
// fields.
func (s *server) command(line string) *exec.Cmd {
	args := strings.Fields(line)
	for i, arg := range args {
		if strings.HasSuffix(arg, ".yaml") && !strings.Contains(arg, "/") { // a file of the tutorial
			args[i] = filepath.Join(s.dir, arg)
		}
	}
	if args[0] == "kubectl" && strings.Contains(line, " apply ") {
		args = append(args, "--validate=strict")
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	s.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, args[0]), args[1:]...)
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "KUBECONFIG="+filepath.Join(s.dir, "config"), "HOME="+s.dir, "no_proxy=*")
	return cmd
}

// ok runs a command, which must succeed, and returns its standard output. It doesn't check standard error, because Helm
// reports links in a chart there.
func (s *server) ok(line string) string {
	s.t.Helper()
	var stderr strings.Builder
	cmd := s.command(line)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(s.t, err, "%s\n%s%s", line, out, stderr.String())
	return string(out)
}

// version returns the version of the API server, such as v1.36.1. The helm that is built here knows no version of
// Kubernetes.
func (s *server) version() string {
	s.t.Helper()
	var all struct {
		Server struct{ GitVersion string } `json:"serverVersion"`
	}
	require.NoError(s.t, json.Unmarshal([]byte(s.ok("kubectl version -o json")), &all))
	require.NotEmpty(s.t, all.Server.GitVersion)
	return all.Server.GitVersion
}

// monitoring returns substitutes for the definitions of the Prometheus Operator, whose types deploy/k8s decodes
// strictly.
func monitoring() string {
	var all strings.Builder
	for plural, kind := range map[string]string{"servicemonitors": "ServiceMonitor", "podmonitors": "PodMonitor",
		"prometheusrules": "PrometheusRule"} {
		fmt.Fprintf(&all, `---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %[1]s.monitoring.coreos.com}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {plural: %[1]s, kind: %[2]s, singular: %[3]s}
  versions:
    - name: v1
      served: true
      storage: true
      schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`, plural, kind, strings.ToLower(kind))
	}
	return all.String()
}

// One server accepts everything: the kustomizations, the chart with its sets of values, and the tutorial.
func TestAnAPIServerTakesAllThatIsApplied(t *testing.T) {
	s := start(t)
	s.write("monitoring.yaml", monitoring())
	s.ok("kubectl apply -f monitoring.yaml")
	s.ok("kubectl wait --for condition=established --timeout 30s crd --all")

	for _, dir := range []string{"base", "overlays/dev", "overlays/production", "overlays/example-app",
		"overlays/regions/eu-west-1", "overlays/regions/us-east-1"} {
		s.ok("kubectl apply -k deploy/k8s/" + dir)
	}
	values, err := filepath.Glob(root + "/deploy/helm/refiller/ci/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, values)
	version := s.version()
	for i, path := range values {
		s.ok(
			fmt.Sprintf(
				"helm install limits deploy/helm/refiller --namespace ci-%d --create-namespace --values deploy/helm/refiller/ci/%s",
				i,
				filepath.Base(path),
			),
		)
		pods(t, s, fmt.Sprintf("ci-%d", i))
		s.write("hooks.yaml", s.ok("helm template limits deploy/helm/refiller --show-only templates/check.yaml "+
			"--kube-version "+version+" --values deploy/helm/refiller/ci/"+filepath.Base(path)))
		s.ok(fmt.Sprintf("kubectl -n ci-%d create --dry-run=server --validate=strict -f hooks.yaml", i))
	}
	for _, namespace := range []string{"default", "refiller-dev", "refiller"} {
		pods(t, s, namespace)
	}
	s.write("typo.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: typo}\ndat: {}\n")
	out, err := s.command("kubectl apply -f typo.yaml").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), `unknown field "dat"`)
}

// pods creates a pod of each Deployment's template in a namespace of the restricted Pod Security level. This is a dry
// run, so no pod is stored.
func pods(t *testing.T, s *server, namespace string) {
	t.Helper()
	s.ok("kubectl label --overwrite namespace " + namespace + " pod-security.kubernetes.io/enforce=restricted")
	names := strings.Fields(s.ok("kubectl -n " + namespace + " get deployments -o name"))
	require.NotEmpty(t, names, namespace)
	for _, name := range names {
		template := s.ok("kubectl -n " + namespace + " get " + name + " -o jsonpath={.spec.template}")
		pod := strings.Replace(template, "{", `{"apiVersion":"v1","kind":"Pod",`, 1)
		pod = strings.Replace(pod, `"metadata":{`, `"metadata":{"name":"one",`, 1)
		s.write("pod.yaml", pod)
		s.ok("kubectl -n " + namespace + " create --dry-run=server --validate=strict -f pod.yaml")
	}
}

// This test runs the commands of the tutorial that need no running pod.
func TestTheTutorialIsTaken(t *testing.T) {
	s := start(t)
	text, err := os.ReadFile(root + "/docs/tutorials/kubernetes.md")
	require.NoError(t, err)
	for _, m := range regexp.MustCompile("(?s)\n```yaml file=(\\S+)\n(.*?)\n```").FindAllStringSubmatch(string(text), -1) {
		s.write(m[1], m[2])
	}
	// Before a release, the text for its readers is in a comment.
	page := regexp.MustCompile("(?s)<!-- released\n.*?\nreleased -->").ReplaceAllString(string(text), "")
	page = strings.ReplaceAll(page, "\\\n", " ")
	ran := 0
	for _, line := range regexp.MustCompile(`(?m)^(kubectl|helm) .*`).FindAllString(page, -1) {
		if strings.Contains(line, " rollout ") || strings.Contains(line, " exec ") ||
			strings.Contains(line, " port-forward ") {
			continue
		}
		if strings.HasPrefix(line, "helm upgrade ") {
			line += " --no-hooks" // no kubelet runs the check
		}
		s.ok(line)
		ran++
	}
	require.Equal(t, 4, ran)
}
