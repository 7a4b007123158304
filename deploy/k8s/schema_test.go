package k8s

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/tokenrefill/refiller/deploy/internal/imagetest"
)

// complete is a configuration with every field.
const complete = `
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
pools_version: 3
election: {mode: etcd, endpoints: ["https://e1:2379"], prefix: /x/y, ttl: 10s, username: u, password_file: p, tls: {ca: ca.pem}}
pool_registry: {endpoints: ["https://g1:2379"], prefix: /x, ttl: 10s, username: u, password_file: p, tls: {ca: ca.pem}}
refill_interval: 50ms
buckets:
  - {key: smooth, capacity: 100, rate: 10/m, initial: 0, on_loss: full, on_rollback: keep, degraded: local, carry_over: reset, interval: 1s}
  - {key: steps, capacity: 100, every: 1w, tokens: 40, strict: true}
  - {key: calendar, capacity: 100, cron: "0 9 * * 1-5", tokens: 90, time_zone: Europe/Berlin, degraded: open, shadow: true}
templates:
  - {prefix: "", enforce: lazy, capacity: 60, rate: 1000/2w}
  - {prefix: "tenant:*:api", capacity: 60, rate: 1/1.5s, max_keys: 1000}
pools:
  - {name: payments, rate: 10000/s, capacity: 20000, interval: 50ms, floor_share: 40%, regions: {eu-west-1: {weight: 2, floor: 2000/s}, us: , ap: {burst: 5000, ceiling: 9000/s}}}
listen: ":0"
log: {level: debug, format: json}
`

func TestTheSchemaAcceptsGoodAndRejectsBadConfigurations(t *testing.T) {
	schema, err := jsonschema.NewCompiler().Compile("../../internal/config/schema.json")
	require.NoError(t, err)
	validate := func(text []byte) error {
		asJSON, err := yaml.YAMLToJSON(text)
		require.NoError(t, err)
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(string(asJSON)))
		require.NoError(t, err)
		return schema.Validate(value)
	}
	require.NoError(t, validate([]byte(complete)))
	check := exec.CommandContext(t.Context(), imagetest.Program(t, "refiller"), "check", "-")
	check.Stdin = strings.NewReader(complete)
	out, err := check.CombinedOutput()
	require.NoError(t, err, "%s", out)
	files, err := filepath.Glob("*/*/config.yaml")
	require.NoError(t, err)
	deeper, err := filepath.Glob("*/*/*/config.yaml")
	require.NoError(t, err)
	files = append(append(files, deeper...), "base/config.yaml")
	require.Len(t, files, 3)
	for _, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, validate(text), path)
	}
	for name, pair := range map[string][2]string{
		"unknown field":             {"version: 12", "version: 12\nbukets: []"},
		"unknown field of a bucket": {"initial: 0", "initia: 0"},
		"text for a number":         {"capacity: 100", "capacity: many"},
		"below the range":           {"pool_size: 7", "pool_size: 0"},
		"no unit":                   {"50ms", "50"},
		"no time":                   {"rate: 10/m", "rate: '10'"},
		"two schedules":             {"rate: 10/m", "rate: 10/m, every: 1h, tokens: 5"},
		"no schedule":               {"rate: 10/m, ", ""},
		"no key":                    {"key: smooth, ", ""},
		"none of the choices":       {"degraded: local", "degraded: maybe"},
		"not true or false":         {"strict: true", "strict: 1"},
		"a percentage":              {"40%", "0.4"},
		"unknown field of a region": {"burst: 5000", "brust: 5000"},
		"a prefix":                  {"prefix: /x/y", "prefix: x/"},
	} {
		require.Contains(t, complete, pair[0], name)
		require.Error(t, validate([]byte(strings.Replace(complete, pair[0], pair[1], 1))), name)
	}
}
