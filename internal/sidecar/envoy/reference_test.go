package envoy

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// The configurations of the reference service load. If the reference service refuses one, it is refused here, too, and
// the error names the field.
func TestTheConfigurationsOfTheReferenceServiceLoad(t *testing.T) {
	t.Parallel()
	refused := map[string]string{
		"bad_limit_unit.yaml":      `descriptors[0].rate_limit.unit: "foo" is not one of second`,
		"bad_yaml.yaml":            "line 2: not YAML: ",
		"duplicate_key.yaml":       `descriptors[1]: two descriptors have the key "key1" and the value "value1"`,
		"empty_domain.yaml":        "domain: it is missing",
		"empty_key.yaml":           "descriptors[0].key: it is missing",
		"misspelled_key.yaml":      "line 5: field ratelimit not found",
		"misspelled_key2.yaml":     "line 7: field requestsperunit not found",
		"non_map_list.yaml":        "line 3: cannot unmarshal !!str `a`; line 4: ",
		"non_string_key.yaml":      "line 1: field 0.25 not found",
		"replaces_empty.yaml":      "replaces[0]: want the name of another rate_limit",
		"replaces_self.yaml":       "replaces[0]: want the name of another rate_limit",
		"unlimited_with_unit.yaml": "descriptors[0].rate_limit: want exactly one of these: bucket; unit",
	}
	files, err := filepath.Glob("testdata/reference/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 22)
	for _, path := range files {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		name := filepath.Base(path)
		limits, err := Parse(map[string][]byte{name: text}, nil)
		if says := refused[name]; says != "" {
			require.ErrorIs(t, err, ErrLimits, name)
			require.ErrorContains(t, err, says, name)
			continue
		}
		require.NoError(t, err, name)
		domain, _ := limits.Describe(name)
		require.NotEmpty(t, domain)
	}
	for _, pair := range [][2]string{
		{"duplicate_domain.yaml", "basic_config.yaml"}, {"merge_domain_key1.yaml", "merge_domain_key2.yaml"},
	} {
		both := map[string][]byte{}
		for _, name := range pair {
			both[name], err = os.ReadFile("testdata/reference/" + name)
			require.NoError(t, err)
		}
		_, err = Parse(both, nil)
		require.ErrorContains(t, err, `domain: "test-domain" is also the domain of another file`, "%v", pair)
	}
}

// The limiter of a window is made only once. Limits in requests don't accumulate limiters without a bound.
func TestALimiterOfAWindowIsMadeOnce(t *testing.T) {
	t.Parallel()
	w := NewWindows(redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}), func() time.Duration { return time.Second },
		WindowOptions{})
	minute := units["minute"]
	first, err := w.taker(quota{minute, 100})
	require.NoError(t, err)
	again, err := w.taker(quota{minute, 100})
	require.NoError(t, err)
	require.True(t, first == again)
	for n := range uint32(3 * mostMade) {
		_, err := w.taker(quota{minute, n})
		require.NoError(t, err)
		require.LessOrEqual(t, len(w.made), mostMade)
	}
}
