package election

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Limits of [Config].
const (
	minTTL      = time.Second
	maxTTL      = 10 * time.Minute
	minWait     = 10 * time.Millisecond
	maxWait     = time.Minute
	maxIdentity = 256
	maxPrefix   = 256
)

// Config says how an [Elector] takes part in an election.
type Config struct {
	// Client is the connection to etcd. The caller closes it after Run has returned.
	Client *clientv3.Client

	// Prefix separates elections: candidates with the same prefix contend with each other. Keys are written under
	// Prefix + "/lead/". 1 to 256 bytes, no slash at the end.
	Prefix string

	// Identity names this candidate for people, in [Leader] and in etcd: 1 to 256 bytes. It has no effect on the election.
	Identity string

	// TTL is how long etcd keeps the key of a candidate that has stopped renewing its lease: whole seconds, from 1s to
	// 10m. A shorter TTL replaces a dead leader sooner; a longer one survives longer disturbances of etcd. etcd may grant
	// a longer time: at its default settings at least 2s.
	TTL time.Duration

	// SafetyMargin is the time between the end of the term's trust and the earliest end of its lease: from a hundredth to
	// half of TTL. It allows for clocks that run at different rates, and for the time that lead needs to stop.
	SafetyMargin time.Duration

	// RetryInterval is the pause between two campaigns, give or take half of it: from 10ms to 1m. After each campaign that
	// fails it doubles, up to sixteen times the value.
	RetryInterval time.Duration

	// ResignTimeout bounds how long resigning may take, and so how long Run may outlive lead: from 10ms to 1m.
	ResignTimeout time.Duration

	// Logger gets a line per transition. Nil means the default logger, named "refiller.election".
	Logger hclog.Logger
}

// DefaultConfig returns a Config in which Client and Identity are left to fill in.
func DefaultConfig() Config {
	return Config{
		Prefix:        "/refiller",
		TTL:           5 * time.Second,
		SafetyMargin:  time.Second,
		RetryInterval: 500 * time.Millisecond,
		ResignTimeout: 2 * time.Second,
	}
}

// Validate returns all that is wrong with c, each problem with the field's name, its value and the allowed range, or
// nil.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("election: "+format, args...)) }
	if c.Client == nil {
		bad("Client must not be nil")
	}
	if n := len(c.Prefix); n < 1 || n > maxPrefix || strings.HasSuffix(c.Prefix, "/") {
		bad("Prefix must have 1 to %d bytes and no slash at the end, not %q", maxPrefix, c.Prefix)
	}
	if n := len(c.Identity); n < 1 || n > maxIdentity {
		bad("Identity must have 1 to %d bytes, not %d (%.20q)", maxIdentity, n, c.Identity)
	}
	if c.TTL < minTTL || c.TTL > maxTTL || c.TTL%time.Second != 0 {
		bad("TTL must be whole seconds from %v to %v, not %v", minTTL, maxTTL, c.TTL)
	} else if lo, hi := c.TTL/100, c.TTL/2; c.SafetyMargin < lo || c.SafetyMargin > hi {
		bad("SafetyMargin must be %v to %v, a hundredth to half of TTL %v, not %v", lo, hi, c.TTL, c.SafetyMargin)
	}
	if d := c.RetryInterval; d < minWait || d > maxWait {
		bad("RetryInterval must be %v to %v, not %v", minWait, maxWait, d)
	}
	if d := c.ResignTimeout; d < minWait || d > maxWait {
		bad("ResignTimeout must be %v to %v, not %v", minWait, maxWait, d)
	}
	return errors.Join(errs...)
}

// loggerOr returns the logger, or the package's default if it is nil.
func loggerOr(l hclog.Logger) hclog.Logger {
	if l == nil {
		return hclog.Default().Named("refiller.election")
	}
	return l
}
