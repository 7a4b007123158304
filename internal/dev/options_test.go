package dev

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
)

func TestBadOptionsNameTheFlag(t *testing.T) {
	t.Parallel()
	good := func() Options { return Options{Program: "refiller", Out: &bytes.Buffer{}, Mode: config.ModeEtcd} }
	require.NoError(t, good().Validate())
	for flag, change := range map[string]func(*Options){
		"--kill-leader-every": func(o *Options) { o.KillEvery = MinKillEvery - 1 },
		"--duration":          func(o *Options) { o.Duration = -1 },
		"--redis":             func(o *Options) { o.Redis = "http://x" },
		"--etcd":              func(o *Options) { o.Etcd = []string{"127.0.0.1:2379", "ftp://x"} },
		"--mode":              func(o *Options) { o.Mode, o.Etcd = config.ModeRace, []string{"127.0.0.1:2379"} },
		"--flows":             func(o *Options) { o.Flows, o.Regions = true, []string{"eu", "us"} },
		"Program":             func(o *Options) { o.Program = "" },
		"Out":                 func(o *Options) { o.Out = nil },
	} {
		o := good()
		change(&o)
		err := o.Validate()
		require.ErrorIs(t, err, ErrOptions, flag)
		require.ErrorContains(t, err, flag)
	}
}

func TestSamplesMakeAValidConfigurationInEveryMode(t *testing.T) {
	t.Parallel()
	for _, o := range []Options{
		{Redis: "redis://:a%22b'c@127.0.0.1:1/3", Mode: config.ModeRace},
		{Redis: "rediss-cluster://a:1,b:2", Mode: config.ModeEtcd, Etcd: []string{"http://a:1", "b:2"}},
	} {
		cfg, err := o.config("", o.Redis, o.Etcd, nil)
		require.NoError(t, err)
		require.Equal(t, o.Mode, cfg.Election.Mode)
		require.Equal(t, watched, cfg.Buckets[0].Key)
		for _, d := range sampleDemands {
			i := 0
			for i < len(cfg.Buckets) && cfg.Buckets[i].Key != d.key {
				i++
			}
			require.Less(t, i, len(cfg.Buckets), "each demand has a sample bucket")
			if d.key == watched {
				require.Greater(t, 60*d.wanted(), float64(cfg.Buckets[i].Policy.Rate.Over(time.Minute)),
					"the consumer asks for more than the bucket's rate")
			}
		}
	}
}

func TestTheEnvironmentDoesNotOverrideThePlayground(t *testing.T) {
	t.Parallel()
	all := []string{
		"PATH=/bin", "REFILLER_REDIS_URL=redis://elsewhere", "REFILLER_REDIS_PASSWORD=a", "REFILLER_ETCD_ENDPOINTS=elsewhere",
		"REFILLER_ETCD_PASSWORD=b", "REFILLER_LISTEN=:1", "REFILLER_ELECTION_MODE=race", "REFILLER_IDENTITY=x",
		"REFILLER_LOG_LEVEL=off",
	}
	require.Equal(t, []string{"PATH=/bin"}, environ(all, false, false), "embedded servers need no credentials")
	require.Equal(t, []string{"PATH=/bin", "REFILLER_REDIS_PASSWORD=a"}, environ(all, true, false))
	require.Equal(t, []string{"PATH=/bin", "REFILLER_ETCD_PASSWORD=b"}, environ(all, false, true))
}

func TestTheLogIsKeptAndItsWarningsAreReported(t *testing.T) {
	t.Parallel()
	f, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	defer f.Close()
	var warned []string
	const log = "2026-01-02T03:04:05.678Z [INFO]  refiller: replica starts\n" +
		"2026-01-02T03:04:05.678Z [WARN]  refiller.election: etcd unavailable: error=\"x\"\n" +
		"2026-01-02T03:04:05.678Z [ERROR] refiller.refill: bucket can't be refilled\n"
	copyLog(f, iotest.OneByteReader(strings.NewReader(log)), func(m string) { warned = append(warned, m) })
	require.Equal(t, []string{`warn: election: etcd unavailable: error="x"`, "error: refill: bucket can't be refilled"},
		warned)
	kept, err := os.ReadFile(f.Name())
	require.NoError(t, err)
	require.Equal(t, log, string(kept))
	require.Contains(t, tail(f.Name()), "replica starts")
}
