package envoy

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/lua"
)

func mustTemplate(t testing.TB, s string, keys ...string) template {
	t.Helper()
	path := make([]fileDescriptor, len(keys))
	for i, k := range keys {
		path[i].Key = k
	}
	parsed, err := parseTemplate(s, path)
	require.NoError(t, err)
	return parsed
}

func TestABucketIsNamedByItsTemplate(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		template string
		entries  []entry
		want     string
	}{
		"plain text":           {"checkout", []entry{{"a", "x"}}, "checkout"},
		"domain, key, value":   {"{domain}:{key}_{value}", []entry{{"a", "x"}}, "edge:a_x"},
		"the last entry":       {"{key}_{value}", []entry{{"a", "x"}, {"b", "y"}}, "b_y"},
		"a value by its key":   {"{value:a}", []entry{{"a", "x"}, {"b", "y"}}, "x"},
		"the last of that key": {"{value:a}", []entry{{"a", "x"}, {"a", "y"}}, "y"},
		"the whole descriptor": {"{domain}|{descriptor}", []entry{{"user", "x"}, {"b", ""}}, "edge|user=x,b="},
		"an IPv6 address":      {"ip:{value}", []entry{{"a", "2001:db8::1"}}, "ip:2001:db8::1"},
		"a closing brace":      {"user:{value}", []entry{{"a", "x}{%,"}}, "user:x%7D%7B%25%2C"},
		"a separator":          {"{value:a}:{value:b}", []entry{{"a", "x:y"}, {"b", "z"}}, "x%3Ay:z"},
	} {
		keys := make([]string, len(c.entries))
		for i, e := range c.entries {
			keys[i] = e.key
		}
		require.Equal(t, c.want, mustTemplate(t, c.template, keys...).name("edge", c.entries), name)
	}
}

// A client that sends a header of a descriptor can't name the bucket of another value. It also can't name a bucket that
// can't exist.
func FuzzDifferentValuesNameDifferentBuckets(f *testing.F) {
	f.Add("x:y", "z", "x", "y:z")
	f.Add("x", "y,b=z", "x,b=y", "z")
	f.Add("}", "", "%7D", "")
	f.Add(strings.Repeat("k", 600), "", strings.Repeat("k", 601), "")
	f.Add("a_", "b", "a", "_b")
	f.Fuzz(func(t *testing.T, a1, b1, a2, b2 string) {
		one, two := []entry{{"a", a1}, {"b", b1}}, []entry{{"a", a2}, {"b", b2}}
		same := a1 == a2 && b1 == b2
		namers := map[string]func([]entry) string{"window": func(e []entry) string { return windowKey("", "edge", e) }}
		for _, s := range []string{"{value:a}:{value:b}", "u{value:a}x_y{value:b}z", "{domain}:{descriptor}"} {
			tmpl := mustTemplate(t, s, "a", "b")
			namers[s] = func(e []entry) string { return tmpl.name("edge", e) }
		}
		for what, name := range namers {
			require.NoError(t, lua.CheckKey(name(one)), what)
			require.Equal(t, same, name(one) == name(two), "%s: %q and %q", what, name(one), name(two))
		}
		for other, e := range map[string][]entry{"shorter": {{"a", a2}}, "longer key": {{"a_b", a2}}} {
			require.NotEqual(t, windowKey("", "edge", one), windowKey("", "edge", e), other)
		}
		require.NotEqual(t, windowKey("", "edge:a", one), windowKey("", "edge", two))
	})
}
