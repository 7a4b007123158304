package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// outcome is the result of a run of the program.
type outcome struct {
	code           int
	stdout, stderr string
}

func (o outcome) json(t *testing.T) map[string]any {
	t.Helper()
	var v map[string]any
	require.NoError(t, json.Unmarshal([]byte(o.stdout), &v), o.stdout)
	return v
}

// consumer runs the program in an environment that names the Redis server at url.
func consumer(ctx context.Context, url string, args ...string) outcome {
	var stdout, stderr bytes.Buffer
	environ := fields.Environment{"REFILLER_REDIS_URL": url}
	code := run(ctx, args, env{Environ: environ, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr})
	return outcome{code, stdout.String(), stderr.String()}
}

// newBucket starts a server with a bucket "checkout".
func newBucket(t *testing.T, p policy.Policy) (*testenv.RedisServer, *redis.Client) {
	t.Helper()
	server := testenv.Redis(t)
	rdb := server.Client()
	require.NoError(t, p.Validate())
	terms := p.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "checkout", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	return server, rdb
}

func hourly(capacity int64) policy.Policy {
	return policy.Policy{Capacity: capacity, Rate: policy.Rate{Tokens: 1, Per: time.Hour}}
}

func TestExitCodesAndMessages(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	steps := []struct {
		args   string
		code   int
		stdout string
		stderr string
	}{
		{"take checkout", cli.ExitOK, "taken: 1 token; 2 of 3 tokens left", ""},
		{"take checkout -n 2", cli.ExitOK, "taken: 2 tokens; 0 of 3 tokens left", ""},
		{"take checkout", exitDenied, "denied: 0 of 3 tokens left; 1 token due in ", ""},
		{"peek checkout", cli.ExitOK, "0 of 3 tokens; full in", ""},
		{"return checkout", cli.ExitOK, "returned: 1 token", ""},
		{"wait checkout", cli.ExitOK, "taken: 1 token, after", ""},
		{"wait checkout --timeout 1s", exitDenied, "denied: no tokens within 1s", ""},
		{"take typo", cli.ExitFailed, "", "Check the spelling"},
		{"return checkout -n 3", cli.ExitOK, "returned: 3 tokens", ""},
		{"return checkout -n 5", cli.ExitOK, "returned: 0 tokens; 5 dropped, because the bucket is full", ""},
		{"take checkout -n 3", cli.ExitOK, "taken: 3 tokens; 0 of 3 tokens left", ""},
		{"peek typo", cli.ExitFailed, "", "If the refiller has just started, wait a second"},
		{"return typo", cli.ExitFailed, "", "Check the spelling"},
		{"wait typo", cli.ExitFailed, "", "Check the spelling"},
		{"load typo", cli.ExitFailed, "", "Check the spelling"},
		{"take checkout -n 4", cli.ExitFailed, "", "no more than the capacity"},
		{"take bad}key", cli.ExitUsage, "", "closing brace"},
		{"peek bad}key", cli.ExitUsage, "", "closing brace"},
		{"load bad}key", cli.ExitUsage, "", "closing brace"},
		{"take checkout -n 0", cli.ExitUsage, "", "from 1 to 1125899906842624"},
		{"return checkout -n -1", cli.ExitUsage, "", "from 1 to 1125899906842624"},
		{"wait checkout -n x", cli.ExitUsage, "", "from 1 to 1125899906842624"},
		{"load checkout -n 0", cli.ExitUsage, "", "from 1 to 1125899906842624"},
		{"wait checkout --timeout -1s", cli.ExitUsage, "", "0 (no limit) or more"},
		{"load checkout -c 0", cli.ExitUsage, "", "1 to 10000"},
		{"load checkout -c 10001", cli.ExitUsage, "", "1 to 10000"},
		{"load checkout --rate fast", cli.ExitUsage, "", "500/s"},
		{"load checkout --duration 0s", cli.ExitUsage, "", "more than 0"},
		{"return checkout -n 3", cli.ExitOK, "returned: 3 tokens", ""},
		{"take-all checkout=2 checkout", cli.ExitOK,
			"taken: 2 tokens of checkout; 0 of 3 tokens left\ntaken: 1 token of checkout", ""},
		{"take-all checkout", exitDenied, "denied: 1 token of checkout; 0 of 3 tokens left; due in ", ""},
		{"take-all checkout typo", cli.ExitFailed, "", "Check the spelling"},
		{"take-all checkout=4", cli.ExitFailed, "", "no more than the capacity"},
		{"take-all", cli.ExitUsage, "", "no argument"},
		{"take-all checkout=", cli.ExitUsage, "", "after the last ="},
		{"take-all checkout=0", cli.ExitUsage, "", "from 1 to 1125899906842624"},
		{"return checkout -n 3", cli.ExitOK, "returned: 3 tokens", ""},
		{"take checkout -n 2 --request-id order-1", cli.ExitOK, "taken: 2 tokens; 1 of 3 tokens left", ""},
		{"take checkout -n 2 --request-id order-1", cli.ExitOK, "taken: 2 tokens; 1 of 3 tokens left", ""},
		{"take checkout -n 1 --request-id order-1", cli.ExitFailed, "", "Choose another id (--request-id)"},
		{"take checkout --request-id=", cli.ExitUsage, "", "it has 0 bytes; want 1 to 128"},
		{"take-all checkout --request-id order-2", cli.ExitOK, "taken: 1 token of checkout; 0 of 3 tokens left", ""},
		{"take-all checkout --request-id order-2", cli.ExitOK, "taken: 1 token of checkout; 0 of 3 tokens left", ""},
		{"return checkout -n 3", cli.ExitOK, "returned: 3 tokens", ""},
		{"reserve checkout -n 2 --ttl 1h --id job", cli.ExitOK, "as job; 1 of 3 tokens left", ""},
		{"reserve checkout -n 2 --ttl 1h --id job", cli.ExitOK, "reserved: 2 tokens until ", ""},
		{"reserve checkout -n 2 --ttl 1h", exitDenied, "denied: 1 of 3 tokens left; 2 tokens due in ", ""},
		{"reserve checkout -n 1 --ttl 1h --id job", cli.ExitFailed, "", "another id (--id)"},
		{"settle checkout job --used 1", cli.ExitOK, "settled: 1 returned, 2 left", ""},
		{"settle checkout job --used 0", cli.ExitOK, "already settled: 1 returned, 2 left", ""},
		{"reserve checkout --ttl 1h --id other --debt", cli.ExitOK, "as other", ""},
		{"cancel checkout other", cli.ExitOK, "settled: 1 returned, 2 left", ""},
		{"cancel checkout typo", cli.ExitFailed, "", "Check the id"},
		{"settle checkout job", cli.ExitUsage, "", "--used is missing"},
		{"settle checkout --used 1", cli.ExitUsage, "", "want consumer settle KEY ID"},
		{"settle checkout job --used -1", cli.ExitUsage, "", "from 0 to 1125899906842624"},
		{"reserve checkout", cli.ExitUsage, "", "want 1ms to 24h"},
		{"reserve checkout --ttl 1h --id=", cli.ExitUsage, "", "want 1 to 64"},
		{"reserve typo --ttl 1h", cli.ExitFailed, "", "Check the spelling"},
		{"take", cli.ExitUsage, "", "want consumer take KEY"},
		{"take a b", cli.ExitUsage, "", "want consumer take KEY"},
		{"take checkout -o yaml", cli.ExitUsage, "", "text or json"},
		{"take checkout --colour", cli.ExitUsage, "", "unknown flag"},
		{"take checkout --redis nowhere", cli.ExitUsage, "", "redis://host:port/db"},
		{"nonsense", cli.ExitUsage, "", "unknown command"},
		{"", cli.ExitUsage, "", "no command was given"},
	}
	for _, s := range steps {
		o := consumer(t.Context(), server.URL(), strings.Fields(s.args)...)
		require.Equal(t, s.code, o.code, "%s: %+v", s.args, o)
		require.Contains(t, o.stdout, s.stdout, s.args)
		require.Contains(t, o.stderr, s.stderr, s.args)
		failed := s.code == cli.ExitFailed || s.code == cli.ExitUsage
		require.Equal(t, failed, o.stderr != "", "stderr has text only after a failure: %s: %+v", s.args, o)
		require.Equal(t, failed, o.stdout == "", "%s: %+v", s.args, o)
	}
	keys, err := rdb.Keys(t.Context(), "*").Result()
	require.NoError(t, err)
	require.ElementsMatch(t, []string{"checkout", "{checkout}", "{checkout}:ctl", "{checkout}:outstanding",
		"{checkout}:due", "{checkout}:req:order-1", "{checkout}:req:order-2"}, keys, "no command created a bucket")
}

func TestJSONIsForScripts(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	o := consumer(t.Context(), server.URL(), "take", "checkout", "-n", "2", "-o", "json")
	require.Equal(t, map[string]any{"key": "checkout", "ok": true, "taken": 2.0, "remaining": 1.0, "limit": 3.0,
		"retry_after_ms": 0.0, "reset_after_ms": 7_200_000.0, "source": "shared"}, o.json(t))
	o = consumer(t.Context(), server.URL(), "take", "checkout", "-n", "2", "-o", "json")
	require.Equal(t, exitDenied, o.code)
	require.Equal(t, false, o.json(t)["ok"])
	require.InDelta(t, 3_600_000, o.json(t)["retry_after_ms"], 60_000)
	o = consumer(t.Context(), server.URL(), "wait", "checkout", "-o", "json")
	require.Equal(t, true, o.json(t)["ok"])
	require.Equal(t, 1.0, o.json(t)["taken"])
	o = consumer(t.Context(), server.URL(), "return", "checkout", "-o", "json")
	require.Equal(t, map[string]any{"key": "checkout", "tokens": 1.0}, o.json(t))

	o = consumer(t.Context(), server.URL(), "take-all", "checkout=3", "-o", "json")
	require.Equal(t, exitDenied, o.code)
	require.Equal(t, "checkout", o.json(t)["denied"])
	require.Len(t, o.json(t)["results"], 1)
	o = consumer(t.Context(), server.URL(), "reserve", "checkout", "--ttl", "1h", "-o", "json")
	require.Equal(t, true, o.json(t)["ok"])
	id := o.json(t)["id"].(string)
	o = consumer(t.Context(), server.URL(), "settle", "checkout", id, "--used", "0", "-o", "json")
	require.Equal(t, 1.0, o.json(t)["returned"])

	_, err := lua.Add(t.Context(), rdb, "foreign", 3, 10, 0)
	require.NoError(t, err)
	o = consumer(t.Context(), server.URL(), "peek", "foreign", "-o", "json")
	require.Equal(t, cli.ExitOK, o.code)
	require.Contains(t, o.json(t), "reset_after_ms")
	require.Nil(t, o.json(t)["reset_after_ms"], "a bucket without a policy has no reset time")
}

// The commands take from a budget while no refiller is alive. A wait ends at the next step.
func TestCommandsFindTheStepsOfABudget(t *testing.T) {
	server := testenv.Redis(t)
	set, err := policy.NewTemplates(1, []policy.Template{{Prefix: "b:",
		Policy: policy.Policy{Capacity: 10, Steps: policy.Every(2 * time.Second), StepTokens: 10}}}, nil)
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), server.Client(), set)
	require.NoError(t, err)
	require.Equal(t, cli.ExitOK, consumer(t.Context(), server.URL(), "take", "b:1", "-n", "10").code)
	for range 2 {
		o := consumer(t.Context(), server.URL(), "wait", "b:1", "-n", "10", "--timeout", "10s")
		require.Equal(t, cli.ExitOK, o.code, "%+v", o)
	}
	o := consumer(t.Context(), server.URL(), "reserve", "b:1", "-n", "4", "--ttl", "1m", "--id", "job", "-o", "json")
	for o.code == exitDenied { // until the next step
		o = consumer(t.Context(), server.URL(), "reserve", "b:1", "-n", "4", "--ttl", "1m", "--id", "job", "-o", "json")
	}
	require.Equal(t, cli.ExitOK, o.code, "%+v", o)
	o = consumer(t.Context(), server.URL(), "settle", "b:1", "job", "--used", "1")
	require.Equal(t, cli.ExitOK, o.code, "%+v", o)
}

func TestTheFlagBeatsTheEnvironment(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	gone := testenv.Redis(t)
	gone.Kill()
	require.Equal(t, cli.ExitOK, consumer(t.Context(), gone.URL(), "take", "checkout", "--redis", server.URL()).code)
	require.Equal(t, cli.ExitFailed, consumer(t.Context(), server.URL(), "take", "checkout", "--redis", gone.URL()).code)
}

func TestAnUnavailableServerIsAnErrorSoon(t *testing.T) {
	server, _ := newBucket(t, hourly(3))
	proxy := testenv.Proxy(t, server.Addr(), 0)
	url := "redis://" + proxy.Addr()
	commands := []string{"take checkout", "take-all checkout", "reserve checkout --ttl 1h", "settle checkout job --used 1",
		"peek checkout", "return checkout", "wait checkout", "load checkout --duration 1s"}
	for fault, begin := range map[string]func(){
		"silent":  func() { require.NoError(t, proxy.BlackHole(faultproxy.Both)) },
		"refused": proxy.Cut,
	} {
		require.NoError(t, proxy.Heal())
		begin()
		var wg sync.WaitGroup
		for _, args := range commands {
			wg.Go(func() {
				began := time.Now()
				o := consumer(t.Context(), url, strings.Fields(args)...)
				if o.code != cli.ExitFailed || !strings.Contains(o.stderr, "Check that Redis runs") {
					t.Errorf("%s: %s: %+v", fault, args, o)
				}
				if took := time.Since(began); took > 3*callDeadline {
					t.Errorf("%s: %s: took %s", fault, args, took)
				}
			})
		}
		wg.Wait()
	}
}

func TestAServerThatRefusesIsNotSearchedElsewhere(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	require.NoError(t, rdb.ConfigSet(t.Context(), "maxmemory", "1").Err())
	o := consumer(t.Context(), server.URL(), "take", "checkout")
	require.Equal(t, cli.ExitFailed, o.code)
	require.Contains(t, o.stderr, "Redis is running, but it refuses writes")
}

func TestAnInterruptEndsAWait(t *testing.T) {
	server, rdb := newBucket(t, hourly(3))
	require.NoError(t, rdb.Set(t.Context(), "checkout", 0, redis.KeepTTL).Err())
	require.NoError(t, rdb.ConfigResetStat(t.Context()).Err())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan outcome, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- consumer(ctx, server.URL(), "wait", "checkout") })
	require.Eventually(t, func() bool {
		info, err := rdb.Info(t.Context(), "commandstats").Result()
		return err == nil && strings.Contains(info, "cmdstat_eval") // the first attempt, which is denied
	}, 20*time.Second, time.Millisecond)
	cancel()
	o := <-ended
	wg.Wait()
	require.Equal(t, cli.ExitFailed, o.code)
	require.Contains(t, o.stderr, "interrupted")
}

func TestEveryKindOfAddressWorks(t *testing.T) {
	cluster := testenv.Cluster(t)
	terms := hourly(3).Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), cluster.Client(), "checkout",
		policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	o := consumer(t.Context(), cluster.URL(), "take", "checkout")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "2 of 3 tokens left")

	sentinel := testenv.Sentinel(t)
	_, err = lua.Refill(t.Context(), sentinel.Client(), "checkout",
		policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	o = consumer(t.Context(), "redis-sentinel://"+sentinel.Addr()+"/"+testenv.SentinelMaster, "take", "checkout")
	require.Equal(t, cli.ExitOK, o.code, o.stderr)
	require.Contains(t, o.stdout, "2 of 3 tokens left")
}

// An image that has only the programs has no database of time zones.
func TestTimeZonesAreInsideThePrograms(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"refiller", "consumer"} {
		deps, err := exec.Command("go", "list", "-deps", "-tags=production", "../"+program).Output()
		require.NoError(t, err)
		require.True(t, slices.Contains(strings.Fields(string(deps)), "time/tzdata"), program)
	}
}
