package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

const goodConfig = `redis: {url: "redis://127.0.0.1:6379/0"}
buckets:
  - {key: a, capacity: 10, rate: 5/s}
`

// runWith runs the program with an environment and returns its exit code and output.
func runWith(t *testing.T, environ fields.Environment, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, env{Environ: environ, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &errs})
	return code, out.String(), errs.String()
}

func writeConfig(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestCheckSumsUpAGoodFile(t *testing.T) {
	path := writeConfig(t, goodConfig)
	code, stdout, stderr := runWith(t, nil, "check", path)
	require.Zero(t, code)
	require.Equal(t, path+": ok: 1 bucket on redis://127.0.0.1:6379, version 0, election mode race, refill interval 100ms\n", stdout)
	require.Empty(t, stderr)
}

func TestCheckReportsEveryProblemWithItsLine(t *testing.T) {
	path := writeConfig(t, "version: x\nlisten: y\n"+goodConfig)
	code, stdout, stderr := runWith(t, nil, "check", path)
	require.Equal(t, 2, code)
	require.Empty(t, stdout)
	require.Contains(t, stderr, path+`:1:10: version: "x" is not a whole number`)
	require.Contains(t, stderr, path+`:2:9: listen: "y"`)
}

func TestCheckAnswersInJSON(t *testing.T) {
	var answer checked
	code, stdout, _ := runWith(t, nil, "check", "-o", "json", writeConfig(t, goodConfig))
	require.Zero(t, code)
	require.NoError(t, json.Unmarshal([]byte(stdout), &answer))
	require.True(t, answer.OK)
	require.Contains(t, answer.Summary, "1 bucket")
	require.Contains(t, stdout, `"problems": []`)

	code, stdout, _ = runWith(t, map[string]string{"REFILLER_LISTEN": "y"}, "check", "-o", "json",
		writeConfig(t, "version: x\n"+goodConfig))
	require.Equal(t, 2, code)
	answer = checked{}
	require.NoError(t, json.Unmarshal([]byte(stdout), &answer))
	require.False(t, answer.OK)
	require.Len(t, answer.Problems, 2)
	require.Equal(t, "REFILLER_LISTEN", answer.Problems[0].Source)
	require.Equal(t, 1, answer.Problems[1].Line)
	require.Equal(t, 10, answer.Problems[1].Column)
	require.Equal(t, "version", answer.Problems[1].Field)
}

func TestCheckReadsTheEnvironment(t *testing.T) {
	code, stdout, _ := runWith(t, map[string]string{"REFILLER_REDIS_URL": "redis://u:hunter2@other"}, "check",
		writeConfig(t, goodConfig))
	require.Zero(t, code)
	require.Contains(t, stdout, "redis://u:xxxxx@other:6379")
}

func TestCheckReadsStdin(t *testing.T) {
	var out, errs bytes.Buffer
	require.Zero(t, run(t.Context(), []string{"check", "-"},
		env{Stdin: strings.NewReader(goodConfig), Stdout: &out, Stderr: &errs}))
	require.Contains(t, out.String(), "stdin: ok: 1 bucket on ")
	require.Equal(t, 2, run(t.Context(), []string{"check", "-"},
		env{Stdin: strings.NewReader("\tversion: 1\n"), Stdout: &out, Stderr: &errs}))
	require.Equal(t, "stdin:1:1: not YAML: there is a tab: indent with spaces\n", errs.String())
}

func TestBadUsageExitsWithTwoAndAMessage(t *testing.T) {
	for name, args := range map[string][]string{
		"no command":      {},
		"unknown command": {"nonsense"},
		"unknown flag":    {"check", "--nonsense", "f"},
		"no file":         {"check"},
		"two files":       {"check", "a", "b"},
		"output":          {"check", "-o", "xml", writeConfig(t, goodConfig)},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := runWith(t, nil, args...)
			require.Equal(t, 2, code)
			require.Empty(t, stdout)
			require.Contains(t, stderr, "refiller: ")
		})
	}
}

func TestVersionAndHelpNeedNoServer(t *testing.T) {
	code, stdout, _ := runWith(t, nil, "--version")
	require.Zero(t, code)
	require.Contains(t, stdout, "refiller version ")
	code, stdout, _ = runWith(t, nil, "--help")
	require.Zero(t, code)
	require.Contains(t, stdout, "check")
}

func TestCheckLaysASharedDocumentOverTheFile(t *testing.T) {
	path := writeConfig(t, "version: 3\n"+goodConfig)
	shared := filepath.Join(t.TempDir(), "shared.yaml")
	check := func(text string) (code int, stdout, stderr string) {
		require.NoError(t, os.WriteFile(shared, []byte(text), 0o600))
		return runWith(t, nil, "check", "--shared", shared, path)
	}
	code, stdout, _ := check(
		"version: 4\nbuckets: [{key: b, capacity: 10, rate: 5/s}, {key: c, capacity: 10, rate: 5/s}]\n")
	require.Zero(t, code)
	require.Contains(t, stdout, "ok: 2 buckets on redis://127.0.0.1:6379, version 4")
	code, _, stderr := check("version: 4\nbuckets: [{key: b, capacity: 10, rate: never}]\nlisten: :1\n")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, shared+":3:1: listen: unknown field: allowed are version")
}

func TestASharedConfigWantsAnEtcd(t *testing.T) {
	code, _, stderr := runWith(t, nil, "run", "--config-etcd", "--config", writeConfig(t, goodConfig))
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "--config-etcd requires election.endpoints")
}

func TestWrongNumbersOfArgumentsNameThoseThatAreWanted(t *testing.T) {
	for _, args := range [][]string{{"check"}, {"check", "a", "b"}, {"diff"}, {"grant"}, {"status", "x", "y"}} {
		var out bytes.Buffer
		require.Equal(t, cli.ExitUsage, run(t.Context(), args, env{Stdout: &out, Stderr: &out}))
		require.Contains(t, out.String(), "want refiller "+args[0])
	}
}

// In values of the chart, problems have their lines in the file of values. extraEnv replaces the program's environment.
func TestCheckReadsValuesOfTheChart(t *testing.T) {
	values := `replicas: 2
extraEnv:
  - {name: REFILLER_REDIS_URL, value: 'redis://cache:6380'}
  - {name: REFILLER_REDIS_PASSWORD, valueFrom: {secretKeyRef: {name: redis, key: password}}}
config:
  version: 3
  buckets:
    - {key: a, capacity: 10, rate: 5/s}
`
	path := writeConfig(t, values)
	environ := fields.Environment{"REFILLER_LISTEN": "wrong"}
	code, stdout, stderr := runWith(t, environ, "check", "--helm-values", path)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, path+": ok: 1 bucket on redis://cache:6380, version 3, ")

	for change, want := range map[[2]string]string{
		{"capacity: 10", "capacity: -1"}:                              `:8:26: buckets[0].capacity: -1 is not a whole number`,
		{"config:\n", "other:\n"}:                                     "there is no bucket to refill",
		{"replicas: 2", "existingConfigMap: mine"}:                    "the configuration is in the ConfigMap mine",
		{"replicas: 2", "versionFrom: git"}:                           `versionFrom: "git"; want config or release`,
		{"name: REFILLER_REDIS_URL, ", ""}:                            "extraEnv[0]: name is missing",
		{"redis://cache", "cache"}:                                    "REFILLER_REDIS_URL",
		{"  buckets:\n    - {key: a, capacity: 10, rate: 5/s}\n", ""}: "buckets",
	} {
		path := writeConfig(t, strings.Replace(values, change[0], change[1], 1))
		code, _, stderr := runWith(t, nil, "check", "--helm-values", path)
		require.NotZero(t, code, change)
		require.Contains(t, stderr, want, change)
	}
	path = writeConfig(t, "versionFrom: release\n"+values)
	code, _, _ = runWith(t, nil, "check", "--helm-values", path)
	require.Zero(t, code)
	code, _, stderr = runWith(t, nil, "check", "--helm-values", "--against-redis", path)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "only the Helm release knows the version")
}
