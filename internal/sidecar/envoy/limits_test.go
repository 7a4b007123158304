package envoy

import (
	_ "embed"
	"testing"

	"github.com/stretchr/testify/require"
)

// edge is a file as an operator writes it.
//
//go:embed testdata/edge.yaml
var edge string

func parse(t testing.TB, files ...string) (*Limits, error) {
	t.Helper()
	m := make(map[string][]byte)
	for i, f := range files {
		m[string(rune('a'+i))+".yaml"] = []byte(f)
	}
	return Parse(m, nil)
}

func TestDescriptorsMatchAsInTheReferenceService(t *testing.T) {
	t.Parallel()
	limits, err := parse(t, edge)
	require.NoError(t, err)
	root := limits.domains["edge"]
	for name, c := range map[string]struct {
		entries []entry
		want    string // a window's unit, a bucket's name, or unlimited; empty if no limit applies
	}{
		"exact value":                      {[]entry{{"generic_key", "checkout"}}, "checkout"},
		"another value":                    {[]entry{{"generic_key", "mail"}}, ""},
		"any value":                        {[]entry{{"partner", "acme"}}, "edge:partner_acme"},
		"nested":                           {[]entry{{"partner", "acme"}, {"route", "/pay"}}, "acme/%2Fpay"},
		"deeper than the file":             {[]entry{{"partner", "acme"}, {"route", "/pay"}, {"x", "y"}}, ""},
		"less deep than the limit":         {[]entry{{"nested", "x"}}, ""},
		"exact before any":                 {[]entry{{"remote_address", "10.0.0.1"}}, "unlimited"},
		"prefix before any":                {[]entry{{"remote_address", "192.168.7.7"}}, "second"},
		"any":                              {[]entry{{"remote_address", "10.0.0.2"}}, "minute"},
		"no such key":                      {[]entry{{"user", "7"}}, ""},
		"other key first":                  {[]entry{{"user", "7"}, {"partner", "acme"}}, ""},
		"nested prefix":                    {[]entry{{"nested", ""}, {"deep", "abc"}}, "hour"},
		"nested, without the prefix":       {[]entry{{"nested", ""}, {"deep", "bcd"}}, ""},
		"an empty value for any value":     {[]entry{{"partner", ""}}, "edge:partner_"},
		"a key that looks like key_value":  {[]entry{{"generic_key_checkout", ""}}, ""},
		"stars in the middle":              {[]entry{{"path", "/v2/users/7"}}, "minute"},
		"stars that match nothing":         {[]entry{{"path", "/v/users/"}}, "minute"},
		"a part of the pattern is missing": {[]entry{{"path", "/v2/users"}}, ""},
		"texts that overlap":               {[]entry{{"path", "/vusers/"}}, ""},
		"a value that looks like a prefix": {[]entry{{"remote_address", "192.168.*"}}, "second"},
	} {
		got := ""
		if l, entries := root.match(c.entries); l != nil {
			switch {
			case l.unlimited:
				got = "unlimited"
			case l.window != nil:
				got = l.per.unit.name
			default:
				got = l.bucket.name("edge", entries)
			}
		}
		require.Equal(t, c.want, got, name)
	}
	_, named := root.match([]entry{{"remote_address", "192.168.7.7"}})
	require.Equal(t, []entry{{"remote_address", "192.168.*"}}, named, "all values of the pattern share one limit")
	_, named = root.match([]entry{{"nested", "x"}, {"deep", "abc"}})
	require.Equal(t, []entry{{"nested", "x"}, {"deep", "abc"}}, named, "each value has its own limit")
}

func TestEveryProblemOfAFileIsNamed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ file, says string }{
		"no domain":     {"descriptors: []", "domain: it is missing"},
		"unknown field": {"domain: d\ndescriptor: []", "field descriptor not found"},
		"not YAML":      {"domain: [", "a.yaml"},
		"two documents": {"domain: d\n---\ndomain: e", "more than one document"},
		"wrong type":    {"domain: d\ndescriptors: 7", "line 2"},
		"no key": {"domain: d\ndescriptors: [{value: v, rate_limit: {bucket: b}}]",
			"descriptors[0].key: it is missing"},
		"twice":         {"domain: d\ndescriptors: [{key: k, rate_limit: {bucket: b}}, {key: k, rate_limit: {bucket: b}}]", `descriptors[1]: two descriptors have the key "k" and the value ""`},
		"pattern twice": {"domain: d\ndescriptors: [{key: k, value: a*, rate_limit: {bucket: b}}, {key: k, value: a*, rate_limit: {bucket: b}}]", "two descriptors have the key"},
		"empty limit": {"domain: d\ndescriptors: [{key: k, rate_limit: {}}]",
			"descriptors[0].rate_limit: want exactly one of these: bucket; unit and requests_per_unit; unlimited without up_to"},
		"two kinds": {"domain: d\ndescriptors: [{key: k, rate_limit: {bucket: b, unit: second, requests_per_unit: 1}}]",
			"want exactly one of"},
		"unlimited bucket": {"domain: d\ndescriptors: [{key: k, rate_limit: {bucket: b, unlimited: true}}]",
			"want exactly one of"},
		"no unit": {"domain: d\ndescriptors: [{key: k, rate_limit: {requests_per_unit: 1}}]",
			`rate_limit.unit: "" is not one of second`},
		"odd unit": {"domain: d\ndescriptors: [{key: k, rate_limit: {unit: fortnight, requests_per_unit: 1}}]",
			`"fortnight" is not one of`},
		"no requests": {"domain: d\ndescriptors: [{key: k, rate_limit: {unit: second}}]",
			"requests_per_unit: it is missing"},
		"negative": {"domain: d\ndescriptors: [{key: k, rate_limit: {unit: second, requests_per_unit: -1}}]",
			"descriptors[0].rate_limit.requests_per_unit: line 2: -1 is not a whole number from 0 to 4294967295"},
		"too many": {"domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 4294967296}}]",
			"line 2: 4294967296 is not a whole number from 0 to 4294967295"},
		"half a request": {"domain: d\ndescriptors: [{key: k, rate_limit: {unit: second, requests_per_unit: 0.5}}]",
			"descriptors[0].rate_limit.requests_per_unit: line 2: 0.5 is not a whole number"},
		"odd placeholder": {`{domain: d, descriptors: [{key: k, rate_limit: {bucket: "{user}"}}]}`,
			"{user} is not one of {domain}"},
		"value of an unknown key": {`{domain: d, descriptors: [{key: k, rate_limit: {bucket: "{value:j}"}}]}`,
			`neither this descriptor nor a descriptor above it has the key "j"`},
		"open brace":       {`{domain: d, descriptors: [{key: k, rate_limit: {bucket: "a{value"}}]}`, "an opening brace"},
		"close brace":      {`{domain: d, descriptors: [{key: k, rate_limit: {bucket: "a}"}}]}`, "a closing brace"},
		"values together":  {`{domain: d, descriptors: [{key: k, descriptors: [{key: j, rate_limit: {bucket: "{value:k}{value}"}}]}]}`, "descriptors[0].descriptors[0].rate_limit.bucket"},
		"shadow, no limit": {"domain: d\ndescriptors: [{key: k, shadow_mode: true, descriptors: [{key: j, rate_limit: {bucket: b}}]}]", "need a rate_limit"},
		"shadow and quota": {"domain: d\ndescriptors: [{key: k, shadow_mode: true, quota_mode: true, rate_limit: {bucket: b}}]", "can't be used together"},
		"share, no star": {"domain: d\ndescriptors: [{key: k, value: v, share_threshold: true, rate_limit: {bucket: b}}]",
			"it needs a value that contains a *"},
		"a star in a key": {"domain: d\ndescriptors: [{key: 'k*', rate_limit: {bucket: b}}]", "not allowed in keys"},
		"odd metadata": {"domain: d\ndescriptors: [{key: k, metadata: {a: 2026-11-22}, rate_limit: {bucket: b}}]",
			"metadata: proto"},
		"metadata alone": {"domain: d\ndescriptors: [{key: k, metadata: {a: b}}]", "need a rate_limit"},
		"unlimited with up_to": {"domain: d\ndescriptors: [{key: k, rate_limit: {unlimited: true, up_to: true}}]",
			"want exactly one of"},
		"replaces itself": {"domain: d\ndescriptors: [{key: k, rate_limit: {bucket: b, name: n, replaces: [{name: n}]}}]",
			"rate_limit.replaces[0]: want the name of another"},
	} {
		_, err := parse(t, c.file)
		require.ErrorIs(t, err, ErrLimits, name)
		require.ErrorContains(t, err, c.says, name)
		require.ErrorContains(t, err, "a.yaml", name)
	}
	_, err := parse(t, "domain: d", "domain: d")
	require.ErrorContains(t, err, `b.yaml: domain: "d" is also the domain of another file`)
	_, err = parse(t, "descriptors: [{value: v, rate_limit: {bucket: b}}]", "domain: e\ndescriptors: [{key: 'a*'}]")
	require.ErrorContains(t, err, "a.yaml: domain")
	require.ErrorContains(t, err, "a.yaml: descriptors[0].key")
	require.ErrorContains(t, err, "b.yaml: descriptors[0]")
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(edge))
	f.Add([]byte("domain: d\ndescriptors: [{key: k, value: '*', rate_limit: {bucket: '{descriptor}-{value:k}'}}]"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		limits, err := parse(t, string(data))
		if err != nil {
			require.ErrorIs(t, err, ErrLimits)
			return
		}
		for _, root := range limits.domains {
			root.match([]entry{{"k", "v"}, {"j", "w"}})
		}
	})
}
