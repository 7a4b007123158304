package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/testing/clitest"
)

func TestUnreadableFilesExitWith1AndWrongUsageExitsWith2(t *testing.T) {
	servers := []string{
		"--redis-password-file FILE", "--redis=rediss://localhost:1 --redis-ca FILE",
		"--redis=rediss://localhost:1 --redis-cert FILE --redis-key FILE",
	}
	config := append([]string{"-c FILE"}, servers...)
	etcd := []string{
		"-c FILE", "--etcd=localhost:1 --etcd-username=u --etcd-password-file FILE",
		"--etcd=https://localhost:1 --etcd-ca FILE",
	}
	run := func(args []string) (int, string) {
		var errs strings.Builder
		return run(t.Context(), args,
			env{Environ: fields.Environment{}, Stdin: strings.NewReader(""), Stdout: &errs, Stderr: &errs}), errs.String()
	}
	const duration = ": want a duration, such as 500ms, 10s or 5m"
	const address = ": want host:port, http://host:port or https://host:port"
	clitest.WrongInput(t, map[string]string{
		"status --addr foo":                                   `--addr "foo"` + address,
		"status --addr :9090x":                                `--addr ":9090x"` + address,
		"status --addr ftp://foo":                             `--addr "ftp://foo"` + address,
		"pool status --history --addr foo --etcd 127.0.0.1:1": `--addr "foo"` + address,
		"status --watch 5s":                                   "--watch 5s: want --watch=5s",
		"status --watch=5":                                    `--watch "5"` + duration,
		"dev --kill-leader-every 5":                           `--kill-leader-every "5"` + duration,
		"dev --regions eu,us --cut us --cut-after soon":       `--cut-after "soon"` + duration,
		"pool fence us --drain --wait 5 --etcd 127.0.0.1:1":   `--wait "5"` + duration,
		"run --config-etcd=maybe":                             `--config-etcd "maybe": want true or false`,
		"grant":                                               "no argument: want refiller grant KEY -n TOKENS",
		"grant a b":                                           `arguments "a" "b": want refiller grant KEY`,
		"grant k -n 1.5":                                      `--tokens "1.5": want a whole number from 1 to`,
		"version now":                                         `arguments "now": want refiller version`,
	}, run)
	clitest.ExitCodes(t, rootCommand(env{}), map[string][]string{
		"run":           {"-c FILE"},
		"check":         {"FILE", "--shared FILE GOOD"},
		"bump":          {"FILE"},
		"delete":        clitest.Each("k", config),
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
		"man":           nil,
		"version":       nil,
	}, goodConfig, run)
}

// Each command has a manual page.
func TestManualPagesAreWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "share", "man1")
	code, _, stderr := runWith(t, nil, "man", dir)
	require.Zero(t, code, stderr)
	for _, name := range []string{"refiller", "refiller-run", "refiller-pool-fence"} {
		page, err := os.ReadFile(filepath.Join(dir, name+".1"))
		require.NoError(t, err)
		require.Contains(t, string(page), `.TH "`+strings.ToUpper(name)+`" "1"`)
	}
	page, err := os.ReadFile(filepath.Join(dir, "refiller-check.1"))
	require.NoError(t, err)
	require.Contains(t, string(page), "helm-values")
	code, _, stderr = runWith(t, nil, "man", os.DevNull)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "manual pages: ")
}
