package languages

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
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

	"github.com/tokenrefill/refiller/internal/sidecar/httpapi"
	"github.com/tokenrefill/refiller/internal/testing/openapi"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// language runs the programs of testdata that use a client of the examples.
type language struct {
	program   string
	extension string
}

func languages() map[string]language {
	return map[string]language{"node": {"node", ".mjs"}, "python": {pythonProgram(), ".py"}}
}

func (l language) command(t *testing.T, name string, args ...string) testenv.Command {
	t.Helper()
	program := []string{l.program, absolute(t, "testdata/"+name+l.extension)}
	return testenv.Command{Path: "/usr/bin/env", Args: append(program, args...)}
}

// ask makes a call with the client of a language, and returns the answer.
func (l language) ask(t *testing.T, url, fallback, method string, args ...string) map[string]any {
	t.Helper()
	out := output(t, l.program, append([]string{"testdata/ask" + l.extension, url, fallback, method}, args...)...)
	var answer map[string]any
	require.NoError(t, json.Unmarshal([]byte(out), &answer), out)
	return answer
}

// script is a simulated sidecar. It gives the answers of a list, one after the other, and records the calls.
type script struct {
	mu      sync.Mutex
	answers []func(http.ResponseWriter)
	calls   []string
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body) // fails only if the client has disconnected
	s.mu.Lock()
	s.calls = append(s.calls, r.URL.Path+" "+string(body))
	answer := s.answers[min(len(s.calls), len(s.answers))-1]
	s.mu.Unlock()
	answer(w)
}

func failing(status int, code string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"code":%q,"message":"no"}`, code)
	}
}

func silent(http.ResponseWriter) { time.Sleep(2 * time.Second) } // longer than the client waits

func takes(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"name":"api","key":"k","ok":true,"taken":1,"remaining":2,"limit":3,"retry_after_ms":0,`+
		`"reset_after_ms":0,"source":"shared","wait_ms":0}`)
}

// A take has a request id, so a client repeats it once after any failure. A take of a named limit has no request id. So
// a client repeats it only if it certainly had no effect.
func TestClientsRepeatWhatIsSafe(t *testing.T) {
	t.Parallel()
	type want struct {
		calls  int
		source string
	}
	type answers = []func(http.ResponseWriter)
	unavailable, busy := failing(503, "unavailable"), failing(503, "busy")
	for name, l := range languages() {
		for what, c := range map[string]struct {
			answers answers
			method  string
			args    []string
			want    want
		}{
			"a take":                    {answers{unavailable, takes}, "take", []string{`"k"`}, want{2, "shared"}},
			"a take without a response": {answers{silent, takes}, "take", []string{`"k"`}, want{2, "shared"}},
			"a take that fails twice": {answers{unavailable, unavailable, takes}, "take", []string{`"k"`},
				want{2, "fallback:sidecar"}},
			"a limit": {answers{unavailable, takes}, "take_limit", []string{`"api"`, `"k"`},
				want{1, "fallback:sidecar"}},
			"a limit of a busy sidecar": {answers{busy, takes}, "take_limit", []string{`"api"`, `"k"`}, want{2, "shared"}},
		} {
			t.Run(name+" "+what, func(t *testing.T) {
				t.Parallel()
				s := &script{answers: c.answers}
				server := httptest.NewServer(s)
				t.Cleanup(server.Close)
				answer := l.ask(t, server.URL, "open", c.method, c.args...)
				require.Equal(t, c.want.source, answer["source"])
				require.Equal(t, true, answer["ok"])
				require.Len(t, s.calls, c.want.calls)
				for _, call := range s.calls {
					require.Equal(t, s.calls[0], call, "each attempt has the same request id")
				}
				require.Equal(t, c.method == "take", strings.Contains(s.calls[0], "request_id"))
			})
		}
	}
}

// Without a sidecar, the fallback decides. A wrong call is an error with any fallback.
func TestClientsFallBack(t *testing.T) {
	t.Parallel()
	dead := fmt.Sprint("http://127.0.0.1:", testenv.Ports(t, 1)[0])
	wrong := httptest.NewServer(&script{answers: []func(http.ResponseWriter){failing(404, "unknown_bucket")}})
	t.Cleanup(wrong.Close)
	for name, l := range languages() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for fallback, ok := range map[string]bool{"open": true, "closed": false} {
				answer := l.ask(t, dead, fallback, "take", `"k"`)
				require.Equal(t, ok, answer["ok"])
				require.Equal(t, "fallback:sidecar", answer["source"])
				all := l.ask(t, dead, fallback, "take_all", `[{"key":"a"},{"key":"b"}]`)
				require.Equal(t, ok, all["ok"])
				require.Len(t, all["results"], 2)
				require.Equal(t, ok, l.ask(t, dead, fallback, "check", `"api"`, `"k"`)["ok"])
				require.Equal(t, "unknown_bucket: no", l.ask(t, wrong.URL, fallback, "take", `"k"`)["error"])
			}
		})
	}
}

// restartable is a sidecar with a TCP port and a Unix socket, which stay the same when it is restarted.
type restartable struct {
	t       *testing.T
	redis   *testenv.RedisServer
	process *testenv.Process
	port    int
	socket  string
}

func newRestartable(t *testing.T) *restartable {
	t.Helper()
	r := &restartable{t: t, redis: testenv.Redis(t), port: testenv.Ports(t, 1)[0], socket: t.TempDir() + "/sidecar.sock"}
	terms := policy.Policy{Capacity: 1e9, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), r.redis.Client(), "load", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	r.start()
	return r
}

func (r *restartable) urls() map[string]string {
	return map[string]string{"node": "unix:" + r.socket, "python": fmt.Sprint("http://127.0.0.1:", r.port)}
}

func (r *restartable) start() {
	r.t.Helper()
	r.process = testenv.Start(r.t, testenv.Build(r.t, "./cmd/consumer"), "serve", "--redis", r.redis.URL(), "--http",
		fmt.Sprint("127.0.0.1:", r.port), "--http", "unix:"+r.socket, "--grpc", "none", "--limits",
		absolute(r.t, "../../examples/proxies/limits.yaml"))
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	_, err := r.process.WaitLog(ctx, regexp.MustCompile(`protocol=http network=unix`))
	require.NoError(r.t, err)
}

// Takes go on while the sidecar is killed and started again. Each take that got an answer from the bucket is charged
// once.
func TestClientsTakeWhileTheSidecarIsRestarted(t *testing.T) {
	t.Parallel()
	for name, l := range languages() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRestartable(t)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, l.program, "testdata/load"+l.extension, r.urls()[name])
			stdin, err := cmd.StdinPipe()
			require.NoError(t, err)
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, os.Stderr
			require.NoError(t, cmd.Start())
			left := func() int64 {
				n, err := r.redis.Client().Get(ctx, "load").Int64()
				require.NoError(t, err)
				return n
			}
			for range 3 {
				before := left()
				require.Eventually(t, func() bool { return left() < before-100 }, patience, time.Millisecond, "takes go on")
				r.process.Kill()
				r.start()
			}
			before := left()
			require.Eventually(t, func() bool { return left() < before-100 }, patience, time.Millisecond, "takes go on")
			require.NoError(t, stdin.Close())
			require.NoError(t, cmd.Wait())
			var sources struct{ Shared, Fallback int64 }
			require.NoError(t, json.Unmarshal([]byte(out.String()), &sources), out.String())
			charged := 1e9 - left()
			require.GreaterOrEqual(t, charged, sources.Shared)
			require.LessOrEqual(t, charged, sources.Shared+sources.Fallback, "no take is charged twice")
			t.Logf("%d takes, %d of them without a response of the sidecar; %d tokens charged", sources.Shared+sources.Fallback,
				sources.Fallback, charged)
		})
	}
}

// Requests to an application go on while its sidecar is killed and started again. With an open fallback, no request
// gets an error from the limiter. With a closed fallback, requests get status 503 meanwhile. The headers of the answers
// come from the sidecar.
func TestMiddlewaresWhileTheSidecarIsRestarted(t *testing.T) {
	t.Parallel()
	for name, l := range languages() {
		for fallback, without := range map[string]int{"open": http.StatusOK, "closed": http.StatusServiceUnavailable} {
			t.Run(name+" "+fallback, func(t *testing.T) {
				t.Parallel()
				r := newRestartable(t)
				front := fmt.Sprint("127.0.0.1:", testenv.Ports(t, 1)[0])
				_, port, _ := strings.Cut(front, ":")
				testenv.StartCommand(t, l.command(t, "server", r.urls()[name], fallback, port))
				ask := func(user string) (status int, header http.Header, err error) {
					req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+front, nil)
					if err != nil {
						return 0, nil, err
					}
					req.Header.Set("X-User", user)
					res, err := http.DefaultClient.Do(req)
					if err != nil {
						return 0, nil, err
					}
					defer res.Body.Close()
					_, err = io.Copy(io.Discard, res.Body)
					return res.StatusCode, res.Header, err
				}
				var first http.Header
				require.Eventually(t, func() bool {
					status, header, err := ask("first")
					first = header
					return err == nil && status == http.StatusOK
				}, patience, 10*time.Millisecond, "the application runs")
				require.Equal(t, `"api";r=2;t=60`, first.Get("RateLimit"))
				require.Equal(t, `"api";q=3;w=180`, first.Get("RateLimit-Policy"))

				ctx, stop := context.WithCancel(t.Context())
				var asking sync.WaitGroup
				for i := range 4 {
					asking.Go(func() {
						for ctx.Err() == nil {
							s, _, err := ask(fmt.Sprint("user-", i))
							if err != nil {
								t.Error(err)
								return
							}
							if s != http.StatusOK && s != http.StatusTooManyRequests && s != without {
								t.Errorf("status %d", s)
							}
						}
					})
				}
				status := func(want int) func() bool {
					return func() bool {
						got, _, err := ask("user-0")
						return err == nil && got == want
					}
				}
				for range 2 {
					require.Eventually(t, status(http.StatusTooManyRequests), patience, 10*time.Millisecond, "the limit is in force")
					r.process.Kill()
					require.Eventually(t, status(without), patience, 10*time.Millisecond, "the fallback answers")
					r.start()
				}
				require.Eventually(t, status(http.StatusTooManyRequests), patience, 10*time.Millisecond, "the limit is in force")
				_, denied, err := ask("user-0")
				require.NoError(t, err)
				require.NotEmpty(t, denied.Get("Retry-After"))
				require.Equal(t, "application/problem+json", denied.Get("Content-Type"))
				stop()
				asking.Wait()
			})
		}
	}
}

// The types that the clients declare must be the same as in the OpenAPI description.
func TestTheTypesOfTheClientsAreThoseOfTheDescription(t *testing.T) {
	t.Parallel()
	d := openapi.Read(t, httpapi.OpenAPI)
	node, err := os.ReadFile(filepath.Join("../../examples/node", "refiller.mjs"))
	require.NoError(t, err)
	python, err := os.ReadFile(filepath.Join("../../examples/python", "refiller.py"))
	require.NoError(t, err)
	var typed int
	for name, s := range d.Components.Schemas {
		if s.Type != "object" {
			continue
		}
		_, text, found := strings.Cut(string(node), "@typedef {object} "+name+"\n")
		if found {
			typed++
			text, _, _ = strings.Cut(strings.ReplaceAll(text, "*/", "@typedef"), "@typedef")
			got := make(map[string]string)
			for _, m := range regexp.MustCompile(`@property \{(.*?)\} (\[?)(\w+)`).FindAllStringSubmatch(text, -1) {
				got[m[3]] = nullable(strings.HasSuffix(m[1], "| null")) + optional(m[2] != "")
			}
			require.Equal(t, fieldsOf(d, t, s), got, "node: %s", name)
		}
		_, text, found = strings.Cut(string(python), "class "+name+"(TypedDict):\n")
		if found {
			typed++
			text, _, _ = strings.Cut(text, "\n\n")
			got := make(map[string]string)
			for _, m := range regexp.MustCompile(`(?m)^    (\w+): (\S[^#\n]*)`).FindAllStringSubmatch(text, -1) {
				got[m[1]] = nullable(strings.HasSuffix(strings.TrimSpace(m[2]), "| None")) +
					optional(strings.HasPrefix(m[2], "NotRequired"))
			}
			require.Equal(t, fieldsOf(d, t, s), got, "python: %s", name)
		}
	}
	require.Greater(t, typed, 12)
}

// fieldsOf returns, for each field of a schema, whether it may be null and whether it may be left out.
func fieldsOf(d *openapi.Document, t *testing.T, s *openapi.Schema) map[string]string {
	t.Helper()
	required := make(map[string]bool)
	for _, name := range s.Required {
		required[name] = true
	}
	fields := make(map[string]string)
	for name, p := range s.Properties {
		fields[name] = nullable(p.Nullable || d.Resolve(t, p).Nullable) + optional(!required[name])
	}
	return fields
}

func nullable(yes bool) string {
	if yes {
		return "may be null "
	}
	return "value "
}

func optional(yes bool) string {
	if yes {
		return "optional"
	}
	return "required"
}
