// Package languages runs the examples in languages other than Go with real servers. "make test-languages" runs the
// tests. The package holds tests only.
//
// "make doors" measures bursts and latencies of the sidecar that the examples use.
package languages

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

var write = flag.Bool("write", false, "write examples/scripts anew")

const patience = 60 * time.Second

// The scripts in examples/scripts must be the ones that the SDK runs.
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

// side is a sidecar with its Redis.
type side struct {
	redis   *testenv.RedisServer
	sidecar *testenv.Process
	url     string // URL of the sidecar
}

// start starts Redis with two buckets, and a sidecar with a limit "api" of 3.
func start(t *testing.T) side {
	t.Helper()
	s := side{redis: testenv.Redis(t)}
	for key, capacity := range map[string]int64{"checkout": 3, "checkout-jobs": 10} {
		terms := policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{})
		_, err := lua.Refill(t.Context(), s.redis.Client(), key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(t, err)
	}
	s.sidecar = testenv.Start(t, testenv.Build(t, "./cmd/consumer"), "serve", "--redis", s.redis.URL(), "--deadline", "5s",
		"--http", "127.0.0.1:0", "--grpc", "none", "--limits", absolute(t, "../../examples/proxies/limits.yaml"))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	m, err := s.sidecar.WaitLog(ctx, regexp.MustCompile(`protocol=http network=tcp address=(\S+)`))
	require.NoError(t, err)
	s.url = "http://" + m[1]
	return s
}

// servers returns the addresses of a Redis with two buckets, and of a sidecar with a limit "api" of 3.
func servers(t *testing.T) (redisURL, sidecarURL string) {
	t.Helper()
	s := start(t)
	return s.redis.URL(), s.url
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	path, err := filepath.Abs(path)
	require.NoError(t, err)
	return path
}

// output runs a program to its end, and returns its output.
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
		"unknown_bucket: refiller: unknown bucket \"no-such-bucket\"\n"
	byHand = taken + "3600 s\ncheckout: returned\ncheckout: taken again\nunknown bucket 'no-such-bucket'\n"
)

// aboutAnHour replaces waits of nearly an hour by an hour. On a busy machine some seconds may pass between the takes.
func aboutAnHour(s string) string {
	return regexp.MustCompile(`again in 35\d\d s`).ReplaceAllString(s, "again in 3600 s")
}

func pythonProgram() string {
	if python := os.Getenv("PYTHON"); python != "" {
		return python
	}
	return "/usr/bin/python3" // Debian's, which has python3-redis
}

func TestPythonTakes(t *testing.T) {
	t.Parallel()
	_, sidecar := servers(t)
	python := pythonProgram()
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

	// Link the modules that make has installed in bin/node, so that the examples' directory isn't changed.
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

// proxy is an HTTP proxy that asks the sidecar before it forwards a request.
type proxy struct {
	program, config string
	args            func(config string) []string
}

var proxies = []proxy{
	{"nginx", "nginx.conf", func(config string) []string { return []string{"-p", filepath.Dir(config), "-c", config} }},
	{"caddy", "Caddyfile", func(config string) []string {
		return []string{"run", "--config", config, "--adapter", "caddyfile"}
	}},
}

// start runs the proxy of the example in front of an application, and returns the URL of a page. replaced has pairs of
// texts: the first one of a pair is replaced by the second one in the proxy's configuration.
func (p proxy) start(t *testing.T, sidecar string, replaced ...string) string {
	t.Helper()
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "hello ", r.URL.Path)
	}))
	t.Cleanup(app.Close)
	config, err := os.ReadFile("../../examples/proxies/" + p.config)
	require.NoError(t, err)
	dir, ports := t.TempDir(), testenv.Ports(t, 2)
	front := fmt.Sprint("127.0.0.1:", ports[0])
	text := strings.NewReplacer(append(replaced, "127.0.0.1:8080", strings.TrimPrefix(sidecar, "http://"),
		"127.0.0.1:9000", app.Listener.Addr().String(), "127.0.0.1:8000", front,
		":8000", fmt.Sprint(":", ports[0]))...).Replace(string(config))
	require.NoError(t, os.WriteFile(filepath.Join(dir, p.config), []byte(text), 0o600))
	program, err := exec.LookPath(p.program)
	if err != nil {
		program = "/usr/sbin/" + p.program
	}
	testenv.StartCommand(t, testenv.Command{Path: program, Args: p.args(filepath.Join(dir, p.config)),
		Env: []string{fmt.Sprint("CADDY_ADMIN=127.0.0.1:", ports[1]), "HOME=" + dir}})
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", front)
		if err != nil {
			return false
		}
		return c.Close() == nil
	}, patience, 10*time.Millisecond)
	return "http://" + front + "/page"
}

// A proxy forwards three requests of a client, and answers the fourth with status 429 and the limiter's headers.
func TestProxiesAskTheSidecar(t *testing.T) {
	t.Parallel()
	for _, p := range proxies {
		t.Run(p.program, func(t *testing.T) {
			t.Parallel()
			_, sidecar := servers(t)
			passesThree(t, p.start(t, sidecar))
		})
	}
}

// asABrowser makes a request as a browser does that follows a link from another site. The request has the public name
// of the proxy. asABrowser returns the status.
func asABrowser(client *http.Client, url string) (int, error) {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Host = "shop.example"
	for name, value := range map[string]string{"Site": "cross-site", "Mode": "navigate", "Dest": "document"} {
		req.Header.Set("Sec-Fetch-"+name, value)
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	_, err = io.Copy(io.Discard, res.Body)
	return res.StatusCode, err
}

// A check lacks the cookies, so a request with as many cookies as the proxy accepts is checked.
func TestProxiesPassRequestsWithManyCookies(t *testing.T) {
	t.Parallel()
	for i, lines := range []int{4, 16} { // of 6 KiB; nginx accepts four lines of 8 KiB
		p := proxies[i]
		t.Run(p.program, func(t *testing.T) {
			t.Parallel()
			_, sidecar := servers(t)
			req, err := http.NewRequest(http.MethodGet, p.start(t, sidecar), nil)
			require.NoError(t, err)
			for range lines {
				req.Header.Add("Cookie", "c="+strings.Repeat("c", 6<<10))
			}
			var code int
			var remaining string
			require.Eventually(t, func() bool {
				res, err := http.DefaultClient.Do(req)
				if err != nil {
					return false
				}
				code, remaining = res.StatusCode, res.Header.Get("RateLimit")
				return res.Body.Close() == nil
			}, patience, 10*time.Millisecond)
			require.Equal(t, http.StatusOK, code)
			require.Equal(t, `"api";r=2;t=60`, remaining)
		})
	}
}

// While the sidecar or its Redis is unavailable, the proxies forward requests. No request gets an error from the
// limiter, not even at the moment when the sidecar or Redis is killed.
func TestProxiesPassRequestsWhileTheSidecarIsUnavailable(t *testing.T) {
	t.Parallel()
	for _, p := range proxies {
		for _, stop := range []string{"sidecar", "redis"} {
			t.Run(p.program+" without "+stop, func(t *testing.T) {
				t.Parallel()
				s := start(t)
				url := p.start(t, s.url)
				stopped := make(chan struct{})
				var asking sync.WaitGroup
				for range 8 {
					asking.Go(func() {
						for passed := 0; passed < 20; {
							status, err := asABrowser(http.DefaultClient, url)
							if err != nil || status != http.StatusOK && status != http.StatusTooManyRequests {
								t.Errorf("status %d: %v", status, err)
								return
							}
							select {
							case <-stopped:
								if status == http.StatusOK {
									passed++
								}
							default:
							}
						}
					})
				}
				require.Eventually(t, func() bool {
					status, err := asABrowser(http.DefaultClient, url)
					return err == nil && status == http.StatusTooManyRequests
				}, patience, 10*time.Millisecond, "the limit is in force for a browser's request")
				if stop == "redis" {
					s.redis.Kill()
				} else {
					s.sidecar.Kill()
				}
				close(stopped)
				asking.Wait()
			})
		}
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
