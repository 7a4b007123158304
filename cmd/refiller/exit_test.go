package main

import (
	"strings"
	"testing"

	"github.com/tokenrefill/refiller/internal/cli/clitest"
	"github.com/tokenrefill/refiller/internal/fields"
)

func TestAFileThatCannotBeReadIsAFailureAndAFlagThatThereIsNotIsUsage(t *testing.T) {
	servers := []string{
		"--redis-password-file FILE", "--redis=rediss://localhost:1 --redis-ca FILE",
		"--redis=rediss://localhost:1 --redis-cert FILE --redis-key FILE",
	}
	config := append([]string{"-c FILE"}, servers...)
	etcd := []string{
		"-c FILE", "--etcd=localhost:1 --etcd-username=u --etcd-password-file FILE",
		"--etcd=https://localhost:1 --etcd-ca FILE",
	}
	clitest.ExitCodes(t, rootCommand(env{}), map[string][]string{
		"run":           {"-c FILE"},
		"check":         {"FILE", "--shared FILE GOOD"},
		"diff":          {"FILE", "--shared FILE GOOD", "GOOD --redis-password-file FILE"},
		"config schema": nil,
		"status":        nil,
		"grant":         clitest.Each("k", config),
		"reset":         clitest.Each("k", config),
		"limit set":     clitest.Each("k --capacity=1", config),
		"limit get":     clitest.Each("k", config),
		"limit list":    config,
		"limit unset":   clitest.Each("k", config),
		"pool status":   etcd,
		"pool plan":     {"FILE"},
		"pool fence":    clitest.Each("eu --yes", etcd),
		"pool lift":     clitest.Each("eu", etcd),
		"doctor":        config,
		"dev":           nil,
		"version":       nil,
	}, goodConfig, func(args []string) (int, string) {
		var errs strings.Builder
		return run(t.Context(), args, fields.Environment{}, strings.NewReader(""), &errs, &errs), errs.String()
	})
}
