package main

import (
	"strings"
	"testing"

	"github.com/tokenrefill/refiller/internal/cli/clitest"
	"github.com/tokenrefill/refiller/internal/fields"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestAFileThatCannotBeReadIsAFailureAndAFlagThatThereIsNotIsUsage(t *testing.T) {
	servers := []string{
		"--redis-password-file FILE", "--redis=rediss://localhost:1 --redis-ca FILE",
		"--redis=rediss://localhost:1 --redis-cert FILE --redis-key FILE",
	}
	certs := testenv.NewCerts(t)
	clitest.ExitCodes(t, newRootCommand(env{}), map[string][]string{
		"take":     clitest.Each("k", servers),
		"take-all": clitest.Each("k=1", servers),
		"peek":     clitest.Each("k", servers),
		"return":   clitest.Each("k", servers),
		"wait":     clitest.Each("k", servers),
		"reserve":  clitest.Each("k", servers),
		"settle":   clitest.Each("k id --used=1", servers),
		"cancel":   clitest.Each("k id", servers),
		"serve": append([]string{
			"--limits FILE", "--envoy FILE", "--tls-cert FILE --tls-key FILE",
			"--tls-cert " + certs.CertFile + " --tls-key " + certs.KeyFile + " --tls-client-ca FILE",
		}, servers...),
		"check":   {"FILE", "GOOD FILE"},
		"load":    clitest.Each("k", servers),
		"replay":  {"FILE --capacity=1 --rate=1/s"},
		"version": nil,
	}, "domain: d\n", func(args []string) (int, string) {
		var errs strings.Builder
		return run(t.Context(), args, fields.Environment{}, strings.NewReader(""), &errs, &errs), errs.String()
	})
}
