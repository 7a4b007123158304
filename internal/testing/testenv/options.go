package testenv

import "testing"

// Option changes how a server is started. The test fails if the kind of server doesn't support the option.
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
	clockFile string // the file with the offset of the clock, if clock is set
}

func newOptions(opts []Option) options {
	var o options
	for _, apply := range opts {
		apply(&o)
	}
	return o
}

// refuseData fails the test if the options have a data directory or an append-only file, which the server doesn't
// support.
func (o options) refuseData(t testing.TB, server string) {
	t.Helper()
	if o.dataDir != "" || o.append {
		t.Fatalf("testenv: WithDataDir and WithAppendOnly are options of Redis, not of %s", server)
	}
}

// WithArgs adds command line arguments. They come last, so they override the defaults.
func WithArgs(args ...string) Option { return func(o *options) { o.args = append(o.args, args...) } }

// WithProgram runs another program in place of redis-server. It must accept the arguments of redis-server.
func WithProgram(path string) Option { return func(o *options) { o.program = path } }

// WithProxies puts a proxy in front of each server of a Sentinel or Cluster. Clients and replicas get the addresses of
// the proxies in place of the servers' own addresses.
func WithProxies() Option { return func(o *options) { o.proxies = true } }

// WithEnv adds "NAME=value" pairs to the environment of the server.
func WithEnv(env ...string) Option { return func(o *options) { o.env = append(o.env, env...) } }

// WithAppendOnly makes a Redis server write every command to disk before it answers. So its data survives Kill.
func WithAppendOnly() Option { return func(o *options) { o.append = true } }

// WithDataDir makes a Redis server store its files in an existing directory, which the caller removes. The default is
// the directory of the process.
func WithDataDir(dir string) Option { return func(o *options) { o.dataDir = dir } }

// WithPassword protects the server with a password. Redis gets it as requirepass, and etcd as the password of the user
// "root". Clients made by this package know the password.
func WithPassword(password string) Option { return func(o *options) { o.password = password } }

// WithTLS makes the server accept only TLS, and only clients with a certificate of the same authority. Clients made by
// this package use certs. Only Redis and Etcd support the option.
func WithTLS(certs *Certs) Option { return func(o *options) { o.certs = certs } }
