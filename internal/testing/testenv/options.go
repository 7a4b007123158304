package testenv

import "testing"

// Option changes how a server is started. An option that a kind of server does not have fails the test.
type Option func(*options)

type options struct {
	args     []string
	env      []string
	dataDir  string
	append   bool
	password string
	certs    *Certs
	program  string
	proxies  bool

	clock     bool
	clockFile string // where the offset of a clock that can be stepped is
}

func newOptions(opts []Option) options {
	var o options
	for _, apply := range opts {
		apply(&o)
	}
	return o
}

// refuseData fails a test that asks for a data directory or an append-only file where there is no such choice.
func (o options) refuseData(t testing.TB, server string) {
	t.Helper()
	if o.dataDir != "" || o.append {
		t.Fatalf("testenv: WithDataDir and WithAppendOnly are options of Redis, not of %s", server)
	}
}

// WithArgs adds command line arguments; they come last, so they override the defaults.
func WithArgs(args ...string) Option { return func(o *options) { o.args = append(o.args, args...) } }

// WithProgram runs a Redis server of another program, which takes the arguments of redis-server.
func WithProgram(path string) Option { return func(o *options) { o.program = path } }

// WithProxies puts a proxy in front of each server of a Sentinel or Cluster. Clients get the proxies' addresses in
// place of the servers', and so do servers that replicate.
func WithProxies() Option { return func(o *options) { o.proxies = true } }

// WithEnv adds "NAME=value" pairs to the environment of the server.
func WithEnv(env ...string) Option { return func(o *options) { o.env = append(o.env, env...) } }

// WithAppendOnly makes a Redis server write every command to disk before it answers. So its data survives Kill.
func WithAppendOnly() Option { return func(o *options) { o.append = true } }

// WithDataDir makes a Redis server store its files in an existing directory, which the caller removes. The default is
// the directory of the process.
func WithDataDir(dir string) Option { return func(o *options) { o.dataDir = dir } }

// WithPassword protects the server: with requirepass in Redis, in etcd by authentication as user "root". Clients made
// by this package know the password.
func WithPassword(password string) Option { return func(o *options) { o.password = password } }

// WithTLS makes the server accept only TLS, and only clients with a certificate of the same authority. Clients made by
// this package use certs. It is an option of Redis and of Etcd.
func WithTLS(certs *Certs) Option { return func(o *options) { o.certs = certs } }
