package config

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func parsed(t *testing.T, text string) Config {
	t.Helper()
	c, err := Load(Source{Data: []byte(text)})
	require.NoError(t, err)
	return c
}

const inForce = `redis: {url: "redis://127.0.0.1:6379/0"}
version: 7
buckets:
  - {key: a, capacity: 1000, rate: 100/s}
  - {key: b, capacity: 1000, every: 1h, tokens: 10}
  - {key: c, capacity: 1000, cron: "0 9 * * *", tokens: 10}
`

func edited(t *testing.T, pairs ...string) Config {
	t.Helper()
	return parsed(t, strings.NewReplacer(pairs...).Replace(inForce))
}

// replaced returns text with old, which it must contain, replaced.
func replaced(t *testing.T, text, old, with string) string {
	t.Helper()
	require.Contains(t, text, old)
	return strings.Replace(text, old, with, 1)
}

func TestAChangeNamesItsBuckets(t *testing.T) {
	t.Parallel()
	old := parsed(t, inForce)
	change, err := old.To(edited(t, "version: 7", "version: 8", "100/s", "10/s", "key: b", "key: d"))
	require.NoError(t, err)
	require.Equal(t, Change{Added: []string{"d"}, Removed: []string{"b"}, Changed: []string{"a"}, Version: true}, change)
	require.True(t, change.Applies())

	change, err = old.To(old)
	require.NoError(t, err)
	require.False(t, change.Applies())

	change, err = old.To(edited(t, "100/s", "6000/m"))
	require.NoError(t, err)
	require.False(t, change.Applies(), "the rate is the same in other units")
}

func TestALowerVersionIsRefused(t *testing.T) {
	t.Parallel()
	_, err := parsed(t, inForce).To(edited(t, "version: 7", "version: 6"))
	require.ErrorContains(t, err, "version: 6 is below 7, which is in force")
}

func TestAnotherPolicyUnderTheSameVersionIsRefused(t *testing.T) {
	t.Parallel()
	for name, pairs := range map[string][]string{
		"rate":     {"100/s", "10/s"},
		"schedule": {"every: 1h", "every: 2h"},
		"calendar": {"0 9 * * *", "0 8 * * *"},
		"interval": {"version: 7", "version: 7\nrefill_interval: 50ms"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parsed(t, inForce).To(edited(t, pairs...))
			require.ErrorContains(t, err, "version: 7 is in force already with another policy for ")
			require.ErrorContains(t, err, "raise it")
		})
	}
}

func TestBucketsMayComeAndGoUnderTheSameVersion(t *testing.T) {
	t.Parallel()
	change, err := parsed(t, inForce).To(edited(t, "key: b", "key: d"))
	require.NoError(t, err)
	require.Equal(t, Change{Added: []string{"d"}, Removed: []string{"b"}}, change)
}

func TestWhatOnlyAStartCanChangeIsNamed(t *testing.T) {
	t.Parallel()
	etcd := "version: 7\nelection: {mode: etcd, endpoints: [\"127.0.0.1:2379\"]}"
	change, err := parsed(t, inForce).To(edited(t, "6379/0", "6380/0", "version: 7",
		etcd+"\nregion: x\nlisten: \":1\"\nlog: {format: json, level: debug}"))
	require.NoError(t, err)
	require.Equal(t, []string{"region", "redis", "election", "listen", "log.format"}, change.Restart)
	require.True(t, change.Level)

	old := edited(t, "version: 7", etcd)
	change, err = old.To(edited(t, "version: 7",
		strings.Replace(etcd, "version: 7", "version: 8\nrefill_interval: 50ms", 1)))
	require.NoError(t, err)
	require.Equal(t, []string{"refill_interval"}, change.Restart, "the interval of the pulse changes only at a start")
}
