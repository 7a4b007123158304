package redisconn_test

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

func TestMain(m *testing.M) {
	redisconn.SetLogger(nil)
	os.Exit(m.Run())
}

func parse(t *testing.T, text string) redisconn.URL {
	t.Helper()
	u, err := redisconn.ParseURL(text)
	require.NoError(t, err)
	return u
}

// open opens a client that is closed when the test ends.
func open(t *testing.T, o redisconn.Options) redis.UniversalClient {
	t.Helper()
	c, err := redisconn.Open(o)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// roundTrip writes and reads a key.
func roundTrip(t *testing.T, c redis.UniversalClient) {
	t.Helper()
	require.NoError(t, c.Set(t.Context(), "k", "v", 0).Err())
	got, err := c.Get(t.Context(), "k").Result()
	require.NoError(t, err)
	require.Equal(t, "v", got)
}

func secretFile(t *testing.T, secret string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(path, []byte(secret+"\n"), 0o600))
	return path
}

func TestOpenReachesOneServerAndItsDatabase(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t)
	roundTrip(t, open(t, redisconn.Options{URL: parse(t, "redis://"+s.Addr()+"/3")}))
	n, err := s.Client().DBSize(t.Context()).Result()
	require.NoError(t, err)
	require.Zero(t, n, "the client wrote to database 3, and not to 0")
}

func TestOpenReachesASocket(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "r") // a short name, since the path of a socket has at most about 100 bytes
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "s")
	testenv.Redis(t, testenv.WithArgs("--unixsocket", path))
	roundTrip(t, open(t, redisconn.Options{URL: parse(t, "unix://"+path)}))
}

func TestOpenReachesTheMasterThroughSentinelAfterAFailover(t *testing.T) {
	t.Parallel()
	s := testenv.Sentinel(t, testenv.WithPassword("pw"))
	c := open(t, redisconn.Options{
		URL:      parse(t, "redis-sentinel://"+s.Addr()+"/"+testenv.SentinelMaster),
		Password: credential.FromFile(secretFile(t, "pw")),
	})
	roundTrip(t, c)
	replica := s.Replica()
	s.KillMaster()
	require.NoError(t, s.WaitMaster(t.Context(), replica))
	require.Eventually(t, func() bool { return c.Set(t.Context(), "k", "w", 0).Err() == nil }, 30*time.Second,
		20*time.Millisecond)
}

func TestTheSentinelsOwnPasswordIsReadForEachConnection(t *testing.T) {
	t.Parallel()
	s := testenv.Sentinel(t, testenv.WithPassword("pw"))
	control := s.Sentinel().Client()
	acl := func(rules ...any) {
		require.NoError(t, control.Do(t.Context(), append([]any{"acl", "setuser"}, rules...)...).Err())
	}
	acl("watcher", "on", ">first", "allkeys", "allchannels", "+@all")
	require.NoError(t, control.Do(t.Context(), "acl", "setuser", "default", "resetpass", ">unknown").Err())
	file := secretFile(t, "first")
	c := open(t, redisconn.Options{
		URL:              parse(t, "redis-sentinel://"+s.Addr()+"/"+testenv.SentinelMaster),
		Password:         credential.Plain("pw"),
		SentinelUsername: "watcher", SentinelPassword: credential.FromFile(file),
	})
	roundTrip(t, c)

	acl("watcher", "resetpass", ">second")
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	replica := s.Replica()
	s.KillMaster()
	require.NoError(t, s.WaitMaster(t.Context(), replica))
	require.NoError(t, control.Do(t.Context(), "client", "kill", "user", "watcher").Err())
	require.Eventually(t, func() bool { return c.Set(t.Context(), "k", "w", 0).Err() == nil }, 30*time.Second,
		20*time.Millisecond)
}

func TestOpenReachesACluster(t *testing.T) {
	t.Parallel()
	s := testenv.Cluster(t)
	c := open(t, redisconn.Options{URL: parse(t, "redis-cluster://"+strings.Join(s.Addrs(), ","))})
	require.IsType(t, &redis.ClusterClient{}, c)
	for _, key := range []string{"a", "b", "c", "d"} { // on several nodes
		require.NoError(t, c.Set(t.Context(), key, key, 0).Err())
	}
	c = open(t, redisconn.Options{URL: parse(t, "redis-cluster://"+s.Addrs()[0])})
	require.IsType(t, &redis.ClusterClient{}, c, "one address is enough")
	got, err := c.Get(t.Context(), "c").Result()
	require.NoError(t, err)
	require.Equal(t, "c", got)
}

func TestOpenShowsItsCertificate(t *testing.T) {
	t.Parallel()
	certs := testenv.NewCerts(t)
	s := testenv.Redis(t, testenv.WithTLS(certs))
	mutual := credential.TLS{CA: certs.CAFile, Cert: certs.ClientCert, Key: certs.ClientKey}
	url := parse(t, "rediss://"+s.Addr())
	roundTrip(t, open(t, redisconn.Options{URL: url, TLS: mutual}))

	require.Error(t, open(t, redisconn.Options{URL: url, TLS: credential.TLS{CA: certs.CAFile}}).Ping(t.Context()).Err(),
		"a client without a certificate is refused")
	err := open(t, redisconn.Options{URL: url, TLS: credential.TLS{Cert: certs.ClientCert,
		Key: certs.ClientKey}}).Ping(t.Context()).Err()
	require.ErrorContains(t, err, "certificate", "the system does not trust the authority")
}

func TestCertificatesAreReadForEachConnection(t *testing.T) {
	t.Parallel()
	certs, strangers := testenv.NewCerts(t), testenv.NewCerts(t)
	s := testenv.Redis(t, testenv.WithTLS(certs))
	dir := t.TempDir()
	files := credential.TLS{CA: filepath.Join(dir, "ca"), Cert: filepath.Join(dir, "cert"), Key: filepath.Join(dir, "key")}
	strangers.Install(t, files.CA, files.Cert, files.Key)
	c := open(t, redisconn.Options{URL: parse(t, "rediss://"+s.Addr()), TLS: files})
	require.ErrorContains(t, c.Ping(t.Context()).Err(), "unknown authority")
	certs.Install(t, files.CA, files.Cert, files.Key)
	roundTrip(t, c)
}

func TestPasswordFileIsReadForEachConnection(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t, testenv.WithPassword("first"))
	file := secretFile(t, "first")
	c := open(t, redisconn.Options{URL: parse(t, "redis://"+s.Addr()), Password: credential.FromFile(file)})
	roundTrip(t, c)

	admin := s.Client()
	require.NoError(t, admin.ConfigSet(t.Context(), "requirepass", "second").Err())
	require.NoError(t, os.WriteFile(file, []byte("second\n"), 0o600))
	require.NoError(t, admin.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes").Err())
	require.Eventually(t, func() bool { return c.Ping(t.Context()).Err() == nil }, 20*time.Second, 10*time.Millisecond)

	require.NoError(t, os.Remove(file))
	require.NoError(t, admin.Do(t.Context(), "client", "kill", "type", "normal", "skipme", "yes").Err())
	require.Eventually(t, func() bool {
		err := c.Ping(t.Context()).Err()
		return err != nil && strings.Contains(err.Error(), file)
	}, 20*time.Second, 10*time.Millisecond, "the error names the missing file")
}

func TestCredentialsBesideTheURLBeatThoseInIt(t *testing.T) {
	t.Parallel()
	s := testenv.Redis(t, testenv.WithPassword("right"))
	require.NoError(t, s.Client().Do(t.Context(), "acl", "setuser", "app", "on", ">secret", "~*", "+@all").Err())
	roundTrip(t, open(t, redisconn.Options{URL: parse(t, "redis://other:wrong@"+s.Addr()), Username: "app",
		Password: credential.Plain("secret")}))
	roundTrip(t, open(t, redisconn.Options{URL: parse(t, "redis://:right@"+s.Addr())}))

	err := open(t, redisconn.Options{URL: parse(t, "redis://app:hunter2@"+s.Addr())}).Ping(t.Context()).Err()
	require.Error(t, err)
	require.NotContains(t, err.Error(), "hunter2")
}

// silentServer starts a server that never answers a PING. It counts the PINGs. It answers the handshake of a connection
// with an error, after which the client continues.
func silentServer(t *testing.T) (addr string, pings *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	pings = new(atomic.Int64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = conn.Close() })
			go func() {
				buf := make([]byte, 4096)
				for {
					n, err := conn.Read(buf)
					if err != nil {
						return
					}
					text := strings.ToLower(string(buf[:n]))
					if strings.Contains(text, "\r\nping\r\n") {
						pings.Add(1)
						continue
					}
					commands := strings.Count(text, "*")
					if _, err := conn.Write(bytes.Repeat([]byte("-ERR unknown command\r\n"), commands)); err != nil {
						return
					}
				}
			}()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	return l.Addr().String(), pings
}

func TestACommandIsSentOnce(t *testing.T) {
	t.Parallel()
	addr, pings := silentServer(t)
	c := open(t, redisconn.Options{URL: parse(t, "redis://"+addr), ReadTimeout: 50 * time.Millisecond})
	require.Error(t, c.Ping(t.Context()).Err())
	require.EqualValues(t, 1, pings.Load())
}

func TestAContextBoundsTheTimeOnTheSocket(t *testing.T) {
	t.Parallel()
	addr, _ := silentServer(t)
	c := open(t, redisconn.Options{URL: parse(t, "redis://"+addr), ReadTimeout: time.Minute})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	start := time.Now()
	require.Error(t, c.Ping(ctx).Err())
	require.Less(t, time.Since(start), 30*time.Second, "the call ends before the read timeout")
}

func TestValidateNamesEveryWrongOption(t *testing.T) {
	t.Parallel()
	secret := credential.Plain("hunter2")
	for name, tc := range map[string]struct {
		options redisconn.Options
		says    []string
	}{
		"nothing": {redisconn.Options{}, []string{"url: is missing"}},
		"user without a password": {redisconn.Options{URL: parse(t, "redis://h"), Username: "u"},
			[]string{`username: "u" has no password`}},
		"user without a password in url": {redisconn.Options{URL: parse(t, "redis://hunter2@h")},
			[]string{"url: has a user but no password"}},
		"tls without rediss": {redisconn.Options{URL: parse(t, "redis://h"), TLS: credential.TLS{CA: "f"}},
			[]string{"tls: it can be set only with a rediss://"}},
		"certificate without key": {redisconn.Options{URL: parse(t, "rediss://h"), TLS: credential.TLS{Cert: "f"}},
			[]string{"tls.key: it is required: set both cert and key"}},
		"sentinel's password": {redisconn.Options{URL: parse(t, "redis://h"), SentinelPassword: secret},
			[]string{"sentinel_password_file: it can be set only with"}},
		"sentinel's user": {redisconn.Options{URL: parse(t, "redis-sentinel://h/m"), SentinelUsername: "u"},
			[]string{"sentinel_username: \"u\" has no password"}},
		"numbers": {
			redisconn.Options{URL: parse(t, "redis://h"), DialTimeout: time.Hour, ReadTimeout: -1, WriteTimeout: 1,
				PoolSize: 10_001},
			[]string{"dial_timeout: 1h0m0s is not from 1ms to 1m0s", "read_timeout: ", "write_timeout: ",
				"pool_size: 10001 is not a whole number from 1 to 10000"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := redisconn.Open(tc.options)
			var wrong *fields.Error
			require.ErrorAs(t, err, &wrong)
			require.Len(t, strings.Split(err.Error(), "\n"), len(tc.says))
			for _, says := range tc.says {
				require.ErrorContains(t, err, says)
			}
			require.NotContains(t, err.Error(), "hunter2")
		})
	}
}

func TestOpenNamesAFileThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	empty := secretFile(t, "")
	for name, o := range map[string]redisconn.Options{
		"password":          {URL: parse(t, "redis://h"), Password: credential.FromFile(empty)},
		"sentinel password": {URL: parse(t, "redis-sentinel://h/m"), SentinelPassword: credential.FromFile(empty)},
		"authority":         {URL: parse(t, "rediss://h"), TLS: credential.TLS{CA: empty}},
		"certificate":       {URL: parse(t, "rediss://h"), TLS: credential.TLS{Cert: empty, Key: empty}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := redisconn.Open(o)
			require.ErrorContains(t, err, empty)
			require.ErrorContains(t, err, "redisconn: ")
		})
	}
}

func TestSetLoggerLogsTheClientAtDebugLevel(t *testing.T) {
	var out bytes.Buffer
	redisconn.SetLogger(hclog.New(&hclog.LoggerOptions{Output: &out, Level: hclog.Debug, JSONFormat: true}))
	t.Cleanup(func() { redisconn.SetLogger(nil) })
	redis.NewClient(&redis.Options{Addr: "h:1", ReadBufferSize: 1}) // go-redis logs a message about the size
	require.Contains(t, out.String(), `"@message":"redis client"`)
	require.Contains(t, out.String(), "ReadBufferSize")
}

func TestAClusterIsReachedWhileAMasterHangs(t *testing.T) {
	t.Parallel()
	s := testenv.Cluster(t)
	key := "a"
	for s.Master(s.Slot(key)) == s.Nodes()[0] {
		key += "a"
	}
	s.Nodes()[0].Pause()
	defer s.Nodes()[0].Resume()
	for range 6 { // each asks the masters in another order
		c := open(t, redisconn.Options{URL: parse(t, s.URL())})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.NoError(t, c.Set(ctx, key, key, 0).Err())
	}
}

func TestAClusterClientNoticesATakeoverSoon(t *testing.T) {
	t.Parallel()
	c := open(t, redisconn.Options{URL: parse(t, "redis-cluster://h")}).(*redis.ClusterClient)
	require.Equal(t, 2*time.Second, c.Options().ClusterStateReloadInterval)
	require.Equal(t, -1, c.Options().MaxRetries)
}
