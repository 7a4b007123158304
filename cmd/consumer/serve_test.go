package main

import (
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	descriptorpb "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rls "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// startSidecar starts "consumer serve" on free ports and returns its addresses.
func startSidecar(t *testing.T, redisURL string, args ...string) (p *testenv.Process, http, grpc string) {
	t.Helper()
	args = append([]string{
		"serve", "--redis", redisURL, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
		"--deadline", "5s", // a busy machine is slow
	}, args...)
	p = testenv.Start(t, testenv.Build(t, "./cmd/consumer"), args...)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	address := func(protocol string) string {
		m, err := p.WaitLog(ctx, regexp.MustCompile(`protocol=`+protocol+` network=tcp address=(\S+)`))
		require.NoError(t, err)
		return m[1]
	}
	return p, address("http"), address("grpc")
}

// The transcript in the documentation matches curl's output, except for times that depend on the time of the run.
func TestTheTranscriptInTheDocumentationIsReal(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	terms := hourly(10).Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "mail", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	socket := t.TempDir() + "/http.sock"
	_, address, _ := startSidecar(t, server.URL(), "--http", "unix:"+socket)

	doc, err := os.ReadFile("../../docs/sidecar.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(doc), "<!-- transcript -->\n```console\n$ ")
	require.True(t, found)
	transcript, _, found := strings.Cut(rest, "```")
	require.True(t, found)
	steps := strings.Split(transcript, "\n$ ")
	require.Len(t, steps, 9)
	for _, step := range steps {
		command, want, found := strings.Cut(step, "\n")
		require.True(t, found)
		sh := exec.CommandContext(t.Context(), "sh", "-c", command)
		sh.Env = append(os.Environ(), "SIDECAR=http://"+address, "SOCKET="+socket, "no_proxy=*")
		got, err := sh.Output()
		require.NoError(t, err, "%s (is curl 7.82 or later installed?)", command)
		require.Equal(t, timeless(want), timeless(string(got)), command)
	}
}

// timeless replaces times that differ from run to run. It rounds lengths of time to the hour or removes them, and
// removes ends.
func timeless(s string) string {
	s = regexp.MustCompile(`"(retry|reset)_after_ms":([1-9]\d*)`).ReplaceAllStringFunc(strings.TrimSpace(s),
		func(m string) string {
			name, ms, _ := strings.Cut(m, ":")
			d, err := time.ParseDuration(ms + "ms")
			if err != nil {
				return m
			}
			return name + ":" + d.Round(time.Hour).String()
		})
	s = regexp.MustCompile(`"until":"[^"]*"`).ReplaceAllString(s, `"until":""`)
	return regexp.MustCompile(`"waited_ms":\d+`).ReplaceAllString(s, `"waited_ms":0`)
}

func TestServeAnswersEnvoyAndEndsWhenAskedTo(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	limits := t.TempDir() + "/limits.yaml"
	require.NoError(t, os.WriteFile(limits, []byte("domain: edge\ndescriptors:\n  - {key: generic_key, value: checkout, rate_limit: {bucket: checkout}}\n"), 0o600))
	p, address, grpcAddress := startSidecar(t, server.URL(), "--envoy", limits, "--envoy-headers", "--drain-timeout",
		"10s")

	conn, err := grpc.NewClient("passthrough:///"+grpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	res, err := rls.NewRateLimitServiceClient(conn).ShouldRateLimit(t.Context(), &rls.RateLimitRequest{
		Domain: "edge", HitsAddend: 4,
		Descriptors: []*descriptorpb.RateLimitDescriptor{{Entries: []*descriptorpb.RateLimitDescriptor_Entry{{Key: "generic_key", Value: "checkout"}}}},
	})
	require.NoError(t, err)
	require.Equal(t, rls.RateLimitResponse_OVER_LIMIT, res.GetOverallCode())
	require.NotEmpty(t, res.GetResponseHeadersToAdd())

	// A wait that is under way when the signal comes is completed.
	terms := policy.Policy{Capacity: 1, Rate: policy.Rate{Tokens: 1, Per: 3 * time.Second}}.Terms(policy.Fence{})
	_, err = lua.Refill(t.Context(), rdb, "mail", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	_, err = lua.Reset(t.Context(), rdb, "mail", 0)
	require.NoError(t, err)
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
	status := make(chan int, 1)
	go func() {
		res, err := http.Post("http://"+address+"/v1/wait", "application/json", strings.NewReader(`{"key":"mail"}`))
		if err != nil {
			t.Error(err)
			status <- 0
			return
		}
		defer res.Body.Close()
		status <- res.StatusCode
	}()
	require.Eventually(t, func() bool {
		info, err := rdb.Info(t.Context(), "commandstats").Result()
		return err == nil && strings.Contains(info, "cmdstat_eval") // the wait's first attempt
	}, 20*time.Second, time.Millisecond)
	_, err = lua.Grant(t.Context(), rdb, "mail", 1)
	require.NoError(t, err)
	p.Signal(syscall.SIGTERM)
	require.Equal(t, http.StatusOK, <-status)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, cli.ExitOK, code)
}

func TestServeExportsMetricsByPolicyAndNeverByKey(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	_, address, _ := startSidecar(t, server.URL(), "--deadline", "10s", "--metrics-policy", "checkout", "--metrics-policy",
		"user:*")
	for _, body := range []string{`{"key":"checkout","tokens":2}`, `{"key":"checkout","tokens":2}`, `{"key":"user:17"}`,
		`{"key":"secret"}`} {
		res, err := http.Post("http://"+address+"/v1/take", "application/json", strings.NewReader(body))
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
	}
	res, err := http.Get("http://" + address + "/metrics")
	require.NoError(t, err)
	defer res.Body.Close()
	page, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	for _, line := range []string{
		`refiller_consumer_calls_total{op="take",outcome="taken",policy="checkout",source="shared"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="denied",policy="checkout",source="shared"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="unknown_bucket",policy="user:*",source="none"} 1`,
		`refiller_consumer_calls_total{op="take",outcome="unknown_bucket",policy="other",source="none"} 1`,
		`refiller_consumer_tokens_taken_total{policy="checkout",source="shared"} 2`,
		`refiller_consumer_call_seconds_count{op="take"} 4`,
		`refiller_consumer_breaker_opened_total 0`,
	} {
		require.Contains(t, string(page), line+"\n")
	}
	require.NotContains(t, string(page), "user:17")
	require.NotContains(t, string(page), "secret")
}

func TestServeSaysWhatIsWrongWithItsFlags(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/bad.yaml", []byte("domain: edge\ndescriptors: [{value: k}]"), 0o600))
	for args, c := range map[string]struct {
		code int
		says string
	}{
		"serve here":                                {cli.ExitUsage, `arguments "here": want consumer serve`},
		"serve --http= --grpc=":                     {cli.ExitUsage, "no address"},
		"serve --grpc= --envoy " + dir + "/x":       {cli.ExitFailed, "no such file"},
		"serve --envoy " + dir + "/bad.yaml":        {cli.ExitUsage, "bad.yaml: descriptors[0]"},
		"serve --envoy-shadow":                      {cli.ExitUsage, "need --envoy"},
		"serve --client-calls 0":                    {cli.ExitUsage, "--client-calls 0: want 1 to 65536"},
		"serve --client-connections 0":              {cli.ExitUsage, "--client-connections 0: want 1 to 65536"},
		"serve --max-request 7":                     {cli.ExitUsage, "--max-request 7: want 1024 to 4194304"},
		"serve --max-wait 2h":                       {cli.ExitUsage, "--max-wait 2h0m0s: want 1ms to 1h0m0s"},
		"serve --client-timeout 1ms":                {cli.ExitUsage, "--client-timeout 1ms: want 10ms to 1h0m0s"},
		"serve --client-timeout 20ms --deadline 1s": {cli.ExitUsage, "--deadline 1s: want 1ms to 20ms"},
		"serve --drain-timeout -1s":                 {cli.ExitUsage, "--drain-timeout -1s"},
		"serve --drain-delay -1s":                   {cli.ExitUsage, "--drain-delay -1s: want 0s to 1h0m0s"},
		"serve --deadline 1us":                      {cli.ExitUsage, "--deadline 1µs"},
		"serve --redis-connections 0":               {cli.ExitUsage, "--redis-connections 0: want 1 to 10000"},
		"serve --limits " + dir + "/x":              {cli.ExitFailed, "--limits: filewatch: open " + dir + "/x"},
		"serve --tls-cert c.pem":                    {cli.ExitUsage, "both --tls-cert and --tls-key"},
		"serve --tls-client-ca c.pem":               {cli.ExitUsage, "both --tls-cert and --tls-key"},
		"serve --tls-cert c.pem --tls-key k.pem":    {cli.ExitFailed, "c.pem"},
		"serve --log-level loud":                    {cli.ExitUsage, "--log-level"},
		"serve --log-format xml":                    {cli.ExitUsage, "--log-format"},
		"serve --redis nowhere":                     {cli.ExitUsage, "redis://host:port/db"},
		"serve --http 127.0.0.1:notaport":           {cli.ExitUsage, "--http \"127.0.0.1:notaport\": want host:port"},
		"serve --grpc 127.0.0.1":                    {cli.ExitUsage, "--grpc \"127.0.0.1\": want host:port"},
		"serve --admin :70000":                      {cli.ExitUsage, "--admin \":70000\": want host:port"},
		"serve --http unix:":                        {cli.ExitUsage, "or unix:/path"},
		"serve --http= --grpc unix:" + dir + "/a/b": {cli.ExitFailed, "listen on unix:"},
	} {
		o := consumer(t.Context(), "redis://127.0.0.1:1", strings.Fields(args)...)
		require.Equal(t, c.code, o.code, "%s: %+v", args, o)
		require.Contains(t, o.stderr, c.says, args)
	}
}

// The sidecar reads its files again when they change, and at SIGHUP. If a file is wrong, the limits don't change.
func TestServeFollowsItsFiles(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	dir := t.TempDir()
	write := func(file, text string) {
		require.NoError(t, os.WriteFile(dir+"/"+file+".new", []byte(text), 0o600))
		require.NoError(t, os.Rename(dir+"/"+file+".new", dir+"/"+file))
	}
	edge := func(n string) string {
		return "domain: edge\ndescriptors:\n  - {key: k, rate_limit: {unit: day, requests_per_unit: " + n + "}}\n"
	}
	named := func(name string) string {
		return "limits:\n  - {name: " + name + ", lazy: {capacity: 3, rate: 1/h}}\n"
	}
	write("edge.yaml", edge("5"))
	write("limits.yaml", named("api"))
	p, address, grpcAddress := startSidecar(t, server.URL(), "--envoy", dir+"/edge.yaml", "--limits", dir+"/limits.yaml")
	conn, err := grpc.NewClient("passthrough:///"+grpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	limitOfEnvoy := func() uint32 {
		res, err := rls.NewRateLimitServiceClient(conn).ShouldRateLimit(t.Context(), &rls.RateLimitRequest{
			Domain: "edge",
			Descriptors: []*descriptorpb.RateLimitDescriptor{{Entries: []*descriptorpb.RateLimitDescriptor_Entry{{Key: "k",
				Value: "v"}}}},
		})
		require.NoError(t, err)
		return res.GetStatuses()[0].GetCurrentLimit().GetRequestsPerUnit()
	}
	status := func(limit string) int {
		res, err := http.Get("http://" + address + "/v1/limits/" + limit + "/peek?key=a")
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		return res.StatusCode
	}
	accepted := func(want string) {
		res, err := http.Get("http://" + address + "/metrics")
		require.NoError(t, err)
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		require.Contains(t, string(text), "\nrefiller_sidecar_limits_last_reload_ok "+want+"\n")
	}
	accepted("1")
	require.EqualValues(t, 5, limitOfEnvoy())
	require.Equal(t, http.StatusOK, status("api"))

	write("edge.yaml", edge("7"))
	write("limits.yaml", named("other"))
	require.Eventually(t, func() bool { return limitOfEnvoy() == 7 && status("other") == http.StatusOK }, 20*time.Second,
		5*time.Millisecond)
	require.Equal(t, http.StatusNotFound, status("api"))

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	accepted("1")
	require.NoError(t, os.Remove(dir+"/limits.yaml"))
	_, err = p.WaitLog(ctx, regexp.MustCompile(`limits not changed.*no such file`))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status("other"))
	accepted("0")

	write("limits.yaml", "limits: [{name: x}]")
	_, err = p.WaitLog(ctx, regexp.MustCompile(`limits not changed.*want one of bucket, lazy`))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status("other"))
	accepted("0")
	require.NoError(t, os.WriteFile(dir+"/limits.yaml", []byte(named("third")), 0o600))
	p.Signal(syscall.SIGHUP)
	_, err = p.WaitLog(ctx, regexp.MustCompile(`limits loaded: cause=(SIGHUP)`))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, status("third"))
	accepted("1")
}

// If a file is added to a directory or removed from it, the limits change without a restart.
func TestServeFollowsADirectory(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	dir := t.TempDir()
	domain := func(name string) {
		text := "domain: " + name + "\ndescriptors:\n  - {key: k, rate_limit: {unit: day, requests_per_unit: 1}}\n"
		require.NoError(t, os.WriteFile(dir+"/"+name+".yaml", []byte(text), 0o600))
	}
	domain("edge")
	_, address, _ := startSidecar(t, server.URL(), "--envoy", dir)
	config := func() string {
		res, err := http.Get("http://" + address + "/rlconfig")
		require.NoError(t, err)
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		require.NoError(t, err)
		return string(body)
	}
	const edge = "edge.k: unit=DAY requests_per_unit=1, shadow_mode: false, quota_mode: false\n"
	require.Equal(t, edge, config())
	domain("mail")
	require.Eventually(t, func() bool { return config() == edge+strings.Replace(edge, "edge", "mail", 1) },
		20*time.Second, 10*time.Millisecond)
	checked := consumer(t.Context(), server.URL(), "check", dir)
	require.Equal(t, cli.ExitOK, checked.code, checked.stderr)
	require.Contains(t, checked.stdout, dir+"/mail.yaml: ok: rate limits for envoy, domain mail: 1 limit\n")
	require.NoError(t, os.Remove(dir+"/mail.yaml"))
	require.Eventually(t, func() bool { return config() == edge }, 20*time.Second, 10*time.Millisecond)
}

// A SIGHUP doesn't end a sidecar without files. A terminal that closes sends this signal.
func TestServeOutlivesAHangUp(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	p, address, _ := startSidecar(t, server.URL())
	p.Signal(syscall.SIGHUP)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err := p.WaitLog(ctx, regexp.MustCompile(`limits loaded: cause=(SIGHUP)`))
	require.NoError(t, err)
	res, err := http.Get("http://" + address + "/livez")
	require.NoError(t, err)
	require.NoError(t, res.Body.Close())
	require.Equal(t, http.StatusOK, res.StatusCode)
	p.Signal(syscall.SIGTERM)
	code, err := p.Wait(ctx)
	require.NoError(t, err)
	require.Equal(t, cli.ExitOK, code)
}

func TestServeWarnsOfAddressesThatAnyClientReaches(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	p := testenv.Start(t, testenv.Build(t, "./cmd/consumer"), "serve", "--redis", server.URL(), "--http", "0.0.0.0:0",
		"--grpc", "127.0.0.1:0")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	m, err := p.WaitLog(ctx, regexp.MustCompile(`every client that reaches this address.*protocol=(\S+)`))
	require.NoError(t, err)
	require.Equal(t, "http", m[1])
}

func TestCheckNamesEveryProblemOfTheSidecarsFiles(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"edge.yaml": "domain: edge\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 5}}]",
		"limits.yaml": "limits: [{name: a, pacing: {rate: 1/s}}, " +
			"{name: b, all: [{name: c, window: {limit: 5, length: 1d}}]}]",
		"bad.yaml": `limits:
  - {name: "", lazy: {capacity: 5, rate: 1/s}}
  - {name: two, lazy: {capacity: 5, rate: 1/s}, bucket: {}}
  - {name: rate, lazy: {capacity: 5, rate: fast}}
  - {name: none, window: {limit: 5}}
  - {name: zone, schedule: {zone: Mars/Base, windows: [{limit: 1, per: day}]}}
  - {name: per, schedule: {windows: [{limit: 1, per: fortnight}]}}
  - {name: sched, schedule: {}}
  - {name: of, all: [{name: x, bucket: {}}]}
  - {name: of, pacing: {rate: 1/s}}
`,
	} {
		require.NoError(t, os.WriteFile(dir+"/"+name, []byte(text), 0o600))
	}
	o := consumer(t.Context(), "redis://127.0.0.1:1", "check", dir+"/edge.yaml", dir+"/limits.yaml")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "edge.yaml: ok: rate limits for envoy, domain edge: 1 limit\n")
	require.Contains(t, o.stdout, "limits.yaml: ok: 2 limits\n")
	o = consumer(t.Context(), "redis://127.0.0.1:1", "check", dir+"/bad.yaml")
	require.Equal(t, cli.ExitUsage, o.code)
	require.NotContains(t, o.stdout, "ok")
	for _, says := range []string{
		"limits[0].name: it is missing", "limits[1]: want one of", "limits[2].lazy.rate: ", "limits[3].window: window: 0s",
		"limits[4].schedule.windows[0].zone: \"Mars/Base\" is not a time zone", "limits[5].schedule.windows[0].per: ",
		"limits[6].schedule: schedule: bad config: windows: there are 0", "limits[7].all[0]: want one of lazy",
		"limits[8].name: \"of\" is the name of two limits",
	} {
		require.Contains(t, o.stderr, says)
	}
	for text, says := range map[string]string{
		"limits:\n\t- a\n":                         "line 2: not YAML: there is a tab: indent with spaces",
		"limits:\n  - {nam: a}\n  - {lazzy: {}}\n": "line 2: field nam not found; line 3: field lazzy not found",
		"domain: a\ndomain: b\n":                   `line 2: mapping key "domain" already defined at line 1`,
	} {
		path := filepath.Join(dir, "one.yaml")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		o = consumer(t.Context(), "redis://127.0.0.1:1", "check", path)
		require.Equal(t, cli.ExitUsage, o.code)
		require.Equal(t, path+": "+says, strings.SplitN(o.stderr, "\n", 2)[0])
	}
	o = consumer(t.Context(), "redis://127.0.0.1:1", "check")
	require.Equal(t, cli.ExitUsage, o.code)
}
