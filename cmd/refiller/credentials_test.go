package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

func testContext(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithCancel(t.Context())
}

// Every command that connects to Redis uses the same variables and flags, with and without a file.
func TestCommandsLogInWithoutAFile(t *testing.T) {
	certs := testenv.NewCerts(t)
	server := testenv.Redis(t, testenv.WithTLS(certs), testenv.WithPassword("hunter2"))
	rdb := server.Client()
	terms := policy.Policy{Capacity: 100, Rate: policy.PerSecond(10)}.Terms(policy.Fence{})
	_, err := lua.Refill(t.Context(), rdb, "checkout", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	require.NoError(t, err)
	password := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(password, []byte("hunter2\n"), 0o600))

	variables := fields.Environment{
		"REFILLER_REDIS_URL": "rediss://" + server.Addr(), "REFILLER_REDIS_PASSWORD": "hunter2",
		"REFILLER_REDIS_CA": certs.CAFile, "REFILLER_REDIS_CERT": certs.ClientCert, "REFILLER_REDIS_KEY": certs.ClientKey,
	}
	flags := []string{
		"--redis", "rediss://" + server.Addr(), "--redis-password-file", password,
		"--redis-ca", certs.CAFile, "--redis-cert", certs.ClientCert, "--redis-key", certs.ClientKey,
	}
	for _, args := range [][]string{
		{"grant", "checkout"}, {"reset", "checkout"}, {"doctor"}, {"limit", "list"},
	} {
		code, _, stderr := runWith(t, variables, args...)
		require.Zero(t, code, "%v: %s", args, stderr)
		code, _, stderr = runWith(t, nil, append(args, flags...)...)
		require.Zero(t, code, "%v: %s", args, stderr)
		code, stdout, stderr := runWith(t, nil, append(args, flags[:2]...)...)
		require.Equal(t, 1, code, "%v: no certificate", args)
		require.NotContains(t, stdout+stderr, "hunter2")
	}
	code, _, stderr := runWith(t, fields.Environment{"REFILLER_REDIS_CA": certs.CAFile}, "grant", "checkout")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "redis.tls: it can be set only with a rediss://")
}

func TestSmallThingsOfTheCommandLine(t *testing.T) {
	code, _, stderr := runWith(t, nil, "run")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "refiller: run: no configuration was given: want --config FILE\n")
	for _, bad := range []string{"a\nb", "a\x1b[31m", "a\xff", strings.Repeat("é", 129)} {
		code, _, stderr = runWith(t, nil, "run", "-c", "none.yaml", "--identity", bad)
		require.Equal(t, 2, code)
		require.Contains(t, stderr, "--identity \"")
		code, _, stderr = runWith(t, fields.Environment{"REFILLER_IDENTITY": bad}, "run", "-c", "none.yaml")
		require.Equal(t, 2, code)
		require.Contains(t, stderr, "want 1 to 128 printable characters")
		require.Contains(t, stderr, "REFILLER_IDENTITY \"")
	}
	for _, good := range []string{"", "refiller-7f9c6d5b8-x2x9z", "host.example/4711", strings.Repeat("é", 128)} {
		code, _, stderr = runWith(t, nil, "run", "-c", "none.yaml", "--identity", good)
		require.Equal(t, 1, code, "the identity is valid, and only the file is missing: %s", stderr)
	}
	for _, args := range [][]string{{"version"}, {"-version"}, {"--version"}} {
		code, stdout, _ := runWith(t, nil, args...)
		require.Zero(t, code)
		require.Contains(t, stdout, "refiller version ")
	}
	code, stdout, _ := runWith(t, nil, "config", "schema")
	require.Zero(t, code)
	require.Contains(t, stdout, `"title": "Configuration of a refiller"`)
	for command, says := range map[string]string{
		"chekc": `unknown command "chekc" for "refiller": did you mean check?`, "config shcema": "did you mean schema?",
		"config":       "no subcommand was given: want schema",
		"grant x -n 0": "want a whole number from 1 to 1125899906842624", "grant x -n 1.5": "want a whole number from 1",
		"reset x -n -1": "want a whole number from 0 to 1125899906842624", "reset x -n 9999999999999999": "number from 0",
		"limit set x --capacity=0": "want a whole number from 1 to 1125899906842624",
		"status --addr=":           "--addr \"\": want host:port",
		"status --addr=ftp://x":    "--addr \"ftp://x\": want host:port",
		"status --addr=://":        "--addr \"://\": want host:port",
		"limit sett":               "did you mean set or get?", "pool x": `unknown command "x" for "refiller pool"`,
	} {
		code, _, stderr = runWith(t, nil, strings.Fields(command)...)
		require.Equal(t, 2, code)
		require.Contains(t, stderr, says)
	}
	code, _, stderr = runWith(t, fields.Environment{"REFILLER_REDIS_URI": "redis://h"}, "grant", "checkout")
	require.Equal(t, 2, code)
	require.Contains(t, stderr, "did you mean REFILLER_REDIS_URL?")
}
