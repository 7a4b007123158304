package doctor_test

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/doctor"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is the longest time that a test waits for an event. It is long because the machine may be busy.
const patience = 20 * time.Second

// anyKey has the names of a deployment whose buckets are not known.
var anyKey = doctor.Names{Any: true}

func find(t *testing.T, findings []doctor.Finding, check string) doctor.Finding {
	t.Helper()
	i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == check })
	require.GreaterOrEqual(t, i, 0, "%s in %+v", check, findings)
	return findings[i]
}

func TestTheDoctorFindsWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		args           []string
		check          string
		level          doctor.Level
		detail, advice string
	}{
		"healthy": {[]string{"--appendonly", "yes"}, "durability", doctor.OK, "append-only file on", ""},
		"forgets": {nil, "durability", doctor.Warning, "append-only file off", "appendonly yes"},
		"evicts": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"}, "eviction", doctor.Failure,
			"allkeys-lru", "noeviction"},
		"expires": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl"}, "eviction", doctor.Warning,
			"volatile-ttl", "buckets of templates"},
		"keeps": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "noeviction"}, "eviction", doctor.OK,
			"noeviction", ""},
		"version": {nil, "version", doctor.OK, "Redis", ""},
		"bounded": {nil, "INCREX", doctor.OK, "no INCREX", ""},
		"clock":   {nil, "clock", doctor.OK, "from this machine's", ""},
		"scripts": {nil, "scripts and rights", doctor.OK, "", ""},
		"read-only": {[]string{"--replicaof", "127.0.0.1 1"}, "durability", doctor.Failure, "is a replica",
			"primary"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t, testenv.WithArgs(c.args...)).Client()
			f := find(t, doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey), c.check)
			require.Equal(t, c.level, f.Level, "%+v", f)
			require.Contains(t, f.Detail, c.detail)
			require.Contains(t, f.Advice, c.advice)
			require.Zero(t, rdb.DBSize(t.Context()).Val(), "the doctor leaves no keys")
		})
	}
}

func TestTheDoctorListsMissingRights(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := user(t, server, doctor.Rights{Keys: []string{"*"}, Commands: []string{"ping", "time"}})
	f := find(t, doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey), "scripts and rights")
	require.Equal(t, doctor.Failure, f.Level)
	require.Contains(t, f.Advice, "+evalsha")
}

func TestTheDoctorExaminesAClusterAndLeavesNothing(t *testing.T) {
	t.Parallel()
	rdb := testenv.Cluster(t).Client()
	for _, f := range doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey) {
		require.NotEqual(t, doctor.Failure, f.Level, "%+v", f)
	}
	require.Zero(t, rdb.DBSize(t.Context()).Val())
}

func TestTheDoctorWantsReplicasToHaveWritten(t *testing.T) {
	t.Parallel()
	primary := testenv.Redis(t)
	host, port, err := net.SplitHostPort(primary.Addr())
	require.NoError(t, err)
	testenv.Redis(t, testenv.WithArgs("--replicaof", host+" "+port))
	rdb := primary.Client()
	found := func() doctor.Finding {
		return find(t, doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey), "durability")
	}
	require.Eventually(t, func() bool { return strings.HasPrefix(found().Detail, "1 replicas") }, 20*time.Second,
		50*time.Millisecond)
	require.Equal(t, doctor.Warning, found().Level)
	require.Contains(t, found().Advice, "min-replicas-to-write 1")
	require.NoError(t, rdb.ConfigSet(t.Context(), "min-replicas-to-write", "1").Err())
	require.Equal(t, doctor.OK, found().Level)
}

// A server that can't save refuses even PING. Its address and password are right.
func TestTheDoctorDistinguishesRefusalFromSilence(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rdb := testenv.Redis(t, testenv.WithArgs("--dir", dir, "--save", "3600 1")).Client()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "dump.rdb"), 0o700)) // a directory in the place of the file
	require.NoError(t, rdb.Set(t.Context(), "a", 1, 0).Err())
	require.NoError(t, rdb.BgSave(t.Context()).Err())
	require.Eventually(t, func() bool {
		return strings.Contains(rdb.Info(t.Context(), "persistence").Val(), "rdb_last_bgsave_status:err")
	}, patience, 10*time.Millisecond)
	f := find(t, doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey), "redis answers")
	require.Equal(t, doctor.Failure, f.Level)
	require.Contains(t, f.Detail, "MISCONF")
	require.Contains(t, f.Advice, "its log")
}

func TestTheDoctorSaysThatNothingAnswers(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer rdb.Close()
	findings := doctor.Redis(t.Context(), rdb, doctor.Refiller, anyKey)
	require.Len(t, findings, 1)
	require.Equal(t, doctor.Failure, findings[0].Level)
	require.Contains(t, findings[0].Advice, "redis.url")
}
