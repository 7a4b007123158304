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

// Config configures an [Elector].
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
	// a longer time. At its default settings it grants at least 2s.
	TTL time.Duration

	// SafetyMargin is how long before the earliest end of its lease a leader stops trusting its term. Its range is from a
	// hundredth to half of TTL. It allows for clocks that run at different rates, and for the time that the function which
	// Run calls needs to stop.
	SafetyMargin time.Duration

	// RetryInterval is the mean pause between two campaigns, from 10ms to 1m. Each pause is random, and differs from the
	// mean by at most half of it. The mean doubles after each campaign that fails, up to sixteen times RetryInterval.
	RetryInterval time.Duration

	// ResignTimeout is the longest time that resigning may take, from 10ms to 1m. Run returns at most this long after its
	// context has ended and the function that it calls has returned.
	ResignTimeout time.Duration

	// Logger logs the begin and the end of each term, and when etcd becomes unavailable or available. Nil means the
	// default logger, named "refiller.election".
	Logger hclog.Logger
}

// DefaultConfig returns the default values. The caller must set Client and Identity, which have none.
func DefaultConfig() Config {
	return Config{
		Prefix:        "/refiller",
		TTL:           5 * time.Second,
		SafetyMargin:  time.Second,
		RetryInterval: 500 * time.Millisecond,
		ResignTimeout: 2 * time.Second,
	}
}

// Validate returns nil if c is valid. Otherwise it returns an error that lists all invalid fields, each with its value
// and the allowed range.
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
