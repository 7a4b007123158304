package config

import (
	"errors"
	"net"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/tokenrefill/refiller/internal/credential"
	"github.com/tokenrefill/refiller/internal/redisconn"
	"github.com/tokenrefill/refiller/policy"
)

// Limits of fields.
const (
	maxVersion = 1<<53 - 1 // exact in the scripts
	maxRegion  = 128
	maxPrefix  = 256
	minTTL     = time.Second
	maxTTL     = 10 * time.Minute
)

func (d *decoder) config(root *yaml.Node) Config {
	names := []string{"region", "redis", "version", "election", "refill_interval", "buckets", "templates", "pools", "listen", "log"}
	o := value{d: d, node: root, parent: root}.object(names)
	c := Config{RefillInterval: policy.DefaultInterval, Listen: DefaultListen}
	c.Region = region(o.field("region"))
	c.Redis = redis(o.field("redis"))
	c.Version, _ = o.field("version").integer(0, maxVersion)
	c.Election = election(o.field("election"))
	if i, ok := o.field("refill_interval").interval(); ok {
		c.RefillInterval = i
	}
	c.Buckets = buckets(o.field("buckets"), c.RefillInterval, o.field("pools").present() || o.field("templates").present())
	c.Pools = pools(o.field("pools"), c.Buckets)
	c.Templates = templates(o.field("templates"), c.Version, c.RefillInterval, c.plain())
	if l, ok := listen(o.field("listen")); ok {
		c.Listen = l
	}
	c.Log = logging(o.field("log"))
	checkPools(o, c)
	return c
}

// interval reads a refill interval.
func (v value) interval() (time.Duration, bool) {
	return v.duration(policy.MinInterval, policy.MaxInterval, time.Microsecond)
}

var regionName = regexp.MustCompile(`^[A-Za-z0-9._-]+$`)

func region(v value) string {
	const want = "letters, digits and any of . _ -"
	s, ok := v.text(want)
	if ok {
		checkRegion(v, s)
	}
	return s
}

// checkRegion reports a name that no region can have.
func checkRegion(v value, name string) {
	if len(name) > maxRegion || !regionName.MatchString(name) {
		v.bad("%q: want 1 to %d letters, digits and any of . _ -", brief(name), maxRegion)
	}
}

func redis(v value) redisconn.Options {
	o := v.object([]string{"url", "username", "password_file", "sentinel_username", "sentinel_password_file", "tls",
		"dial_timeout", "read_timeout", "write_timeout", "pool_size"}, "password", "sentinel_password")
	before := len(v.d.problems)
	var r redisconn.Options
	if s, ok := o.secretText("url", redisconn.Forms); ok {
		u, err := redisconn.ParseURL(s)
		if err != nil {
			o.field("url").bad("%s", unwrapped(err, redisconn.ErrURL))
		}
		r.URL = u
	} else if !o.field("url").present() && (v.node == nil || v.node.Kind == yaml.MappingNode) {
		o.field("url").bad("it is required, here or in REFILLER_REDIS_URL: want %s", redisconn.Forms)
	}
	r.Username, _ = o.field("username").text("a user's name")
	r.Password = o.password("password", "REFILLER_REDIS_PASSWORD")
	r.SentinelUsername, _ = o.field("sentinel_username").text("a user's name")
	r.SentinelPassword = o.password("sentinel_password", "REFILLER_REDIS_SENTINEL_PASSWORD")
	r.TLS = tlsFiles(o.field("tls"))
	timeout := func(name string) time.Duration {
		d, _ := o.field(name).duration(redisconn.MinTimeout, redisconn.MaxTimeout, 1)
		return d
	}
	r.DialTimeout, r.ReadTimeout, r.WriteTimeout = timeout("dial_timeout"), timeout("read_timeout"), timeout("write_timeout")
	size, _ := o.field("pool_size").integer(1, redisconn.MaxPoolSize)
	r.PoolSize = int(size)
	if len(v.d.problems) == before {
		for _, err := range joined(r.Validate()) {
			var wrong *redisconn.OptionError
			if errors.As(err, &wrong) {
				o.field(wrong.Field).bad("%s", wrong.Msg)
			}
		}
	}
	return r
}

// secretText reads text that must not be shown.
func (o object) secretText(name, want string) (string, bool) {
	v := o.field(name)
	if v.node != nil && (v.node.Kind != yaml.ScalarNode || v.node.Tag != "!!str" || v.node.Value == "") {
		v.bad("want text: %s", want)
		return "", false
	}
	return v.text(want)
}

// password reads a password from the file that <name>_file names, or from the environment.
func (o object) password(name, variable string) credential.Password {
	if v := o.field(name); v.present() {
		if _, ok := o.d.sources[v.node]; !ok {
			v.bad("a password has no place in this file: name its own file in %s_file, or put it in %s", name, variable)
			return credential.Password{}
		}
		return credential.Plain(v.node.Value)
	}
	if path, ok := o.field(name + "_file").text("the path of a file"); ok {
		return credential.FromFile(path)
	}
	return credential.Password{}
}

func tlsFiles(v value) credential.TLS {
	o := v.object([]string{"ca", "cert", "key"})
	file := func(name string) string {
		s, _ := o.field(name).text("the path of a PEM file")
		return s
	}
	t := credential.TLS{CA: file("ca"), Cert: file("cert"), Key: file("key")}
	cert, key := o.field("cert"), o.field("key")
	if cert.present() && !key.present() {
		key.bad("it is missing: cert and key go together")
	} else if key.present() && !cert.present() {
		cert.bad("it is missing: cert and key go together")
	}
	return t
}

func election(v value) Election {
	o := v.object([]string{"mode", "endpoints", "prefix", "ttl", "username", "password_file", "tls"}, "password")
	e := Election{Mode: Mode(o.field("mode").choice(modes...)), Prefix: DefaultPrefix, TTL: DefaultTTL}
	e.Endpoints = endpoints(o.field("endpoints"))
	if e.Mode == ModeEtcd && !o.field("endpoints").present() {
		o.field("endpoints").bad("it is required in mode etcd: want the addresses of etcd, such as [127.0.0.1:2379]")
	}
	if s, ok := o.field("prefix").text("a prefix such as " + DefaultPrefix); ok {
		if !strings.HasPrefix(s, "/") || strings.HasSuffix(s, "/") || len(s) > maxPrefix {
			o.field("prefix").bad("%q: want 2 to %d bytes that begin with a slash and don't end with one", brief(s), maxPrefix)
		}
		e.Prefix = s
	}
	if d, ok := o.field("ttl").duration(minTTL, maxTTL, time.Second); ok {
		e.TTL = d
	}
	user := o.field("username")
	e.Username, _ = user.text("a user's name")
	e.Password = o.password("password", "REFILLER_ETCD_PASSWORD")
	hasPassword := o.field("password").present() || o.field("password_file").present()
	if user.present() && !hasPassword {
		user.bad("%s has no password: give password_file", describe(user.node))
	} else if hasPassword && !user.present() {
		user.bad("it is missing: etcd's password is that of a user")
	}
	e.TLS = tlsFiles(o.field("tls"))
	for i, endpoint := range e.Endpoints {
		if !e.TLS.IsZero() && strings.HasPrefix(endpoint, "http://") {
			o.field("tls").bad("it goes with https, but endpoints[%d] is %s", i, endpoint)
			break
		}
	}
	return e
}

func endpoints(v value) []string {
	const want = "host:port, http://host:port or https://host:port"
	var list []string
	seen := map[string]bool{}
	items := v.list()
	if v.present() && v.node.Kind == yaml.SequenceNode && len(items) == 0 {
		v.bad("the list is empty: want at least one %s", want)
	}
	for _, item := range items {
		s, ok := item.text(want)
		if !ok {
			continue
		}
		switch {
		case !isEndpoint(s):
			item.bad("%q: want %s, with a port from 1 to 65535", brief(redisconn.Redact(s)), want)
		case seen[s]:
			item.bad("%q is in the list twice", brief(s))
		}
		seen[s] = true
		list = append(list, s)
	}
	return list
}

func isEndpoint(s string) bool {
	if scheme, rest, found := strings.Cut(s, "://"); found {
		u, err := url.Parse(s)
		if err != nil || scheme != "http" && scheme != "https" || u.Host != rest {
			return false
		}
		s = rest
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || !redisconn.IsHost(host) {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

func listen(v value) (string, bool) {
	const want = "host:port with a port from 0 to 65535, such as 127.0.0.1:9090, or :9090 for all addresses"
	s, ok := v.text(want)
	if !ok {
		return "", false
	}
	host, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err != nil || host != "" && !redisconn.IsHost(host) {
		v.bad("%q: want %s", brief(s), want)
		return "", false
	}
	return s, true
}

var levels = []string{DefaultLogLevel, "trace", "debug", "warn", "error", "off"}

func logging(v value) Log {
	o := v.object([]string{"level", "format"})
	return Log{Level: levels[o.field("level").choice(levels...)], JSON: o.field("format").choice("text", "json") == 1}
}

// joined takes apart what errors.Join put together.
func joined(err error) []error {
	var many interface{ Unwrap() []error }
	if errors.As(err, &many) {
		return many.Unwrap()
	}
	return nil
}
