package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/doctor"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestDoctorPrintsItsFindingsAndTheLeastRights(t *testing.T) {
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	path := writeConfig(t, "redis: {url: \""+server.URL()+"\"}\nelection: {mode: etcd, endpoints: [\""+etcd.Endpoints()[0]+"\"]}\n"+strings.SplitN(goodConfig, "\n", 2)[1])
	code, stdout, stderr := runWith(t, nil, "doctor", "--config", path)
	require.Zero(t, code, stderr)
	for _, want := range []string{"redis answers", "etcd answers", "no replica leads yet", "→ set appendonly yes",
		"-@all +ping", "user consumer on"} {
		require.Contains(t, stdout, want)
	}

	code, stdout, _ = runWith(t, nil, "doctor", "--redis", "redis://127.0.0.1:1", "-o", "json")
	require.Equal(t, 1, code)
	var answer struct {
		OK       bool
		Findings []doctor.Finding
		ACL      map[string]string
	}
	require.NoError(t, json.Unmarshal([]byte(stdout), &answer))
	require.False(t, answer.OK)
	require.Equal(t, doctor.Failure, answer.Findings[0].Level)
	require.Contains(t, answer.ACL["refiller"], "user refiller on resetchannels ~* -@all +ping ")
	require.Contains(t, answer.ACL["consumer"], "user consumer on resetchannels ~* -@all +ping ")

	etcd.Members()[0].Kill()
	code, stdout, _ = runWith(t, nil, "doctor", "--config", path)
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "check election.endpoints")
}

func TestDoctorAsksInModeRaceForNoLeader(t *testing.T) {
	t.Parallel()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	path := writeConfig(t, strings.Replace(goodConfig, "redis://127.0.0.1:6379/0", server.URL(), 1)+
		"election: {endpoints: ["+etcd.Endpoints()[0]+"]}\n")
	code, stdout, stderr := runWith(t, nil, "doctor", "-c", path)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "mode race has no election")
}

// A user may have every right for the doctor's own bucket, and none for the buckets of the configuration.
func TestDoctorExaminesTheBucketsOfTheConfiguration(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := server.Client()
	require.NoError(t, rdb.Do(t.Context(), "acl", "setuser", "app", "on", ">secret", "+@all", "~refiller:*", "~{refiller:*",
		"~mine", "~{mine}*").Err())
	require.NoError(t, rdb.RPush(t.Context(), "mine", "a list").Err())
	doctor := func(buckets string) (code int, stdout string) {
		path := writeConfig(t, fmt.Sprintf("redis: {url: %q, username: app}\n%s", server.URL(), buckets))
		code, stdout, _ = runWith(t, map[string]string{"REFILLER_REDIS_PASSWORD": "secret"}, "doctor", "--config", path)
		return code, stdout
	}
	code, stdout := doctor("buckets: [{key: yours, capacity: 10, rate: 1/s}]\n" +
		"templates: [{prefix: \"user:\", capacity: 10, rate: 1/s}]\n")
	require.Equal(t, 1, code, stdout)
	require.Regexp(t, `failure +your buckets +"yours": .*NOPERM.*, and 1 more`, stdout)
	code, stdout = doctor("buckets: [{key: mine, capacity: 10, rate: 1/s}]\n")
	require.Equal(t, 1, code, stdout)
	require.Regexp(t, `failure +your buckets +"mine": .*malformed`, stdout)
	require.NoError(t, rdb.Del(t.Context(), "mine").Err())
	code, stdout = doctor("buckets: [{key: mine, capacity: 10, rate: 1/s}]\n")
	require.Zero(t, code, stdout)
	require.Regexp(t, `ok +your buckets +the user may access the keys of each bucket \(1 checked\)\n`, stdout)
}

// signalling sends a signal for each write.
type signalling struct {
	bytes.Buffer
	wrote chan string
}

func (s *signalling) Write(p []byte) (int, error) {
	s.wrote <- string(p)
	return len(p), nil
}

func TestStatusWatchesUntilInterrupted(t *testing.T) {
	calls := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls++
		if calls == 2 {
			http.Error(w, "away", http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte(
			`{"identity":"a","mode":"race","reload":{"result":"refused","problems":["f:1:1: no"]},"buckets":[]}`))
	}))
	defer server.Close()
	seen := watchTwice(t, "race: all replicas", "status", "--addr", server.URL, "--watch=100ms")
	require.Contains(t, seen, "503", "the watch shows an unavailable replica and asks again")
	require.Contains(t, seen, "f:1:1: no")
}

// watchTwice runs a command until it has shown what is wanted twice, interrupts it, and returns what it wrote.
func watchTwice(t *testing.T, want string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &signalling{wrote: make(chan string)}
	done := make(chan int, 1)
	go func() { done <- run(ctx, args, env{Stdin: strings.NewReader(""), Stdout: out, Stderr: out}) }()
	var seen strings.Builder
	for strings.Count(seen.String(), want) < 2 {
		select {
		case text := <-out.wrote:
			seen.WriteString(text)
		case <-time.After(time.Minute):
			require.Fail(t, "not shown twice", seen.String())
		}
	}
	cancel()
	for {
		select {
		case <-out.wrote:
			continue
		case code := <-done:
			require.Zero(t, code)
			return seen.String()
		}
	}
}

func TestHelpShowsCompletion(t *testing.T) {
	code, stdout, _ := runWith(t, nil, "--help")
	require.Zero(t, code)
	require.Contains(t, stdout, "completion")
	require.Contains(t, stdout, "doctor")
	code, stdout, _ = runWith(t, nil, "completion", "bash")
	require.Zero(t, code)
	require.Contains(t, stdout, "__start_refiller")
	code, _, stderr := runWith(t, nil, "status", "--watch=1ms")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "--watch 1ms: want 100ms or more")
}
