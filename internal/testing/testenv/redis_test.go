package testenv

import (
	"context"
	"net"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestMissingServerFailsTheTestWithAdvice(t *testing.T) {
	t.Setenv("REDIS_SERVER", "/no/such/redis-server")
	r := newRecorder(t, "missing")
	output := r.run(func() { Redis(r) })
	require.True(t, r.Failed())
	require.Contains(t, output, "install redis-server")
}

func TestServerThatRefusesItsArgumentsFailsTheTestWithItsLog(t *testing.T) {
	t.Parallel()
	r := newRecorder(t, "arguments")
	output := r.run(func() { Redis(r, WithArgs("--no-such-option", "1")) })
	require.True(t, r.Failed())
	require.Contains(t, output, "exited early")
	require.Contains(t, output, "no-such-option")
}

func TestRedisServesAtItsURL(t *testing.T) {
	t.Parallel()
	s := Redis(t, WithPassword("p@ss word"), WithArgs("--maxmemory", "77mb"), WithEnv("TZ=UTC"))
	o, err := redis.ParseURL(s.URL())
	require.NoError(t, err)
	require.Equal(t, s.Addr(), o.Addr)
	c := redis.NewClient(o)
	defer func() { _ = c.Close() }()
	limit, err := c.ConfigGet(t.Context(), "maxmemory").Result()
	require.NoError(t, err)
	require.Equal(t, "80740352", limit["maxmemory"])

	o.Password = ""
	anonymous := redis.NewClient(o)
	defer func() { _ = anonymous.Close() }()
	require.ErrorContains(t, anonymous.Ping(t.Context()).Err(), "NOAUTH")
}

func TestRedisLosesItsDataWhenKilled(t *testing.T) {
	t.Parallel()
	s := Redis(t)
	c := s.Client()
	require.NoError(t, c.Set(t.Context(), "k", 1, 0).Err())
	s.Kill()
	require.Error(t, c.Ping(t.Context()).Err())
	pid, port := s.Pid(), s.Port()
	s.Restart()
	require.NotEqual(t, pid, s.Pid())
	require.Equal(t, port, s.Port())
	require.ErrorIs(t, s.Client().Get(t.Context(), "k").Err(), redis.Nil)
}

func TestAppendOnlyRedisKeepsItsDataWhenKilled(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := Redis(t, WithAppendOnly(), WithDataDir(dir))
	require.Equal(t, dir, s.DataDir())
	require.NoError(t, s.Client().Set(t.Context(), "k", 1, 0).Err())
	s.Kill()
	s.Restart()
	require.Equal(t, "1", s.Client().Get(t.Context(), "k").Val())
	s.Stop()
	require.False(t, s.Running())

	successor := Redis(t, WithAppendOnly(), WithDataDir(dir))
	require.Equal(t, "1", successor.Client().Get(t.Context(), "k").Val())
}

func TestPausedRedisTimesOutAndResumedRedisAnswers(t *testing.T) {
	t.Parallel()
	s := Redis(t)
	c := s.Client()
	require.NoError(t, c.Ping(t.Context()).Err())
	s.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var timeout net.Error
	require.ErrorAs(t, c.Ping(ctx).Err(), &timeout)
	require.True(t, timeout.Timeout())
	require.True(t, s.Running())
	s.Resume()
	require.NoError(t, c.Ping(t.Context()).Err())
	s.Pause()
	s.Stop() // a paused server stops too
	require.False(t, s.Running())
}

func TestRedisSpeaksTLSToKnownClientsOnly(t *testing.T) {
	t.Parallel()
	s := Redis(t, WithTLS(NewCerts(t)))
	require.NoError(t, s.Client().Ping(t.Context()).Err())
	require.Contains(t, s.URL(), "rediss://")

	o := s.ClientOptions()
	o.TLSConfig.Certificates = nil
	unknown := redis.NewClient(o)
	defer func() { _ = unknown.Close() }()
	require.Error(t, unknown.Ping(t.Context()).Err())

	stranger := s.ClientOptions()
	stranger.TLSConfig = NewCerts(t).ClientConfig()
	other := redis.NewClient(stranger)
	defer func() { _ = other.Close() }()
	require.ErrorContains(t, other.Ping(t.Context()).Err(), "certificate")
}
