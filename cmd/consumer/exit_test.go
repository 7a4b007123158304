package main

import (
	"strings"
	"testing"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/clitest"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestUnreadableFilesExitWith1AndWrongUsageExitsWith2(t *testing.T) {
	servers := []string{
		"--redis-password-file FILE", "--redis=rediss://localhost:1 --redis-ca FILE",
		"--redis=rediss://localhost:1 --redis-cert FILE --redis-key FILE",
	}
	certs := testenv.NewCerts(t)
	run := func(args []string) (int, string) {
		var errs strings.Builder
		return run(t.Context(), args,
			env{Environ: fields.Environment{}, Stdin: strings.NewReader(""), Stdout: &errs, Stderr: &errs}), errs.String()
	}
	const duration = ": want a duration, such as 500ms, 10s or 5m"
	clitest.WrongInput(t, map[string]string{
		"take":                   "no argument: want consumer take KEY",
		"take-all":               "no argument: want consumer take-all KEY[=N]...",
		"settle k --used 1":      `arguments "k": want consumer settle KEY ID --used N`,
		"serve here":             `arguments "here": want consumer serve`,
		"check":                  "no argument: want consumer check FILE...",
		"replay":                 "no argument: want consumer replay LOG|- --capacity C --rate R",
		"wait k --timeout 5":     `--timeout "5"` + duration,
		"serve --deadline 5":     `--deadline "5"` + duration,
		"serve --client-calls x": `--client-calls "x": want a whole number`,
		"load k --progress=x":    `--progress "x": want true or false`,
		"reserve k":              "--ttl 0s: want 1ms to 24h",
		"reserve k --ttl 25h":    "--ttl 25h0m0s: want 1ms to 24h",
		"replay x --capacity 1 --rate 1/s --top no": `--top "no": want a whole number from 0 to 10000`,
		"replay x --capacity 1":                     "--rate is missing (refill rate of each bucket, such as 500/s",
	}, run)
	clitest.ExitCodes(t, newRootCommand(env{}), map[string][]string{
		"take":     clitest.Each("k", servers),
		"take-all": clitest.Each("k=1", servers),
		"peek":     clitest.Each("k", servers),
		"return":   clitest.Each("k", servers),
		"wait":     clitest.Each("k", servers),
		"reserve":  clitest.Each("k --ttl 1m", servers),
		"settle":   clitest.Each("k id --used=1", servers),
		"cancel":   clitest.Each("k id", servers),
		"serve": append([]string{
			"--limits FILE", "--envoy FILE", "--tls-cert FILE --tls-key FILE",
			"--tls-cert " + certs.CertFile + " --tls-key " + certs.KeyFile + " --tls-client-ca FILE",
		}, servers...),
		"check":   {"FILE", "GOOD FILE"},
		"load":    clitest.Each("k", servers),
		"replay":  {"FILE --capacity=1 --rate=1/s"},
		"man":     nil,
		"version": nil,
	}, "domain: d\n", run)
}
