package config

import (
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	maxVersion = policy.OwnEpoch - 1
	maxPrefix  = 256
	// Reserved is the beginning of the keys in Redis that only refillers use.
	Reserved = "refiller:"
)

// kinds are the kinds of the values in a file, by their names in the tags of fields.
var kinds = redisconn.Kinds.And(etcdconn.Kinds).And(fields.Kinds{
	"version":  fields.Integer(0, maxVersion),
	"interval": fields.Duration(policy.MinInterval, policy.MaxInterval, time.Microsecond),
	"listen":   fields.Text(wantListen, readListen),
	"level":    fields.Choice(func(i int) string { return levels[i] }, levels...),
	"format":   fields.Choice(func(i int) bool { return i == 1 }, "text", "json"),
	"truth":    fields.Truth(),

	"mode": fields.Choice(func(i int) Mode { return Mode(i) }, modes...),
	"prefix": fields.Matching(fmt.Sprintf("2 to %d bytes that begin with a slash and don't end with one", maxPrefix),
		regexp.MustCompile(`^/.{0,254}[^/]$`)),
	"ttl": fields.Duration(time.Second, 10*time.Minute, time.Second),

	"key":            keyKind(),
	"tokens":         fields.Integer(1, policy.MaxTokens),
	"tokens or none": fields.Integer(0, policy.MaxTokens),
	"rate":           rateKind(),
	"step":           fields.Duration(policy.MinInterval, policy.MaxPer, time.Microsecond),
	"cron":           fields.Text(wantCron, nil),
	"zone":           fields.Text(wantZone, readZone),

	"on_loss":     fields.Choice(func(i int) policy.Loss { return policy.Loss(i) }, losses...),
	"on_rollback": fields.Choice(func(i int) policy.Rollback { return policy.Rollback(i) }, rollbacks...),
	"carry_over":  fields.Choice(func(i int) policy.CarryOver { return policy.CarryOver(i) }, carryOvers...),
	"degraded":    fields.Choice(func(i int) policy.Degraded { return policy.Degraded(i) }, degradeds...),

	"template prefix":   prefixKind(),
	"not of a template": {Want: policy.WhyNoLoss},
	"enforce": fields.Choice(func(i int) policy.Enforce { return policy.Enforce(i) },
		policy.EnforceRefilled.String(), policy.EnforceLazy.String()),

	"region": fields.Matching("1 to 128 letters, digits and any of . _ -",
		regexp.MustCompile(`^[A-Za-z0-9._-]{1,128}$`)),
	"pool": fields.Matching("1 to 128 letters, digits and any of . _ : -",
		regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)),
	"weight":      fields.Integer(1, policy.MaxWeight),
	"floor share": fields.Percent(1, 100),

	"headroom":     fields.Percent(0, policy.MaxHeadroom),
	"flow weights": weightsKind(),
	"most flows":   fields.Integer(1, policy.MaxFlows),
})

const (
	wantListen = "host:port with a port from 0 to 65535, such as 127.0.0.1:9090, or :9090 for all addresses"
	wantCron   = "five fields: minute, hour, day of month, month, day of week; or a word such as @daily"
	wantZone   = "the name of a time zone such as Europe/Berlin or UTC"
)

var (
	levels = []string{"info", "trace", "debug", "warn", "error", "off"}
	modes  = []string{"race", "etcd"}

	losses     = []string{"empty", "full"}
	rollbacks  = []string{"empty", "keep"}
	carryOvers = []string{"keep", "proportional", "reset"}
	degradeds  = []string{"closed", "open", "local"}
)

func readListen(s string) (any, string) {
	host, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || host != "" && !fields.IsHost(host) {
		return nil, fields.Quote(s) + ": want " + wantListen
	}
	return s, ""
}

// keyKind returns the kind of names of buckets.
func keyKind() fields.Kind {
	const want = "a bucket's name of 1 to 512 bytes without }, control characters, or refiller: at the beginning"
	return fields.Text(want, func(s string) (any, string) {
		if lua.CheckKey(s) != nil || strings.HasPrefix(s, Reserved) || strings.ContainsFunc(s, invisible) {
			return nil, fields.Quote(s) + ": want " + want
		}
		return s, ""
	})
}

// invisible reports whether r can't be seen in text, or makes other text appear different. These are control
// characters, unusual spaces, and marks that change the direction of text.
func invisible(r rune) bool { return !unicode.IsPrint(r) }

// prefixKind returns the kind of prefixes of templates, which may be empty. Package policy checks the rest.
func prefixKind() fields.Kind {
	want := fmt.Sprintf(`the beginning of the buckets' names, such as "user:" or "tenant:*:api", of up to %d bytes; `+
		`"" for all names`, policy.MaxPrefix)
	k := fields.Text(want, func(s string) (any, string) {
		if strings.HasPrefix(s, Reserved) || strings.ContainsFunc(s, invisible) {
			return nil, fields.Quote(s) + ": no control characters, nor refiller: at the beginning: want " + want
		}
		return s, ""
	})
	text := k.Read
	k.Read = func(n *yaml.Node) (any, string) {
		if n.Kind == yaml.ScalarNode && n.Tag == "!!str" && n.Value == "" {
			return "", ""
		}
		return text(n)
	}
	return k
}

func rateKind() fields.Kind {
	const want = "tokens/time such as 500/s, 10/m or 1000/24h"
	k := fields.Text(want, func(s string) (any, string) {
		r, err := policy.ParseRate(s)
		switch {
		case err != nil && strings.ContainsFunc(s, invisible):
			return nil, fields.Quote(s) + ": want " + want
		case err != nil:
			return nil, strings.TrimPrefix(err.Error(), policy.ErrRate.Error()+" ")
		}
		return r, ""
	})
	text := k.Read
	k.Read = func(n *yaml.Node) (any, string) {
		if _, err := strconv.ParseInt(n.Value, 10, 64); err == nil {
			return nil, n.Value + " has no time: want " + want
		}
		return text(n)
	}
	k.Schema["pattern"] = `^ *[0-9]+ */ *[0-9.]*(ns|us|µs|ms|s|m|h|d|w)( *[0-9.]+(ns|us|µs|ms|s|m|h))* *$`
	return k
}

// weightsKind returns the kind of a mapping from beginnings of flows' names to weights.
func weightsKind() fields.Kind {
	want := fmt.Sprintf(
		"up to %d weights from 1 to %d; each key is the beginning of names of flows, such as {\"gold/\": 5}",
		policy.MaxFlowWeights, policy.MaxFlowWeight)
	read := func(n *yaml.Node) (any, string) {
		weights := map[string]int64{}
		if n.Kind != yaml.MappingNode || len(n.Content) > 2*policy.MaxFlowWeights {
			return nil, "want " + want
		}
		for i := 0; i < len(n.Content); i += 2 {
			name, text := n.Content[i].Value, n.Content[i+1].Value
			weight, err := strconv.ParseInt(text, 10, 64)
			switch {
			case err != nil || weight < 1 || weight > policy.MaxFlowWeight:
				return nil, fmt.Sprintf("that of %s is %s: want %s", fields.Quote(name), fields.Brief(text), want)
			case name == "" || len(name) > policy.MaxFlowLen || strings.ContainsFunc(name, invisible):
				return nil, fmt.Sprintf("no flow has a name that begins with %s: want %s", fields.Quote(name), want)
			case weights[name] != 0:
				return nil, fmt.Sprintf("%s is there twice", fields.Quote(name))
			}
			weights[name] = weight
		}
		return weights, ""
	}
	return fields.Kind{Want: want, Read: read, Schema: map[string]any{
		"type": "object", "maxProperties": policy.MaxFlowWeights,
		"additionalProperties": map[string]any{"type": "integer", "minimum": 1, "maximum": policy.MaxFlowWeight},
	}}
}

func readZone(s string) (any, string) {
	zone, err := time.LoadLocation(s)
	if err != nil || strings.EqualFold(s, "local") { // local would differ between replicas
		return nil, fields.Quote(s) + ": want " + wantZone
	}
	return zone, ""
}
