package config_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/policy"
)

func TestParseFillsInDefaults(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte("redis: {url: \"redis://127.0.0.1\"}\nbuckets: [{key: a, capacity: 10, rate: 5/s}]\n"))
	require.NoError(t, err)
	require.Equal(t, []string{"127.0.0.1:6379"}, c.Redis.URL.Addrs)
	require.Zero(t, c.Version)
	require.Equal(t, config.Election{Mode: config.ModeRace, Etcd: config.Etcd{Prefix: "/refiller", TTL: 5 * time.Second}},
		c.Election)
	require.Equal(t, 100*time.Millisecond, c.RefillInterval)
	require.Equal(t, []config.Bucket{{Key: "a", Policy: policy.Policy{
		Capacity: 10, Rate: policy.PerSecond(5), Interval: 100 * time.Millisecond,
	}}}, c.Buckets)
	require.Equal(t, "127.0.0.1:9090", c.Listen)
	require.Equal(t, config.Log{Level: "info"}, c.Log)
}

func TestParseReadsEveryField(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte(`
region: eu-west-1
redis:
  url: rediss-sentinel://s1,s2:7000/mymaster?db=3
  username: app
  password_file: /run/secrets/redis
  sentinel_username: watcher
  sentinel_password_file: /run/secrets/sentinel
  tls: {ca: ca.pem, cert: c.pem, key: k.pem}
  dial_timeout: 1s
  read_timeout: 250ms
  write_timeout: 2s
  pool_size: 7
version: 12
election: {mode: etcd, endpoints: ["https://e1:2379", "[::1]:2379"], prefix: /x/y, ttl: 10s, username: u, password_file: p, tls: {ca: ca.pem}}
refill_interval: 50ms
buckets:
  - {key: smooth, capacity: 100, rate: 10/m, initial: 0, on_loss: full, on_rollback: keep, degraded: local, carry_over: reset, interval: 1s}
  - {key: steps, capacity: 100, every: 1h, tokens: 40, strict: true}
  - {key: calendar, capacity: 100, cron: "0 9 * * 1-5", tokens: 90, time_zone: Europe/Berlin, degraded: open, shadow: true, carry_over: proportional}
listen: ":0"
log: {level: debug, format: json}
`))
	require.NoError(t, err)
	require.Equal(t, "eu-west-1", c.Region)
	r := c.Redis
	require.Equal(t, redisconn.Sentinel, r.URL.Kind)
	require.True(t, r.URL.TLS)
	require.Equal(t, []string{"s1:26379", "s2:7000"}, r.URL.Addrs)
	require.Equal(t, "mymaster", r.URL.Master)
	require.Equal(t, 3, r.URL.DB)
	require.Equal(t, "app", r.Username)
	require.Equal(t, credential.FromFile("/run/secrets/redis"), r.Password)
	require.Equal(t, "watcher", r.SentinelUsername)
	require.Equal(t, credential.FromFile("/run/secrets/sentinel"), r.SentinelPassword)
	require.Equal(t, "k.pem", r.TLS.Key)
	require.Equal(t, [3]time.Duration{time.Second, 250 * time.Millisecond, 2 * time.Second},
		[3]time.Duration{r.DialTimeout, r.ReadTimeout, r.WriteTimeout})
	require.Equal(t, 7, r.PoolSize)
	require.EqualValues(t, 12, c.Version)
	e := c.Election
	require.Equal(t, config.ModeEtcd, e.Mode)
	require.Equal(t, []string{"https://e1:2379", "[::1]:2379"}, e.Endpoints)
	require.Equal(t, "/x/y", e.Prefix)
	require.Equal(t, 10*time.Second, e.TTL)
	require.Equal(t, "u", e.Username)
	require.Equal(t, credential.FromFile("p"), e.Password)
	require.Equal(t, "ca.pem", e.TLS.CA)

	empty := int64(0)
	require.Equal(t, policy.Policy{
		Capacity: 100, Rate: policy.Rate{Tokens: 10, Per: time.Minute}, Interval: time.Second, Initial: &empty,
		OnLoss: policy.LossFull, OnRollback: policy.RollbackKeep, CarryOver: policy.CarryReset,
		Degraded: policy.DegradedLocal,
	}, c.Buckets[0].Policy)
	require.Equal(t, policy.Policy{Capacity: 100, Steps: policy.Every(time.Hour), StepTokens: 40,
		Interval: 50 * time.Millisecond, Strict: true}, c.Buckets[1].Policy)
	require.Equal(t, "0 9 * * 1-5 Europe/Berlin", c.Buckets[2].Policy.Steps.String())
	require.Equal(t, policy.DegradedOpen, c.Buckets[2].Policy.Degraded)
	require.True(t, c.Buckets[2].Policy.Shadow)
	require.Equal(t, policy.CarryProportional, c.Buckets[2].Policy.CarryOver)
	require.Equal(t, ":0", c.Listen)
	require.Equal(t, config.Log{Level: "debug", JSON: true}, c.Log)
}

func TestEndpointsAreAllowedInRaceMode(t *testing.T) {
	t.Parallel()
	c, err := parseText([]byte(strings.Replace(good, "{mode: race}", "{endpoints: [h:1]}", 1)))
	require.NoError(t, err)
	require.Equal(t, config.ModeRace, c.Election.Mode)
	require.Equal(t, []string{"h:1"}, c.Election.Endpoints)
}

// write puts text into a file of its own.
func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func vars(pairs ...string) fields.Environment {
	m := fields.Environment{}
	for i := 0; i+1 < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

func TestFlagBeatsEnvironmentBeatsFile(t *testing.T) {
	t.Parallel()
	path := write(t, good)
	c, err := config.Load(config.Source{Path: path})
	require.NoError(t, err)
	require.Equal(t, "eu-west-1", c.Region)
	require.Equal(t, "127.0.0.1:9090", c.Listen)

	env := vars("REFILLER_REGION", "us-east-1", "REFILLER_LISTEN", ":1", "REFILLER_LOG_LEVEL", "")
	c, err = config.Load(config.Source{
		Path: path, Env: env, Flags: []config.Override{{Source: "--listen", Field: "listen", Value: ":2"}},
	})
	require.NoError(t, err)
	require.Equal(t, "us-east-1", c.Region)
	require.Equal(t, ":2", c.Listen)
	require.Equal(t, "info", c.Log.Level, "an empty variable counts as unset")
}

func TestEveryVariableIsRead(t *testing.T) {
	t.Parallel()
	c, err := config.Load(config.Source{Path: write(t,
		"redis: {password_file: gone}\nelection:\nbuckets: [{key: a, capacity: 10, rate: 5/s}]\n"), Env: vars(
		"REFILLER_REGION", "17", "REFILLER_LISTEN", "h:1", "REFILLER_LOG_LEVEL", "off", "REFILLER_LOG_FORMAT", "json",
		"REFILLER_REDIS_URL", "rediss-sentinel://h/m", "REFILLER_REDIS_USERNAME", "u", "REFILLER_REDIS_PASSWORD", "p",
		"REFILLER_REDIS_SENTINEL_PASSWORD", "s", "REFILLER_REDIS_CA", "1", "REFILLER_REDIS_CERT", "2", "REFILLER_REDIS_KEY",
		"3",
		"REFILLER_ELECTION_MODE", "etcd", "REFILLER_ETCD_ENDPOINTS", "h1:1, h2:2", "REFILLER_ETCD_USERNAME", "eu",
		"REFILLER_ETCD_PASSWORD", "ep", "REFILLER_ETCD_CA", "4", "REFILLER_ETCD_CERT", "5", "REFILLER_ETCD_KEY", "6",
	)})
	require.NoError(t, err)
	reveal := func(p interface{ Reveal() (string, error) }) string {
		s, err := p.Reveal()
		require.NoError(t, err)
		return s
	}
	require.Equal(t, "17", c.Region)
	require.Equal(t, "h:1", c.Listen)
	require.Equal(t, config.Log{Level: "off", JSON: true}, c.Log)
	require.Equal(t, "m", c.Redis.URL.Master)
	require.Equal(t, "u", c.Redis.Username)
	require.Equal(t, "p", reveal(c.Redis.Password), "the variable overrides the file's password_file")
	require.Equal(t, "s", reveal(c.Redis.SentinelPassword))
	require.Equal(t, [3]string{"1", "2", "3"}, [3]string{c.Redis.TLS.CA, c.Redis.TLS.Cert, c.Redis.TLS.Key})
	require.Equal(t, config.ModeEtcd, c.Election.Mode)
	require.Equal(t, []string{"h1:1", "h2:2"}, c.Election.Endpoints)
	require.Equal(t, "eu", c.Election.Username)
	require.Equal(t, "ep", reveal(c.Election.Password))
	require.Equal(t, [3]string{"4", "5", "6"}, [3]string{c.Election.TLS.CA, c.Election.TLS.Cert, c.Election.TLS.Key})

	c, err = config.Load(config.Source{
		Path: write(t, good), Env: vars("REFILLER_REDIS_PASSWORD_FILE", "rf", "REFILLER_ETCD_USERNAME", "u",
			"REFILLER_ETCD_PASSWORD_FILE", "ef"),
	})
	require.NoError(t, err)
	require.Equal(t, credential.FromFile("rf"), c.Redis.Password)
	require.Equal(t, credential.FromFile("ef"), c.Election.Password)
}

func TestMisspelledVariablesAreReported(t *testing.T) {
	t.Parallel()
	path := write(t, good)
	_, err := config.Load(config.Source{Path: path, Env: vars(
		"REFILLER_REDIS_PASSWRD", "x", "REFILLER_REDIS_PASS", "x", "REFILLER_LISTN", ":1", "REFILLER_ETCD_PREFIXES", "/x",
	)})
	var problems config.Problems
	require.ErrorAs(t, err, &problems)
	require.Len(t, problems, 4)
	for name, says := range map[string]string{
		"REFILLER_REDIS_PASSWRD": "no program reads this variable: did you mean REFILLER_REDIS_PASSWORD?",
		"REFILLER_REDIS_PASS":    "no program reads this variable: there are REFILLER_REDIS_URL, REFILLER_REDIS_USERNAME, ",
		"REFILLER_LISTN":         "no program reads this variable: did you mean REFILLER_LISTEN?",
		"REFILLER_ETCD_PREFIXES": "no program reads this variable: did you mean REFILLER_ETCD_PREFIX?",
	} {
		require.ErrorContains(t, err, name+": "+says)
	}
	require.NotContains(t, err.Error(), "/x", "values of variables may be secret")

	_, err = config.Load(config.Source{Path: path, Env: vars(
		"REFILLER_IDENTITY", "a", "REFILLER_ENVIRONMENT", "prod", "REFILLER_SERVE_HTTP", ":1", "REFILLER_REDIS_PASSWRD", "",
		// Kubernetes sets these for Services called refiller and refiller-redis.
		"REFILLER_SERVICE_HOST", "10.0.0.1", "REFILLER_SERVICE_PORT", "9090", "REFILLER_SERVICE_PORT_ADMIN", "9090",
		"REFILLER_PORT", "tcp://10.0.0.1:9090",
		"REFILLER_PORT_9090_TCP", "x", "REFILLER_PORT_9090_TCP_ADDR", "10.0.0.1", "REFILLER_REDIS_SERVICE_HOST", "10.0.0.2",
		"REFILLER_REDIS_PORT", "tcp://10.0.0.2:6379", "REFILLER_REDIS_PORT_6379_TCP_PROTO", "tcp",
	)})
	require.NoError(t, err)
}

func TestConnectionsNeedNoFile(t *testing.T) {
	t.Parallel()
	c, err := config.Connections(nil)
	require.NoError(t, err)
	require.Equal(t, "redis://127.0.0.1:6379", c.Redis.String())
	require.Empty(t, c.PoolRegistry.Endpoints)

	c, err = config.Connections(vars("REFILLER_REDIS_URL", "rediss://h", "REFILLER_REDIS_CA", "ca",
		"REFILLER_REDIS_PASSWORD_FILE", "f", "REFILLER_ETCD_ENDPOINTS", "e:1"),
		config.Override{Source: "--redis", Field: "redis.url", Value: "rediss://u:p@other"})
	require.NoError(t, err)
	require.Equal(t, "rediss://u:xxxxx@other:6379", c.Redis.String())
	require.True(t, c.Redis.Password.IsZero(), "the variable's password file belongs to another address")
	require.Equal(t, "ca", c.Redis.TLS.CA)
	require.Equal(t, []string{"e:1"}, c.PoolRegistry.Endpoints)
	require.Equal(t, "/refiller/pools", c.PoolsPrefix())

	_, err = config.Connections(vars("REFILLER_REDIS_CA", "ca", "REFILLER_ETCD_USERNAME", "u"))
	require.ErrorContains(t, err, "redis.tls: it can be set only with a rediss://")
	require.ErrorContains(t, err, `REFILLER_ETCD_USERNAME: election.username: "u" has no password`)
}

func TestURLOfTheEnvironmentBringsItsOwnCredentials(t *testing.T) {
	t.Parallel()
	path := write(t, strings.Replace(good, `6379/0"}`, `6379/0", username: old, password_file: old}`, 1))
	c, err := config.Load(config.Source{Path: path, Env: vars("REFILLER_REDIS_URL", "redis://new:secret@h")})
	require.NoError(t, err)
	require.Empty(t, c.Redis.Username)
	require.True(t, c.Redis.Password.IsZero())
	c, err = config.Load(config.Source{Path: path, Env: vars("REFILLER_REDIS_URL", "redis://h")})
	require.NoError(t, err)
	require.Equal(t, "old", c.Redis.Username, "the file's credentials apply to a url without any")
}

func TestProblemsNameTheirSource(t *testing.T) {
	t.Parallel()
	path := write(t, strings.Replace(good, "version: 7", "version: x", 1))
	_, err := config.Load(config.Source{
		Path: path, Env: vars("REFILLER_LISTEN", "nowhere", "REFILLER_ETCD_ENDPOINTS", "h:1,bad"),
		Flags: []config.Override{{Source: "--log-level", Field: "log.level", Value: "loud"}},
	})
	require.Error(t, err)
	text := err.Error()
	require.Contains(t, text, path+`:3:10: version: "x" is not a whole number`)
	require.Contains(t, text, `REFILLER_LISTEN: listen: "nowhere"`)
	require.Contains(t, text, `REFILLER_ETCD_ENDPOINTS: election.endpoints[1]: "bad"`)
	require.Contains(t, text, `--log-level: log.level: "loud" is not one of`)
	require.Len(t, strings.Split(text, "\n"), 4)
}

func TestLoadSaysWhyAFileCannotBeRead(t *testing.T) {
	t.Parallel()
	_, err := config.Load(config.Source{Path: filepath.Join(t.TempDir(), "none.yaml")})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.ErrorContains(t, err, "config: ")
	_, err = config.Load(config.Source{Path: t.TempDir()})
	require.ErrorContains(t, err, "config: ")
}

func TestSecretsAreNotShown(t *testing.T) {
	t.Parallel()
	const secret = "hunter2"
	c, err := config.Load(config.Source{Path: write(t, good), Env: vars(
		"REFILLER_REDIS_URL", "redis://app:"+secret+"@127.0.0.1", "REFILLER_REDIS_PASSWORD", secret,
		"REFILLER_ETCD_USERNAME", "u", "REFILLER_ETCD_PASSWORD", secret,
	)})
	require.NoError(t, err)
	asJSON, err := json.Marshal(c)
	require.NoError(t, err)
	for _, shown := range []string{fmt.Sprintf("%v %+v %#v", c, c, c), c.Summary(), fmt.Sprint(c.LogFields()...),
		string(asJSON)} {
		require.NotContains(t, shown, secret)
		require.Contains(t, shown, "127.0.0.1:6379")
	}

	for name, text := range map[string]string{
		"a good url":       "redis: {url: \"redis://app:" + secret + "@h\"}",
		"bad scheme":       "redis: {url: \"http://app:" + secret + "@h\"}",
		"bad port":         "redis: {url: \"redis://app:" + secret + "@h:x\"}",
		"bad escape":       "redis: {url: \"redis://app:%zz" + secret + "@h\"}",
		"not escaped":      "redis: {url: \"redis://app:" + secret + "/x@h\"}",
		"in the query":     "redis: {url: \"redis://h?password=" + secret + "\"}",
		"as the user":      "redis: {url: \"redis://" + secret + "@h\"}",
		"no scheme":        "redis: {url: \"app:" + secret + "@h\"}",
		"a tagged url":     "redis: {url: !x \"redis://app:" + secret + "@h\"}",
		"url in a list":    "redis: {url: [\"redis://app:" + secret + "@h\"]}",
		"redis itself":     "redis: \"redis://app:" + secret + "@h\"",
		"password in file": "redis: {url: \"redis://h\", password: " + secret + "}",
		"sentinels":        "redis: {url: \"redis://h\", sentinel_password: " + secret + "}",
		"etcd":             "election: {password: " + secret + "}",
		"etcd endpoint":    "election: {endpoints: [\"http://u:" + secret + "@h:1\"]}",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parseText([]byte(text))
			require.Error(t, err)
			require.NotContains(t, err.Error(), secret)
		})
	}
}

// parseText loads a configuration from the content of a file alone.
func parseText(data []byte) (config.Config, error) {
	return config.Load(config.Source{Data: append([]byte{}, data...)})
}
