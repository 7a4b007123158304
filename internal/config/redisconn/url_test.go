package redisconn_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
)

func TestParseURLReadsEveryForm(t *testing.T) {
	t.Parallel()
	secret := credential.Plain
	for text, want := range map[string]redisconn.URL{
		"redis://h":          {Addrs: []string{"h:6379"}},
		"redis://h:1/":       {Addrs: []string{"h:1"}},
		"redis://h:1/5":      {Addrs: []string{"h:1"}, DB: 5},
		"REDIS://h?db=5":     {Addrs: []string{"h:6379"}, DB: 5},
		"redis://[::1]:7/2":  {Addrs: []string{"[::1]:7"}, DB: 2},
		"redis://[::1]":      {Addrs: []string{"[::1]:6379"}},
		"redis://:p%40ss@h":  {Addrs: []string{"h:6379"}, Password: secret("p@ss")},
		"redis://u:p@w@h":    {Addrs: []string{"h:6379"}, Username: "u", Password: secret("p@w")},
		"redis://u@h":        {Addrs: []string{"h:6379"}, Username: "u"},
		"rediss://u:p@h":     {TLS: true, Addrs: []string{"h:6379"}, Username: "u", Password: secret("p")},
		"unix:///run/r.sock": {Kind: redisconn.Unix, Addrs: []string{"/run/r.sock"}},
		"unix://u:p@/run/r.sock?db=2": {Kind: redisconn.Unix, Addrs: []string{"/run/r.sock"}, DB: 2, Username: "u",
			Password: secret("p")},
		"redis-sentinel://h1,h2:5/m": {Kind: redisconn.Sentinel, Addrs: []string{"h1:26379", "h2:5"}, Master: "m"},
		"redis-sentinel://h1/m?db=4": {Kind: redisconn.Sentinel, Addrs: []string{"h1:26379"}, Master: "m", DB: 4},
		"rediss-sentinel://u:p@h1/m/4": {Kind: redisconn.Sentinel, TLS: true, Addrs: []string{"h1:26379"},
			Master: "m", DB: 4, Username: "u", Password: secret("p")},
		"redis-cluster://h1:1,h2:2,[fe80::1]:3": {Kind: redisconn.Cluster, Addrs: []string{"h1:1", "h2:2", "[fe80::1]:3"}},
		"redis-cluster://h1/0":                  {Kind: redisconn.Cluster, Addrs: []string{"h1:6379"}},
		"rediss-cluster://:p@redis.example.com": {Kind: redisconn.Cluster, TLS: true,
			Addrs: []string{"redis.example.com:6379"}, Password: secret("p")},
	} {
		got, err := redisconn.ParseURL(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)

		again, err := redisconn.ParseURL(got.String())
		require.NoError(t, err, got.String())
		again.Username, again.Password = got.Username, got.Password
		require.Equal(t, got, again, "String is parsed back")
	}
}

func TestParseURLSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"":                               "want redis://",
		"h:6379":                         "want redis://",
		"http://h":                       "want redis://",
		"redis://":                       "not a host name",
		"redis://:6379":                  "not a host name",
		"redis://h:0":                    "from 1 to 65535",
		"redis://h:65536":                "from 1 to 65535",
		"redis://h:http":                 "from 1 to 65535",
		"redis://h h":                    "not a host name",
		"redis://h/x":                    "from 0 to 2147483647",
		"redis://h/1/2":                  "from 0 to 2147483647",
		"redis://h/1?db=1":               "given twice",
		"redis://h?db=1&db=2":            "once",
		"redis://h?db=":                  "from 0 to",
		"redis://h?read_timeout=1s":      "only query parameter is db",
		"redis://h?%zz":                  "query can't be parsed",
		"redis://h#f":                    "fragment",
		"redis://h1,h2":                  "redis-sentinel:// or redis-cluster://",
		"redis://u:%zz@h":                "percent-encode",
		"redis://u:a/b@h":                "percent-encode",
		"unix://host/path":               "unix:///path",
		"unix://":                        "unix:///path",
		"redis-sentinel://h":             "name of the master",
		"redis-sentinel://h/m/x":         "from 0 to",
		"redis-cluster://h1,,h2":         "not a host name",
		"redis-cluster://h/1":            "only database 0",
		"redis-sentinel://h1:1:1,h2/m":   "not a host name",
		"redis://[::1":                   "not a host name",
		"redis://u:p@h/1?password=other": "only query parameter is db",
	} {
		_, err := redisconn.ParseURL(text)
		require.ErrorIs(t, err, redisconn.ErrURL, text)
		require.ErrorContains(t, err, says, text)
	}
}

func TestRedactHidesPasswordsHoweverBrokenTheText(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"redis://h:1/2":               "redis://h:1/2",
		"redis://u:secret@h":          "redis://u:xxxxx@h",
		"redis://secret@h":            "redis://xxxxx@h",
		"redis://u:sec/ret@h":         "redis://u:xxxxx@h",
		"redis://u:sec@ret@h?db=1":    "redis://u:xxxxx@h?db=1",
		"redis://h?password=secret":   "redis://h?xxxxx",
		"u:secret@h":                  "u:xxxxx@h",
		"redis://u:sec?ret@h":         "redis://u:xxxxx@h",
		"nonsense":                    "nonsense",
		"redis://u:secret@h?x=secret": "redis://u:xxxxx@h?xxxxx",
	} {
		require.Equal(t, want, credential.Redact(text))
	}
	u, err := redisconn.ParseURL("redis://u:secret@h")
	require.NoError(t, err)
	for _, shown := range []string{fmt.Sprint(u), fmt.Sprintf("%+v %#v", u, u),
		fmt.Sprintf("%+v %#v", redisconn.Options{URL: u}, redisconn.Options{URL: u})} {
		require.NotContains(t, shown, "secret")
	}
}

func FuzzParseURL(f *testing.F) {
	for _, seed := range []string{"redis://u:secret@h:1/2?db=1", "redis-sentinel://:secret@h1,h2/m", "unix://:secret@/p",
		"redis-cluster://[::1]:1,h"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		u, err := redisconn.ParseURL(text)
		if err != nil {
			require.ErrorIs(t, err, redisconn.ErrURL)
			return
		}
		require.NotEmpty(t, u.Addrs)
		again, err := redisconn.ParseURL(u.String())
		require.NoError(t, err)
		require.Equal(t, u.Addrs, again.Addrs)
		require.Equal(t, u.DB, again.DB)
		require.Equal(t, u.Master, again.Master)
	})
}
