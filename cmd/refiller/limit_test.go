package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func TestLimitSetsGetsListsAndUnsets(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\nversion: 7\ntemplates:\n  - {prefix: \"user:\", enforce: lazy, capacity: 60, rate: 1/h}\n")
	cfg, err := config.Load(config.Source{Path: path})
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), server.Client(), cfg.Templates)
	require.NoError(t, err)
	limit := func(want int, args ...string) (stdout, stderr string) {
		t.Helper()
		code, stdout, stderr := runWith(t, nil, append([]string{"limit"}, append(args, "-c", path)...)...)
		require.Equal(t, want, code, stdout+stderr)
		return stdout, stderr
	}
	_, err = lua.LazyTake(t.Context(), server.Client(), "user:42", &cfg.Templates.Of("user:42").Terms,
		[]policy.Run{{N: 50, Count: 1}}, false)
	require.NoError(t, err)

	out, _ := limit(0, "get", "user:42")
	require.Equal(t, "user:42: capacity 60, rate 1/h, set by the template \"user:\"\n", out)
	out, log := limit(0, "set", "user:42", "--capacity", "600", "--rate", "10/h", "--reason", "larger plan")
	require.Equal(t, "user:42: capacity 600, rate 10/h, set by an override; its bucket holds 10 tokens\n", out)
	for _, logged := range []string{"refiller.audit", `action="limit set"`, "bucket=user:42", "capacity=600", "rate=10/h",
		`reason="larger plan"`, "had-override=false", "operator="} {
		require.Contains(t, log, logged)
	}
	out, _ = limit(0, "set", "user:7", "--rate", "2/h", "-o", "json")
	require.JSONEq(t, `{"key":"user:7","template":"user:","enforce":"lazy","override":true,"capacity":60,"rate":"2/h","had_override":false,"exists":false}`, out)
	out, _ = limit(0, "list")
	require.Equal(t, "KEY      CAPACITY  RATE  TEMPLATE\n"+
		"user:42       600  10/h  \"user:\"\n"+
		"user:7         60   2/h  \"user:\"\n", out)
	out, _ = limit(0, "list", "--prefix", "user:4", "-o", "json")
	var answer limitAnswer
	require.NoError(t, json.Unmarshal([]byte(out), &answer))
	require.Equal(t, limitAnswer{Key: "user:42", Template: "user:", Enforce: "lazy", Override: true, Capacity: 600,
		Rate: "10/h"}, answer)
	out, log = limit(0, "unset", "user:42")
	require.Equal(t, "user:42: capacity 60, rate 1/h, set by the template \"user:\"; its bucket holds 10 tokens\n", out)
	require.Contains(t, log, "had-override=true")
	limit(0, "unset", "user:7")
	out, _ = limit(0, "list", "-o", "json")
	require.Empty(t, out)

	_, log = limit(1, "set", "order:1", "--capacity", "5")
	require.Contains(t, log, "operator action failed")
	require.Contains(t, log, `no published template matches "order:1"`)
	limit(1, "get", "order:1")
	for _, bad := range [][]string{
		{}, {"nonsense"}, {"set", "user:1"}, {"set", "user:1", "--capacity", "0"}, {"set", "user:1", "--rate", "5"},
		{"set", "user:}", "--capacity", "5"},
		{"get"}, {"get", "a}"}, {"list", "-o", "xml"}, {"list", "x"}, {"unset"},
	} {
		limit(2, bad...)
	}
}

// In version 6, the file had user:1 as a bucket. In version 7, it has only a template that matches user:1. The policy
// of version 6 is still in force.
func TestLimitReportsABucketThatLeftTheFile(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\nversion: 7\n"+
		"templates: [{prefix: \"user:\", capacity: 60, rate: 1/s}]\n")
	cfg, err := config.Load(config.Source{Path: path})
	require.NoError(t, err)
	_, err = lua.PublishTemplates(t.Context(), server.Client(), cfg.Templates)
	require.NoError(t, err)
	terms := policy.Policy{Capacity: 600, Rate: policy.PerSecond(100)}.Terms(policy.Fence{Epoch: 6})
	_, err = lua.Refill(t.Context(), server.Client(), "user:1", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	const says = "user:1: capacity 600, rate 100/s, set by a configured bucket or pool, whose limit stays in force " +
		"until the bucket's keys are deleted"
	for verb, want := range map[string]string{"get": says + "\n", "unset": says + "; its bucket holds 600 tokens\n"} {
		code, stdout, stderr := runWith(t, nil, "limit", verb, "user:1", "-c", path)
		require.Zero(t, code, stderr)
		require.Equal(t, want, stdout)
	}
	code, stdout, stderr := runWith(t, nil, "limit", "get", "user:1", "-o", "json", "-c", path)
	require.Zero(t, code, stderr)
	require.JSONEq(t, `{"key":"user:1","template":"user:","enforce":"refilled","override":false,"own_bucket":true,
		"capacity":600,"rate":"100/s"}`, stdout)
}

func TestCheckShowsTemplates(t *testing.T) {
	t.Parallel()
	path := writeConfig(t, goodConfig+"templates: [{prefix: \"user:\", enforce: lazy, capacity: 60, rate: 1/s}]\n")
	code, stdout, stderr := runWith(t, nil, "check", path)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "1 bucket and 1 template on redis://")
	require.Contains(t, stdout, "\n  template \"user:\": capacity 60, rate 1/s, lazy\n")
}

// A template's bucket that is full leaves the active set, so no replica refills it. A reset to fewer tokens puts it
// back into the set.
func TestAResetBucketOfATemplateIsRefilled(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb, ctx := server.Client(), t.Context()
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\n"+
		"templates: [{prefix: \"user:\", capacity: 60, rate: 1/s}]\n")
	cfg, err := config.Load(config.Source{Path: path})
	require.NoError(t, err)
	_, err = lua.PublishTemplates(ctx, rdb, cfg.Templates)
	require.NoError(t, err)
	call := lua.Takes{Key: "user:42", Whole: true, Template: lua.NewTemplate(cfg.Templates.Of("user:42"), false)}
	_, err = new(lua.TakesCall).Do(ctx, rdb, []lua.Takes{call})
	require.NoError(t, err)
	set := lua.ActiveKey("user:", lua.ActiveShard("user:42"))
	require.NoError(t, rdb.Del(ctx, set).Err())
	code, stdout, stderr := runWith(t, nil, "reset", "user:42", "-n", "10", "-c", path)
	require.Zero(t, code, stdout+stderr)
	require.True(t, rdb.SIsMember(ctx, set, "user:42").Val())
	require.Contains(t, stderr, "tokens=10 ")

	// Without -n, the only number of tokens in the audit line is the number that the bucket holds.
	code, stdout, stderr = runWith(t, nil, "reset", "user:42", "-c", path)
	require.Zero(t, code, stdout+stderr)
	require.NotContains(t, stderr, "tokens=")
	require.Contains(t, stderr, "held=60 ")

	// This user of Redis may not change the active set. So the bucket is reset, and then the command fails.
	require.NoError(t, rdb.Do(ctx, "acl", "setuser", "support", "on", ">secret", "+@all", "~user:42", "~{user:42}*",
		"~"+lua.TemplatesKey).Err())
	code, stdout, stderr = runWith(t, fields.Environment{"REFILLER_REDIS_PASSWORD": "secret"},
		"reset", "user:42", "-n", "20", "-c", path, "--redis-username", "support")
	require.Equal(t, 1, code, stdout+stderr)
	require.Contains(t, stderr, "operator action failed")
	require.Contains(t, stderr, "tokens=20 held=20 ")
	require.Contains(t, stderr, "the bucket holds 20 tokens now, but it may not be refilled before its next take: ")
}
