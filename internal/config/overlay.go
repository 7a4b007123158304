package config

import (
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/redisconn"
)

// Override is a value that stands instead of the file's.
type Override struct {
	Source string // what to call it in a Problem: the flag or variable, such as --listen
	Field  string // dotted path of a field that the environment can set too, such as redis.url
	Value  string // as in the file; with commas between for a list
}

// environment lists the variables and the fields that they set. Of two about one field, the later counts.
var environment = []struct{ name, field string }{
	{"REFILLER_REGION", "region"},
	{"REFILLER_LISTEN", "listen"},
	{"REFILLER_LOG_LEVEL", "log.level"},
	{"REFILLER_LOG_FORMAT", "log.format"},
	{"REFILLER_REDIS_URL", "redis.url"},
	{"REFILLER_REDIS_USERNAME", "redis.username"},
	{"REFILLER_REDIS_PASSWORD_FILE", "redis.password_file"},
	{"REFILLER_REDIS_PASSWORD", "redis.password"},
	{"REFILLER_REDIS_SENTINEL_PASSWORD", "redis.sentinel_password"},
	{"REFILLER_REDIS_CA", "redis.tls.ca"},
	{"REFILLER_REDIS_CERT", "redis.tls.cert"},
	{"REFILLER_REDIS_KEY", "redis.tls.key"},
	{"REFILLER_ELECTION_MODE", "election.mode"},
	{"REFILLER_ETCD_ENDPOINTS", "election.endpoints"},
	{"REFILLER_ETCD_USERNAME", "election.username"},
	{"REFILLER_ETCD_PASSWORD_FILE", "election.password_file"},
	{"REFILLER_ETCD_PASSWORD", "election.password"},
	{"REFILLER_ETCD_CA", "election.tls.ca"},
	{"REFILLER_ETCD_CERT", "election.tls.cert"},
	{"REFILLER_ETCD_KEY", "election.tls.key"},
}

// replaces lists, for a field that is laid over the file, the fields that say the same in another way and so go.
var replaces = map[string][]string{
	"redis.password":               {"redis.password_file"},
	"redis.password_file":          {"redis.password"},
	"redis.sentinel_password":      {"redis.sentinel_password_file"},
	"election.password":            {"election.password_file"},
	"election.password_file":       {"election.password"},
	"redis.url, with a credential": {"redis.username", "redis.password", "redis.password_file"},
}

func fromEnvironment(getenv func(string) string) []Override {
	var overrides []Override
	for _, e := range environment {
		if v := getenv(e.name); v != "" {
			overrides = append(overrides, Override{Source: e.name, Field: e.field, Value: v})
		}
	}
	return overrides
}

// lay puts a value into the tree at its field. Where the file has something else than fields on the way, that stays and
// is reported.
func (d *decoder) lay(root *yaml.Node, o Override) {
	gone := replaces[o.Field]
	if o.Field == "redis.url" {
		if u, err := redisconn.ParseURL(o.Value); err == nil && (u.Username != "" || !u.Password.IsZero()) {
			gone = replaces["redis.url, with a credential"]
		}
	}
	for _, field := range gone {
		section, name, _ := strings.Cut(field, ".")
		if s := child(root, section); s != nil {
			remove(s, name)
		}
	}

	n := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: o.Value}
	d.sources[n] = o.Source
	if o.Field == "election.endpoints" {
		list := &yaml.Node{Kind: yaml.SequenceNode}
		d.sources[list] = o.Source
		for item := range strings.SplitSeq(o.Value, ",") {
			e := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: strings.TrimSpace(item)}
			d.sources[e] = o.Source
			list.Content = append(list.Content, e)
		}
		n = list
	}
	at := root
	words := strings.Split(o.Field, ".")
	for _, word := range words[:len(words)-1] {
		next := child(at, word)
		if next == nil || isNull(next) {
			next = &yaml.Node{Kind: yaml.MappingNode}
			d.sources[next] = o.Source
			d.set(at, word, next, o.Source)
		}
		if next.Kind != yaml.MappingNode {
			return
		}
		at = next
	}
	d.set(at, words[len(words)-1], n, o.Source)
}

func child(mapping *yaml.Node, name string) *yaml.Node {
	if mapping.Kind == yaml.MappingNode {
		for i := 0; i+1 < len(mapping.Content); i += 2 {
			if mapping.Content[i].Value == name {
				return mapping.Content[i+1]
			}
		}
	}
	return nil
}

func (d *decoder) set(mapping *yaml.Node, name string, n *yaml.Node, source string) {
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if mapping.Content[i].Value == name {
			mapping.Content[i+1] = n
			return
		}
	}
	key := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name}
	d.sources[key] = source
	mapping.Content = append(mapping.Content, key, n)
}

func remove(mapping *yaml.Node, name string) {
	for i := 0; mapping.Kind == yaml.MappingNode && i+1 < len(mapping.Content); {
		if mapping.Content[i].Value == name {
			mapping.Content = append(mapping.Content[:i], mapping.Content[i+2:]...)
		} else {
			i += 2
		}
	}
}
