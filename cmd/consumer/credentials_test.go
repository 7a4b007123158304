package main

import (
	"bytes"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// inEnvironment runs the program with an environment.
func inEnvironment(t *testing.T, environ fields.Environment, args ...string) outcome {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), args, env{Environ: environ, Stdin: strings.NewReader(""), Stdout: &stdout, Stderr: &stderr})
	return outcome{code, stdout.String(), stderr.String()}
}

func TestConsumersLogInAsRefillersDo(t *testing.T) {
	t.Parallel()
	certs := testenv.NewCerts(t)
	server := testenv.Redis(t, testenv.WithTLS(certs), testenv.WithPassword("hunter2"))
	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10)}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), server.Client(), "checkout",
		policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	require.NoError(t, server.Client().Do(t.Context(), "acl", "setuser", "app", "on", ">secret", "~*", "+@all").Err())
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("secret\n"), 0o600))

	variables := fields.Environment{
		"REFILLER_REDIS_URL": "rediss://" + server.Addr(), "REFILLER_REDIS_PASSWORD": "hunter2",
		"REFILLER_REDIS_CA": certs.CAFile, "REFILLER_REDIS_CERT": certs.ClientCert, "REFILLER_REDIS_KEY": certs.ClientKey,
	}
	for _, args := range [][]string{{"take", "checkout"}, {"peek", "checkout"},
		{"load", "checkout", "--duration", "10ms"}} {
		o := inEnvironment(t, variables, args...)
		require.Zero(t, o.code, "%v: %s", args, o.stderr)
		o = inEnvironment(t, nil, append(args, "--redis", "rediss://"+server.Addr(), "--redis-username", "app",
			"--redis-password-file", password,
			"--redis-ca", certs.CAFile, "--redis-cert", certs.ClientCert, "--redis-key", certs.ClientKey)...)
		require.Zero(t, o.code, "%v: %s", args, o.stderr)
	}
	o := inEnvironment(t, fields.Environment{"REFILLER_REDIS_PASWORD": "hunter2"}, "take", "checkout")
	require.Equal(t, cli.ExitUsage, o.code)
	require.Contains(t, o.stderr, "did you mean REFILLER_REDIS_PASSWORD?")
	require.NotContains(t, o.stderr, "hunter2")
}

// Some errors prove that nothing ran. They must not be followed by the advice that something may have run.
func TestErrorsThatProveThatNothingRanSaySo(t *testing.T) {
	t.Parallel()
	server, secured := testenv.Redis(t, testenv.WithPassword("right")),
		testenv.Redis(t, testenv.WithTLS(testenv.NewCerts(t)))
	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10)}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), server.Client(), "checkout",
		policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	for user, rules := range map[string]string{
		"others": "~other:* +@all", "unscripted": "~* +@all -@scripting", "incapable": "~* +@all -hmget -hget",
	} {
		rule := []any{"acl", "setuser", user, "on", ">p"}
		for word := range strings.FieldsSeq(rules) {
			rule = append(rule, word)
		}
		require.NoError(t, server.Client().Do(t.Context(), rule...).Err())
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it accepts connections and never replies
	require.NoError(t, err)
	t.Cleanup(func() { _ = silent.Close() })

	address := "redis://" + server.Addr()
	for name, tc := range map[string]struct {
		environ fields.Environment
		says    string
		open    bool
	}{
		"refused":     {fields.Environment{"REFILLER_REDIS_URL": "redis://127.0.0.1:1"}, "connection refused", false},
		"no password": {fields.Environment{"REFILLER_REDIS_URL": address}, "unauthenticated", false},
		"wrong password": {fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_PASSWORD": "wrong"}, "WRONGPASS",
			false},
		"wrong user": {fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_USERNAME": "x",
			"REFILLER_REDIS_PASSWORD": "x"}, "WRONGPASS", false},
		"other keys": {fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_USERNAME": "others",
			"REFILLER_REDIS_PASSWORD": "p"}, "NOPERM", false},
		"no scripts": {fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_USERNAME": "unscripted",
			"REFILLER_REDIS_PASSWORD": "p"}, "NOPERM", false},
		"a script's own command": {
			fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_USERNAME": "incapable",
				"REFILLER_REDIS_PASSWORD": "p"}, "script", true,
		},
		"no authority": {fields.Environment{"REFILLER_REDIS_URL": "rediss://" + secured.Addr()}, "certificate", false},
		"no file": {fields.Environment{"REFILLER_REDIS_URL": address, "REFILLER_REDIS_PASSWORD_FILE": "/none"},
			"no such file", false},
		"silence": {fields.Environment{"REFILLER_REDIS_URL": "redis://" + silent.Addr().String()}, "deadline", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := inEnvironment(t, tc.environ, "take", "checkout", "-n", "101")
			require.Equal(t, cli.ExitFailed, o.code, o.stderr)
			require.Contains(t, o.stderr, tc.says)
			if tc.open {
				require.Contains(t, o.stderr, "may have taken effect")
			} else {
				require.NotContains(t, o.stderr, "may have taken effect")
			}
		})
	}
}

func TestServeReadsItsVariables(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		environ fields.Environment
		args    []string
		says    string
	}{
		"a duration": {fields.Environment{"REFILLER_SERVE_DEADLINE": "soon"}, nil, `REFILLER_SERVE_DEADLINE: "soon": `},
		"a range":    {fields.Environment{"REFILLER_SERVE_DEADLINE": "1h"}, nil, "--deadline 1h0m0s: want 1ms to"},
		"a file":     {fields.Environment{"REFILLER_SERVE_TLS_CERT": "c.pem"}, nil, "TLS needs both"},
		"a level":    {fields.Environment{"REFILLER_SERVE_LOG_LEVEL": "loud"}, nil, `"loud": want trace`},
		"no address": {fields.Environment{"REFILLER_SERVE_HTTP": "none", "REFILLER_SERVE_GRPC": "none"}, nil, "no address"},
		"flags count": {fields.Environment{"REFILLER_SERVE_HTTP": "none", "REFILLER_SERVE_LOG_LEVEL": "loud"},
			[]string{"--log-level", "off", "--grpc", "none"}, "no address"},
		"misspelled": {fields.Environment{"REFILLER_SERVE_HTP": ":1"}, nil,
			"REFILLER_SERVE_HTP: no program reads this variable: did you mean REFILLER_SERVE_HTTP?"},
	} {
		o := inEnvironment(t, tc.environ, append([]string{"serve"}, tc.args...)...)
		require.Equal(t, cli.ExitUsage, o.code, name)
		require.Contains(t, o.stderr, tc.says, name)
	}
}

func TestVersionNeedsNoServer(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"version"}, {"-version"}, {"--version"}} {
		o := inEnvironment(t, nil, args...)
		require.Zero(t, o.code)
		require.Contains(t, o.stdout, "consumer version ")
	}
}
