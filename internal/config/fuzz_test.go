package config_test

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// FuzzParse checks that any input gives either a configuration with valid policies or problems, and never a panic. Each
// problem has its place in the file and is one line of the error.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"", "::: [", good, "a: &a [*a]\n", "? {a: b}\n: c\n", "<<: *x\n", "--- \n--- \n", "redis: {url: !!binary aGk=}\n",
		"redis: {url: \"redis://u:p@h,h:1/0?db=1#x\"}\nbuckets: [{key: a, capacity: 1, cron: \"@every 1s\", tokens: 1}]\n",
		"redis: {url: \"redis-sentinel://h/m\"}\nbuckets: [{key: a, capacity: 1, cron: \"0 0 29 2 *\", tokens: 1, time_zone: Asia/Tokyo}]\n",
		"redis: {url: \"unix:///s?db=1\"}\nbuckets: [{key: a, capacity: 9, every: 1h, tokens: 1}, {key: a}, [], x]\n",
		goodPools, "region: x\nelection: {endpoints: [h:1]}\nredis: {url: \"redis://h\"}\npools: []\n",
		good + template("prefix: \"user:\", enforce: lazy, capacity: 60, rate: 1/s"),
		good + "templates: [{prefix: \"\"}, {prefix: \"\"}, [], x]\n",
		"pools: [{regions: {a: , a: {}, [b]: {weight: 0}, \"\": x}}, {name: p, rate: 1/us, capacity: 1, regions: {a: {floor: 1/s, burst: 0}}}, x]\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseText(data)
		if err == nil {
			require.True(t, len(c.Buckets) > 0 || c.Pooled() || c.Templates != nil)
			if c.Templates != nil {
				decoded, err := policy.DecodeTemplates(c.Templates.Encode())
				require.NoError(t, err)
				require.True(t, decoded.Equal(c.Templates))
			}
			require.NoError(t, pool.Settings{Version: c.Version, Pools: c.Pools}.Validate())
			for _, b := range c.Buckets {
				require.NoError(t, b.Policy.Validate())
				require.NotEmpty(t, b.Key)
			}
			require.NotEmpty(t, c.Summary())
			return
		}
		var problems config.Problems
		require.True(t, errors.As(err, &problems))
		require.NotEmpty(t, problems)
		for _, p := range problems {
			require.Positive(t, p.Line)
			require.Positive(t, p.Column)
			require.NotEmpty(t, p.Msg)
			require.NotContains(t, p.String(), "\n")
			require.True(t, utf8.ValidString(p.String()))
			require.Less(t, len(p.String()), 2000)
		}
		require.Len(t, strings.Split(err.Error(), "\n"), len(problems))
	})
}
