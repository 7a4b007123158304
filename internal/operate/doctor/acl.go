package doctor

import (
	"slices"
	"strings"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Role is the role of a user of Redis.
type Role string

// These are the roles.
const (
	Refiller Role = "refiller" // runs replicas, and the commands of operators
	Consumer Role = "consumer" // takes tokens: the SDK, the sidecar, the command line
)

// Names has the names in a deployment that determine the rights of its users.
type Names struct {
	Any       bool     // the names of the buckets are not known, so the rights are for every key
	Buckets   []string // configured buckets, and pools
	Templates []*policy.CompiledTemplate
	Cluster   bool
}

// NamesOf returns the names of a configuration's buckets.
func NamesOf(cfg config.Config, cluster bool) Names {
	n := Names{Templates: cfg.Templates.All(), Cluster: cluster}
	for _, b := range cfg.Buckets {
		n.Buckets = append(n.Buckets, b.Key)
	}
	for _, p := range cfg.OwnPools() {
		n.Buckets = append(n.Buckets, p.Name)
	}
	return n
}

// both are the commands that refillers and consumers send, and those that their scripts call.
var both = []string{
	"ping", "evalsha", "eval", "script|load", "time", "get", "mget", "set", "del", "exists", "incr", "decr", "incrby",
	"decrby", "hget", "hgetall", "hmget", "hset", "hdel", "hincrby", "hlen", "zadd", "zcard", "zrange", "zrangebyscore",
	"zrem", "zremrangebyscore", "zscore", "pexpire", "pttl", "pexpiretime", "pexpireat", "persist", "sadd", "srem",
}

// refillers are the commands that only refillers need. These commands read the active sets and the overrides.
var refillers = []string{"scard", "sscan"}

// limiters are the further commands of programs with limiters of package limit, such as a sidecar with a file of
// limits, and those of limit.Reset.
var limiters = []string{"zcount", "zrevrange", "zrevrangebyscore", "unlink", "scan"}

// cluster are the further commands that are needed on a Cluster.
var cluster = []string{"cluster|shards", "cluster|slots"}

// Rights are the rights of a user of Redis.
type Rights struct {
	Keys     []string // patterns as they follow ~ in Redis; a pattern that begins with % gets no ~
	Commands []string
}

// RightsOf returns the smallest rights that a role needs.
func RightsOf(role Role, names Names) Rights {
	r := Rights{Commands: slices.Clone(both)}
	if role == Refiller {
		r.Commands = append(r.Commands, refillers...)
	}
	if names.Cluster {
		r.Commands = append(r.Commands, cluster...)
	}
	r.Keys = keysOf(role, names)
	return r
}

// LimiterCommands returns the commands that a consumer's user needs in addition if the program has limiters.
func LimiterCommands() []string { return slices.Clone(limiters) }

// keysOf returns the patterns of the keys that a role touches.
func keysOf(role Role, names Names) []string {
	if names.Any || slices.ContainsFunc(names.Templates, func(t *policy.CompiledTemplate) bool { return t.Prefix == "" }) {
		return []string{"*"}
	}
	var keys []string
	for _, name := range names.Buckets {
		keys = append(keys, literal(name), literal(lua.IndexKey(name))+"*")
	}
	for _, t := range names.Templates {
		if role == Refiller || t.Enforce == policy.EnforceRefilled { // takes of lazy buckets use only a key with braces
			keys = append(keys, literal(t.Prefix)+"*")
		}
		keys = append(keys, "{"+literal(t.Prefix)+"*")
	}
	if role == Refiller {
		return append(keys, config.Reserved+"*", "{"+config.Reserved+"*")
	}
	for _, t := range names.Templates {
		if t.Enforce == policy.EnforceRefilled {
			// These patterns match each shard of the active set, and the set of the buckets that are alive. The scripts
			// of takes name both keys, even if the template has no max_keys. The scripts of budgets name only the
			// second key.
			keys = append(keys, "{"+config.Reserved+"active:*}:set:"+literal(t.Prefix), literal(lua.AliveKey(t.Prefix)))
		}
	}
	// These patterns match the keys of the doctor's own buckets.
	keys = append(keys, rehearsed+"*", "{"+rehearsed+"*", "{"+config.Reserved+"a*:"+templated+"*")
	return append(keys, "%R~"+literal(lua.TemplatesKey), "%R~"+strings.TrimSuffix(lua.ProbeKey(0), "0")+"*")
}

// ACL returns the definition of a user with these rights and without a password, for users.acl or after ACL SETUSER.
func (r Rights) ACL(user string) string {
	words := []string{"user", user, "on", "resetchannels"}
	for _, key := range r.Keys {
		if !strings.HasPrefix(key, "%") {
			key = "~" + key
		}
		words = append(words, key)
	}
	words = append(words, "-@all")
	for _, command := range r.Commands {
		words = append(words, "+"+command)
	}
	return strings.Join(words, " ")
}

// literal returns a pattern that matches one name. A pattern can't have spaces, and quotes would end a word of
// redis-cli. So each of these characters is replaced by a question mark, which matches any character.
func literal(name string) string {
	var b strings.Builder
	for _, c := range []byte(name) {
		switch {
		case c <= ' ' || c == '"' || c == '\'' || c == 0x7f:
			b.WriteByte('?')
		case strings.IndexByte(`*?[\`, c) >= 0:
			b.WriteByte('\\')
			b.WriteByte(c)
		default:
			b.WriteByte(c)
		}
	}
	return b.String()
}
