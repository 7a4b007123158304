package config_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
)

func TestBumpRaisesTheVersionAndChangesNothingElse(t *testing.T) {
	for name, c := range map[string]struct {
		text, want string
		field      string
		least      int64
		from, to   int64
	}{
		"a number": {"# mine\nversion: 7 # raise it\nbuckets: []\n", "# mine\nversion: 8 # raise it\nbuckets: []\n",
			config.VersionField, -1, 7, 8},
		"more digits": {"version:   9\r\nlisten: :1\r\n", "version:   10\r\nlisten: :1\r\n", config.VersionField, -1, 9, 10},
		"above Redis": {"version: 7\n", "version: 42\n", config.VersionField, 41, 7, 42},
		"below Redis": {"version: 7\n", "version: 8\n", config.VersionField, 3, 7, 8},
		"of the pools": {"version: 7\npools_version: 2\n", "version: 7\npools_version: 3\n",
			config.PoolsVersionField, -1, 2, 3},
		"none": {"# mine\n---\nbuckets: []\n", "# mine\n---\nversion: 1\nbuckets: []\n",
			config.VersionField, -1, 0, 1},
		"in one line": {"{region: 'ü', version: 7}", "{region: 'ü', version: 8}", config.VersionField, -1, 7, 8},
		"another's": {"buckets:\n- version: 1\nversion: 2", "buckets:\n- version: 1\nversion: 3", config.VersionField, -1,
			2, 3},
	} {
		t.Run(name, func(t *testing.T) {
			changed, from, to, err := config.Bump([]byte(c.text), c.field, c.least)
			require.NoError(t, err)
			require.Equal(t, c.want, string(changed))
			require.Equal(t, []int64{c.from, c.to}, []int64{from, to})
		})
	}
}

func TestBumpRefusesWhatItCanNotChange(t *testing.T) {
	for text, message := range map[string]string{
		"version: '7'":                  "plain number",
		"version: seven":                "whole number",
		"version: -1":                   "whole number",
		"version: 0x7":                  "whole number",
		"version: [7]":                  "whole number",
		"version: &v 7":                 "plain number",
		"{buckets: []}":                 "has no version",
		"":                              "want fields",
		"- a":                           "want fields",
		"a: [":                          "line",
		"version: 4503599627370495":     "",
		"version: 99999999999999999999": "whole number",
	} {
		_, _, _, err := config.Bump([]byte(text), config.VersionField, -1)
		require.ErrorContains(t, err, message, text)
	}
	_, _, _, err := config.Bump([]byte("version: 1"), config.PoolsVersionField, -1)
	require.ErrorContains(t, err, "version also applies to its pools")
}
