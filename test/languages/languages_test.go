// Package languages runs the examples that aren't in Go against real servers: "make test-languages".
package languages

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var write = flag.Bool("write", false, "write examples/scripts anew")

const patience = 60 * time.Second

// The scripts that strangers find are those that the SDK runs.
func TestScriptsAreThoseOfTheSDK(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"takes", "return"} {
		path := "../../examples/scripts/" + name + ".lua"
		source, err := os.ReadFile("../../lua/" + name + ".lua")
		require.NoError(t, err)
		want := lua.NewScript(name, string(source)).Source()
		if *write {
			require.NoError(t, os.WriteFile(path, []byte(want), 0o600))
		}
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, want, string(got), "go test ./test/languages -run Scripts -args -write writes %s", path)
	}
}

// servers starts Redis with two buckets, and a sidecar with a limit "api" of 3.
func servers(t *testing.T) (redisURL, sidecarURL string) {
	t.Helper()
	redis := testenv.Redis(t)
	for key, capacity := range map[string]int64{"checkout": 3, "checkout-jobs": 10} {
		terms := policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{})
		_, err := lua.Refill(t.Context(), redis.Client(), key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
	}
	p := testenv.Start(t, testenv.Build(t, "./cmd/consumer"), "serve", "--redis", redis.URL(), "--deadline", "5s",
		"--http", "127.0.0.1:0", "--grpc", "none", "--limits", absolute(t, "../../examples/proxies/limits.yaml"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	m, err := p.WaitLog(ctx, regexp.MustCompile(`protocol=http network=tcp address=(\S+)`))
	require.NoError(t, err)
	return redis.URL(), "http://" + m[1]
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	require.NoError(t, err)
	return path
}

// output runs a program to its end.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s %s: %s%s", name, args, out, stderr.String())
	return string(out)
}

const (
	taken  = "checkout: taken, 2 left\ncheckout: taken, 1 left\ncheckout: taken, 0 left\ncheckout: denied, again in "
	bySide = taken + "3600 s\napi: taken, 2 left\ncheckout-jobs: reserved 5, used 3, 2 returned\n" +
		"404 unknown_bucket: refiller: unknown bucket \"no-such-bucket\"\n"
	byHand = taken + "3600 s\ncheckout: returned\ncheckout: taken again\nunknown bucket 'no-such-bucket'\n"
)

// A busy machine takes a second or some between the takes.
func aboutAnHour(s string) string {
	return regexp.MustCompile(`again in 35\d\d s`).ReplaceAllString(s, "again in 3600 s")
}

func TestPythonTakes(t *testing.T) {
	t.Parallel()
	_, sidecar := servers(t)
	python := os.Getenv("PYTHON")
	if python == "" {
		python = "/usr/bin/python3" // Debian's, which has python3-redis
	}
	require.Equal(t, bySide, aboutAnHour(output(t, python, "../../examples/python/sidecar.py", sidecar, "checkout", "api",
		"u")))
	redis, _ := servers(t)
	require.Equal(t, byHand, aboutAnHour(output(t, python, "../../examples/python/direct.py", redis, "checkout")))
}

func TestNodeTakes(t *testing.T) {
	t.Parallel()
	_, sidecar := servers(t)
	require.Equal(t, bySide, aboutAnHour(output(t, "node", "../../examples/node/sidecar.mjs", sidecar, "checkout", "api",
		"u")))

	// As after "npm install", which make runs elsewhere so that the examples stay as they are.
	dir := t.TempDir()
	for name, target := range map[string]string{"scripts": "../../examples/scripts",
		"node_modules": "../../bin/node/node_modules"} {
		require.NoError(t, os.Symlink(absolute(t, target), dir+"/"+name))
	}
	program, err := os.ReadFile("../../examples/node/direct.mjs")
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(dir+"/node", 0o700))
	require.NoError(t, os.WriteFile(dir+"/node/direct.mjs", program, 0o600))
	redis, _ := servers(t)
	require.Equal(t, byHand, aboutAnHour(output(t, "node", dir+"/node/direct.mjs", redis, "checkout")))
}

// A proxy lets three requests of a client pass and answers the fourth with 429 and its headers.
func TestProxiesAskTheSidecar(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		program, config string
		args            func(config string) []string
	}{
		{"nginx", "nginx.conf", func(config string) []string { return []string{"-p", filepath.Dir(config), "-c", config} }},
		{"caddy", "Caddyfile", func(config string) []string {
			return []string{"run", "--config", config, "--adapter", "caddyfile"}
		}},
	} {
		t.Run(tc.program, func(t *testing.T) {
			t.Parallel()
			_, sidecar := servers(t)
			app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				fmt.Fprint(w, "hello ", r.URL.Path)
			}))
			defer app.Close()
			config, err := os.ReadFile("../../examples/proxies/" + tc.config)
			require.NoError(t, err)
			dir, ports := t.TempDir(), testenv.Ports(t, 2)
			front := fmt.Sprint("127.0.0.1:", ports[0])
			text := strings.NewReplacer("127.0.0.1:8080", strings.TrimPrefix(sidecar, "http://"),
				"127.0.0.1:9000", app.Listener.Addr().String(), "127.0.0.1:8000", front).Replace(string(config))
			require.NoError(t, os.WriteFile(filepath.Join(dir, tc.config), []byte(text), 0o600))
			program, err := exec.LookPath(tc.program)
			if err != nil {
				program = "/usr/sbin/" + tc.program
			}
			testenv.StartCommand(t, testenv.Command{Path: program, Args: tc.args(filepath.Join(dir, tc.config)),
				Env: []string{fmt.Sprint("CADDY_ADMIN=127.0.0.1:", ports[1]), "HOME=" + dir}})
			passesThree(t, "http://"+front+"/page")
		})
	}
}

func passesThree(t *testing.T, url string) {
	t.Helper()
	type answer struct {
		status int
		header http.Header
		body   string
	}
	get := func() (answer, error) {
		res, err := http.Get(url)
		if err != nil {
			return answer{}, err
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		return answer{res.StatusCode, res.Header, string(body)}, err
	}
	var first answer
	require.Eventually(t, func() bool {
		var err error
		first, err = get()
		return err == nil
	}, patience, 10*time.Millisecond)
	require.Equal(t, http.StatusOK, first.status)
	require.Equal(t, `"api";r=2;t=60`, first.header.Get("RateLimit"))
	for range 2 {
		res, err := get()
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, res.status)
		require.Equal(t, "hello /page", res.body)
	}
	res, err := get()
	require.NoError(t, err)
	require.Equal(t, http.StatusTooManyRequests, res.status)
	require.NotEmpty(t, res.header.Get("Retry-After"))
	require.Equal(t, `"api";q=3;w=180`, res.header.Get("RateLimit-Policy"))
}
