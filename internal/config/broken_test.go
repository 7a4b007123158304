package config_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/config"
)

// good is a valid file with a field on each line, so that a table can break one and name its line.
const good = `region: eu-west-1
redis: {url: "redis://127.0.0.1:6379/0"}
version: 7
election: {mode: race}
refill_interval: 100ms
buckets:
  - key: checkout
    capacity: 1000
    rate: 500/s
listen: 127.0.0.1:9090
log: {level: info}
`

// template returns a file's field templates. Its only template has these fields and is on the second line.
func template(fields string) string { return "templates:\n  - {" + fields + "}\n" }

func TestParseReportsFieldLineAndRange(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name     string
		old, new string // replaced in good; an empty old appends
		field    string
		line     int
		says     string
	}{
		{"unknown field", "", "bukets: []\n", "bukets", 12, "did you mean buckets?"},
		{"unknown field without a suggestion", "", "colour: red\n", "colour", 12, "allowed are region, redis, version"},
		{"unknown field of redis", `{url: "redis://127.0.0.1:6379/0"}`, `{url: "redis://h", passwrd_file: f}`,
			"redis.passwrd_file", 2, "did you mean password_file?"},
		{"unknown field, letters swapped", `{url:`, `{ulr:`, "redis.ulr", 2, "did you mean url?"},
		{"unknown field of a bucket", "    rate: 500/s", "    rate: 500/s\n    initia: 3", "buckets[0].initia", 10,
			"did you mean initial?"},
		{"field given twice", "", "version: 8\n", "version", 12, "the first is on line 3"},
		{"region is a number", "eu-west-1", "17", "region", 1, "letters, digits and any of . _ -"},
		{"region with a space", "eu-west-1", "eu west", "region", 1, "1 to 128 letters, digits"},
		{"redis missing", "redis:", "region2:", "redis.url", 1, "it is required"},
		{"redis is text", `{url: "redis://127.0.0.1:6379/0"}`, "redis://127.0.0.1", "redis", 2, "want fields (url, "},
		{"url scheme", "redis://", "http://", "redis.url", 2, "want redis://host:port/db, rediss://"},
		{"url port", "127.0.0.1:6379", "127.0.0.1:99999", "redis.url", 2, "from 1 to 65535"},
		{"url database", "6379/0", "6379/-1", "redis.url", 2, "from 0 to 2147483647"},
		{"cluster with a database", "redis://127.0.0.1:6379/0", "redis-cluster://127.0.0.1:6379/3", "redis.url", 2,
			"only database 0"},
		{"sentinel without a master", "redis://127.0.0.1:6379/0", "redis-sentinel://127.0.0.1", "redis.url", 2,
			"name of the master"},
		{"password in the file", `6379/0"}`, `6379/0", password: hunter2}`, "redis.password", 2, "REFILLER_REDIS_PASSWORD"},
		{"tls without rediss", `6379/0"}`, `6379/0", tls: {ca: ca.pem}}`, "redis.tls", 2, "rediss://"},
		{"tls cert without key", `"redis://127.0.0.1:6379/0"}`, `"rediss://h", tls: {cert: c.pem}}`, "redis.tls.key", 2,
			"set both cert and key"},
		{"read timeout", `6379/0"}`, `6379/0", read_timeout: 2h}`, "redis.read_timeout", 2, "from 1ms to 1m"},
		{"pool size", `6379/0"}`, `6379/0", pool_size: 0}`, "redis.pool_size", 2, "from 1 to 10000"},
		{"version negative", "version: 7", "version: -1", "version", 3, "from 0 to 4503599627370495"},
		{"version is text", "version: 7", `version: "7"`, "version", 3,
			`"7" is text: want a whole number from 0 to 4503599627370495, without quotes`},
		{"mode", "race", "paxos", "election.mode", 4, `"paxos" is not one of race, etcd`},
		{"mode etcd without endpoints", "race", "etcd", "election.endpoints", 4, "it is required in mode etcd"},
		{"no endpoints in the list", "race", "etcd, endpoints: []", "election.endpoints", 4, "the list is empty"},
		{"endpoint without a port", "race", "etcd, endpoints: [h1:2379, h2]", "election.endpoints[1]", 4,
			"port from 1 to 65535"},
		{"endpoint twice", "race", "etcd, endpoints: [h1:2379, h1:2379]", "election.endpoints[1]", 4, "in the list twice"},
		{"endpoints is text", "race", "etcd, endpoints: h1:2379", "election.endpoints", 4, "want a list"},
		{"prefix", "race", "race, prefix: refiller/", "election.prefix", 4, "begin with a slash"},
		{"ttl below its range", "race", "race, ttl: 100ms", "election.ttl", 4, "from 1s to 10m in whole multiples of 1s"},
		{"ttl not whole seconds", "race", "race, ttl: 1500ms", "election.ttl", 4, "whole multiples of 1s"},
		{"etcd user without a password", "race", "race, username: u", "election.username", 4, "password_file"},
		{"etcd password without a user", "race", "race, password_file: f", "election.username", 4, "with password_file"},
		{"etcd tls with http", "race", "race, endpoints: [\"http://h:1\"], tls: {ca: f}", "election.tls", 4,
			"only with https endpoints"},
		{"zero interval", "100ms", "0s", "refill_interval", 5, "from 1ms to 1h"},
		{"interval without a unit", "100ms", "100", "refill_interval", 5, "has no unit: want a duration from 1ms to 1h"},
		{"interval in nanoseconds", "100ms", "1000001ns", "refill_interval", 5, "whole multiples of 1µs"},
		{"interval without a value", "100ms", "", "refill_interval", 5, "from 1ms to 1h"},
		{"buckets is a mapping", "buckets:\n  - key: checkout\n    capacity: 1000\n    rate: 500/s", "buckets: {}", "buckets",
			6, "want a list"},
		{"no buckets", "buckets:\n  - key: checkout\n    capacity: 1000\n    rate: 500/s", "buckets: []", "buckets", 6,
			"at least one"},
		{"buckets missing", "buckets:\n  - key: checkout\n    capacity: 1000\n    rate: 500/s\n", "", "buckets", 1,
			"at least one"},
		{"bucket is text", "  - key: checkout\n    capacity: 1000\n    rate: 500/s", "  - checkout", "buckets[0]", 7,
			"want fields (key, "},
		{"key missing", "  - key: checkout\n    capacity", "  - capacity", "buckets[0].key", 7, "1 to 512 bytes"},
		{"key empty", "checkout", `""`, "buckets[0].key", 7, "1 to 512 bytes"},
		{"key with a brace", "checkout", `"a}"`, "buckets[0].key", 7, "without }"},
		{"key too long", "checkout", strings.Repeat("k", 513), "buckets[0].key", 7, "1 to 512 bytes"},
		{"key is a number", "checkout", "12", "buckets[0].key", 7, "in quotes"},
		{"key with a control character", "checkout", `"a\x1b[31mb"`, "buckets[0].key", 7, `"a\x1b[31mb": want`},
		{"key with an invisible space", "checkout", "\"a\u00a0b\"", "buckets[0].key", 7, `"a\u00a0b": want`},
		{"key that turns text around", "checkout", "\"a\u202eb\"", "buckets[0].key", 7, "control characters"},
		{"key that refillers use", "checkout", "refiller:pulse", "buckets[0].key", 7, "or refiller: at the beginning"},
		{"prefix that refillers use", "", template(`prefix: "refiller:", enforce: lazy, capacity: 60, rate: 1/s`),
			"templates[0].prefix", 13, "refiller: at the beginning"},
		{"key twice", "listen:", "  - {key: checkout, capacity: 1, rate: 1/s}\nlisten:", "buckets[1].key", 10, "on line 7"},
		{"capacity missing", "    capacity: 1000\n", "", "buckets[0].capacity", 7, "from 1 to 1125899906842624"},
		{"capacity zero", "1000", "0", "buckets[0].capacity", 8, "from 1 to 1125899906842624"},
		{"capacity negative", "1000", "-1", "buckets[0].capacity", 8, "-1 is not a whole number from 1 to"},
		{"capacity a fraction", "1000", "1.5", "buckets[0].capacity", 8, "1.5 is not a whole number from 1 to"},
		{"capacity in exponents", "1000", "1e3", "buckets[0].capacity", 8, "1e3 is not a whole number from 1 to"},
		{"capacity huge", "1000", "99999999999999999999", "buckets[0].capacity", 8,
			"99999999999999999999 is not a whole number from 1 to"},
		{"capacity two to the 60", "1000", "1152921504606846976", "buckets[0].capacity", 8, "from 1 to 1125899906842624"},
		{"capacity is text", "1000", "many", "buckets[0].capacity", 8, `"many" is not a whole number from 1 to`},
		{"capacity is a list", "1000", "[1]", "buckets[0].capacity", 8, "a list is not a whole number from 1 to"},
		{"capacity below two intervals", "1000", "99", "buckets[0].capacity", 8,
			"99 is below 100, the tokens of two refill intervals"},
		{"rate missing", "    rate: 500/s\n", "", "buckets[0].rate", 7, "tokens/time such as 500/s"},
		{"rate unit", "500/s", "5/parsec", "buckets[0].rate", 9, "us, ms, s, m, h, d"},
		{"rate without a time", "500/s", "500", "buckets[0].rate", 9, "500 has no time: want tokens/time such as"},
		{"rate of no tokens", "500/s", "0/s", "buckets[0].rate", 9, "from 1 to 1125899906842624"},
		{"rate too fine", "capacity: 1000\n    rate: 500/s", "capacity: 1125899906842624\n    rate: 1125899906842623/d",
			"buckets[0].rate", 9, "use a coarser rate"},
		{"rate and every", "500/s", "500/s\n    every: 1h\n    tokens: 5", "buckets[0].every", 10,
			"one of rate, every and cron"},
		{"tokens with a rate", "500/s", "500/s\n    tokens: 5", "buckets[0].tokens", 10, "only with every or cron"},
		{"every without tokens", "rate: 500/s", "every: 1h", "buckets[0].tokens", 7, "from 1 to 1125899906842624"},
		{"every below the interval", "rate: 500/s", "every: 10ms\n    tokens: 1", "buckets[0].every", 9,
			"from the refill interval, 100ms"},
		{"every over a year", "rate: 500/s", "every: 9999h\n    tokens: 1", "buckets[0].every", 9, "from 1ms to 8784h"},
		{"tokens out of range", "rate: 500/s", "every: 1h\n    tokens: 0", "buckets[0].tokens", 10,
			"from 1 to 1125899906842624"},
		{"tokens above the capacity", "rate: 500/s", "every: 1h\n    tokens: 1001", "buckets[0].tokens", 10,
			"1001 is above the capacity, 1000"},
		{"cron", "rate: 500/s", "cron: every day\n    tokens: 1", "buckets[0].cron", 9, "want five fields"},
		{"cron that never comes", "rate: 500/s", "cron: 0 0 31 2 *\n    tokens: 1", "buckets[0].cron", 9,
			"no such day comes"},
		{"time zone", "rate: 500/s", "cron: 0 0 * * *\n    tokens: 1\n    time_zone: Mars/Olympus", "buckets[0].time_zone",
			11, "such as Europe/Berlin"},
		{"time zone of the machine", "rate: 500/s", "cron: 0 0 * * *\n    tokens: 1\n    time_zone: Local",
			"buckets[0].time_zone", 11, "such as Europe/Berlin"},
		{"time zone without cron", "500/s", "500/s\n    time_zone: UTC", "buckets[0].time_zone", 10, "only with cron"},
		{"initial above the capacity", "500/s", "500/s\n    initial: 1001", "buckets[0].initial", 10,
			"from 0 to the capacity, 1000"},
		{"initial negative", "500/s", "500/s\n    initial: -1", "buckets[0].initial", 10, "whole number from 0"},
		{"interval of a bucket", "500/s", "500/s\n    interval: 2h", "buckets[0].interval", 10, "from 1ms to 1h"},
		{"on_loss", "500/s", "500/s\n    on_loss: fill", "buckets[0].on_loss", 10,
			"is not one of empty, full: did you mean full?"},
		{"on_rollback", "500/s", "500/s\n    on_rollback: full", "buckets[0].on_rollback", 10, "is not one of empty, keep"},
		{"carry_over", "500/s", "500/s\n    carry_over: [keep]", "buckets[0].carry_over", 10,
			"is not one of keep, proportional, reset"},
		{"shadow", "500/s", "500/s\n    shadow: yes", "buckets[0].shadow", 10, "is not one of false, true"},
		{"strict", "500/s", "500/s\n    strict: 1", "buckets[0].strict", 10, "is not one of false, true"},
		{"degraded", "500/s", "500/s\n    degraded: yes", "buckets[0].degraded", 10, "is not one of closed, open, local"},
		{"listen port", "127.0.0.1:9090", "nowhere:99999999", "listen", 10, "port from 0 to 65535"},
		{"listen without a port", "127.0.0.1:9090", "localhost", "listen", 10, "port from 0 to 65535"},
		{"listen host", "127.0.0.1:9090", `"not a host:1"`, "listen", 10, "host:port"},
		{"log level", "level: info", "level: wran", "log.level", 11,
			"is not one of info, trace, debug, warn, error, off: did you mean warn?"},
		{"log format", "level: info", "format: xml", "log.format", 11, "is not one of text, json"},
		{"templates is a mapping", "", "templates: {}\n", "templates", 12, "want a list"},
		{"template is text", "", "templates:\n  - user\n", "templates[0]", 13, "want fields (prefix, "},
		{"strict of a lazy template", "", template("prefix: a, enforce: lazy, capacity: 60, rate: 1/s, strict: true"),
			"templates[0].strict", 13, "only with enforce: refilled"},
		{"prefix missing", "", template("enforce: lazy, capacity: 60, rate: 1/s"), "templates[0].prefix", 13,
			"it is required"},
		{"prefix with no value", "", template("prefix: , enforce: lazy, capacity: 60, rate: 1/s"), "templates[0].prefix", 13,
			"up to 256 bytes"},
		{"prefix with a brace", "", template(`prefix: "a}", enforce: lazy, capacity: 60, rate: 1/s`), "templates[0].prefix",
			13, "without }"},
		{"a star within a segment", "", template(`prefix: "a*", enforce: lazy, capacity: 60, rate: 1/s`),
			"templates[0].prefix", 13, "a * is a whole segment"},
		{"rate of a template", "", template(`prefix: "a", enforce: lazy, capacity: 60`), "templates[0].rate", 13,
			"it is required"},
		{"a template's calendar without tokens", "", template(`prefix: "a", capacity: 60, cron: "0 0 * * *"`),
			"templates[0].tokens", 13, "required with every and cron"},
		{"a lazy template's calendar", "", template(`prefix: a, enforce: lazy, capacity: 6, cron: "0 0 * * *", tokens: 6`),
			"templates[0].enforce", 13, "lazy goes with a rate"},
		{"a template's short step", "", template(`prefix: "a", capacity: 6, every: 500ms, tokens: 6`),
			"templates[0].every", 13, "from 1s to"},
		{"a template of many steps", "", template(`prefix: "a", capacity: 1001, every: 1s, tokens: 1`),
			"templates[0].capacity", 13, "full after at most 1000"},
		{"a template's rate and schedule", "", template(`prefix: "a", capacity: 6, rate: 1/s, every: 1s, tokens: 6`),
			"templates[0].every", 13, "one of rate, every and cron"},
		{"enforce", "", template(`prefix: "a", enforce: lasy, capacity: 60, rate: 1/s`), "templates[0].enforce", 13,
			"did you mean lazy?"},
		{"capacity of two intervals", "", template(`prefix: "a", capacity: 60, rate: 31/s, interval: 1s`),
			"templates[0].capacity", 13, "two refill intervals"},
		{"max_keys of a lazy template", "", template(`prefix: "a", enforce: lazy, capacity: 60, rate: 1/s, max_keys: 5`),
			"templates[0].max_keys", 13, "enforce: refilled"},
		{"a lazy template with initial", "", template(`prefix: "a", enforce: lazy, capacity: 60, rate: 1/s, initial: 5`),
			"templates[0].initial", 13, "begins full"},
		{"a refilled template with initial", "", template(`prefix: "a", capacity: 60, rate: 1/s, initial: 5`),
			"templates[0].initial", 13, "begins full"},
		{"on_loss of a template", "", template(`prefix: "a", capacity: 60, rate: 1/s, on_loss: full`),
			"templates[0].on_loss", 13, "comes back full"},
		{"on_loss of a lazy template", "", template(`prefix: "a", enforce: lazy, capacity: 60, rate: 1/s, on_loss: empty`),
			"templates[0].on_loss", 13, "comes back full"},
		{"prefix twice", "", template(`prefix: "a", enforce: lazy, capacity: 60, rate: 1/s`) +
			`  - {prefix: "a", enforce: lazy, capacity: 6, rate: 1/s}` + "\n",
			"templates[1].prefix", 14, "is there twice"},
		{"prefixes that cross", "", template(`prefix: "tenant:*:api", enforce: lazy, capacity: 60, rate: 1/s`) +
			`  - {prefix: "tenant:42:", enforce: lazy, capacity: 6, rate: 1/s}` + "\n",
			"templates[1].prefix", 14, "would be a guess"},
		{"anchor", "eu-west-1", "&r eu", "", 1, "anchors are not allowed"},
		{"alias", "region: eu-west-1", "region: &r eu\nlog: *r", "", 2, "aliases are not allowed"},
		{"merge key", "log: {level: info}", "log: {<<: {level: info}}", "", 11, "merge keys are not allowed"},
		{"tag", "version: 7", "version: !!int 7", "", 3, "tags are not allowed"},
		{"second document", "", "---\nversion: 8\n", "", 12, "a second document"},
		{"not YAML", "", "::: [\n", "", 12, "not YAML"},
		{"tab after a name", "version: 7", "version:\t- 7", "", 3, "there is a tab: indent with spaces"},
		{"tab", "    capacity: 1000", "\tcapacity: 1000", "", 8, "there is a tab: indent with spaces"},
		{"tab before a dash", "  - key: checkout", "\t- key: checkout", "", 7, "there is a tab: indent with spaces"},
		{"tab after spaces", "    rate: 500/s", "  \trate: 500/s", "", 9, "there is a tab: indent with spaces"},
		{"pools version", "", "pools_version: -1\n", "pools_version", 12, "from 0 to 4503599627370495"},
		{"password in the url", "redis://", "redis://u:p@", "redis.url", 2, "a password has no place in this file"},
		{"a field's name is a list", "version: 7", "[a, b]: 7", "", 3, "a field's name is a word"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			text := good + tc.new
			if tc.old != "" {
				require.Contains(t, good, tc.old)
				text = strings.Replace(good, tc.old, tc.new, 1)
			}
			_, err := parseText([]byte(text))
			var problems config.Problems
			require.ErrorAs(t, err, &problems)
			for _, p := range problems {
				require.Positive(t, p.Line)
				require.Positive(t, p.Column)
				if p.Field == tc.field && p.Line == tc.line && strings.Contains(p.Msg, tc.says) {
					return
				}
			}
			require.Failf(t, "not reported", "want %d: %s: ...%s...\ngot:\n%v", tc.line, tc.field, tc.says, err)
		})
	}
}

func TestParseRefusesWhatIsNoConfiguration(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ text, says string }{
		"empty":        {"", "1:1: the file is empty"},
		"blank":        {"\n \n", "the file is empty"},
		"comments":     {"# nothing\n", "the file is empty"},
		"null":         {"---\n", "the file is empty"},
		"text":         {"hello", `want fields such as redis and buckets, not "hello"`},
		"list":         {"- a\n- b\n", "not a list"},
		"binary":       {"\x00\x01\x02\xff", "not YAML"},
		"deep":         {strings.Repeat("[", 20_000), "not YAML"},
		"unclosed":     {`{"a": `, "not YAML"},
		"alias bomb":   {"a: &a [x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\nd: [*c,*c,*c]\n", "aliases are not allowed"},
		"alias itself": {"a: &a [*a]\n", "aliases are not allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := parseText([]byte(tc.text))
			var problems config.Problems
			require.ErrorAs(t, err, &problems)
			require.ErrorContains(t, err, tc.says)
		})
	}
}

func TestParseReportsAllProblemsInTheOrderOfTheFile(t *testing.T) {
	t.Parallel()
	_, err := parseText([]byte(`version: -1
refill_interval: 0s
buckets:
  - {key: a, capacity: 0, rate: x, initial: -4, on_loss: never}
  - {key: "}", capacity: 1, rate: 500/s}
  - {key: b, capacity: 1, rate: 500/s, initial: 9}
bukets: []
`))
	var problems config.Problems
	require.ErrorAs(t, err, &problems)
	var got []string
	for _, p := range problems {
		got = append(got, p.Field)
	}
	require.Equal(t, []string{
		"redis.url", "version", "refill_interval",
		"buckets[0].capacity", "buckets[0].rate", "buckets[0].initial", "buckets[0].on_loss",
		"buckets[1].key",
		"buckets[2].capacity", "buckets[2].initial",
		"bukets",
	}, got, "%v", err)
	require.Equal(t, len(problems), len(strings.Split(err.Error(), "\n")), "each problem has one line")
}
