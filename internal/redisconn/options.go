package redisconn

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tokenrefill/refiller/internal/credential"
)

// Timeouts and sizes where Options has none, and their ranges.
const (
	DefaultDialTimeout = 2 * time.Second
	DefaultReadTimeout = 2 * time.Second // of writes too
	MinTimeout         = time.Millisecond
	MaxTimeout         = time.Minute
	DefaultPoolSize    = 32
	MaxPoolSize        = 10_000
)

// topologyAge is how old a Cluster client's map of slots may get. Scripts are not sent anew when a node is gone, so no
// error makes the client look for the node that took over; age has to.
const topologyAge = 2 * time.Second

// ErrOptions is returned for options that contradict each other or are out of range.
var ErrOptions = errors.New("redisconn: bad options")

// OptionError names the option that is wrong, by its name in a config file.
type OptionError struct {
	Field string
	Msg   string
}

// Error implements error.
func (e *OptionError) Error() string { return "redisconn: " + e.Field + ": " + e.Msg }

// Is makes every OptionError match ErrOptions.
func (e *OptionError) Is(target error) bool { return target == ErrOptions }

// Options is how to reach Redis. It prints without secrets.
type Options struct {
	URL              URL
	Username         string              // instead of the URL's
	Password         credential.Password // instead of the URL's
	SentinelUsername string              // of the sentinels themselves
	SentinelPassword credential.Password // of the sentinels themselves; a file is read once
	TLS              credential.TLS      // for the rediss forms
	DialTimeout      time.Duration       // MinTimeout to MaxTimeout; 0 means the default
	ReadTimeout      time.Duration
	WriteTimeout     time.Duration
	PoolSize         int // most connections per server, 1 to MaxPoolSize; 0 means the default
}

// Validate reports every option that is out of range or contradicts another, as *OptionError joined by errors.Join. It
// reads no file.
func (o Options) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &OptionError{Field: field, Msg: fmt.Sprintf(format, args...)})
	}
	if len(o.URL.Addrs) == 0 {
		bad("url", "is missing: want %s", Forms)
	}
	switch none := o.Password.IsZero() && o.URL.Password.IsZero(); {
	case none && o.Username != "":
		bad("username", "%q has no password: give password_file", o.Username)
	case none && o.URL.Username != "": // not shown: it may be a password in the wrong place
		bad("url", "has a user but no password: give password_file, or write user:password@host, or :password@host for a password alone")
	}
	if !o.TLS.IsZero() && !o.URL.TLS {
		bad("tls", "goes with a rediss://, rediss-sentinel:// or rediss-cluster:// url only")
	}
	if (o.TLS.Cert == "") != (o.TLS.Key == "") {
		bad("tls", "cert and key go together: one of them is missing")
	}
	if o.URL.Kind != Sentinel && !o.SentinelPassword.IsZero() {
		bad("sentinel_password_file", "goes with a redis-sentinel:// url only")
	}
	if o.URL.Kind != Sentinel && o.SentinelUsername != "" {
		bad("sentinel_username", "goes with a redis-sentinel:// url only")
	} else if o.SentinelUsername != "" && o.SentinelPassword.IsZero() {
		bad("sentinel_username", "%q has no password: give sentinel_password_file", o.SentinelUsername)
	}
	timeout := func(field string, d time.Duration) {
		if d != 0 && (d < MinTimeout || d > MaxTimeout) {
			bad(field, "%s is not from %s to %s", d, MinTimeout, MaxTimeout)
		}
	}
	timeout("dial_timeout", o.DialTimeout)
	timeout("read_timeout", o.ReadTimeout)
	timeout("write_timeout", o.WriteTimeout)
	if o.PoolSize < 0 || o.PoolSize > MaxPoolSize {
		bad("pool_size", "%d is not a whole number from 1 to %d", o.PoolSize, MaxPoolSize)
	}
	return errors.Join(errs...)
}

// String writes the address with the user in force, without secrets.
func (o Options) String() string {
	u := o.URL
	if o.Username != "" {
		u.Username = o.Username
	}
	return u.String()
}

// Open returns a client, which connects when it is first used; the caller closes it. Errors name what is wrong with the
// options or with the files they name.
func Open(o Options) (redis.UniversalClient, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	u := redis.UniversalOptions{
		Addrs:                 o.URL.Addrs,
		MasterName:            o.URL.Master,
		DB:                    o.URL.DB,
		MaxRetries:            -1,
		DialerRetries:         1,
		ContextTimeoutEnabled: true,
		DialTimeout:           orDefault(o.DialTimeout, DefaultDialTimeout),
		ReadTimeout:           orDefault(o.ReadTimeout, DefaultReadTimeout),
		WriteTimeout:          orDefault(o.WriteTimeout, DefaultReadTimeout),
		PoolSize:              orDefault(o.PoolSize, DefaultPoolSize),
		// The handshake of maintenance notifications is one more round trip per connection to servers without them.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if o.URL.TLS {
		config, err := o.TLS.ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("redisconn: %w", err)
		}
		u.TLSConfig = config
	}
	if err := o.credentials(&u); err != nil {
		return nil, err
	}
	switch o.URL.Kind {
	case Sentinel:
		return redis.NewFailoverClient(u.Failover()), nil
	case Cluster:
		c := u.Cluster()
		c.ClusterStateReloadInterval = topologyAge
		return redis.NewClusterClient(c), nil
	default:
		s := u.Simple()
		if o.URL.Kind == Unix {
			s.Network = "unix"
		}
		return redis.NewClient(s), nil
	}
}

// credentials has every new connection ask for the credentials, and fails now if a file can't be read now.
func (o Options) credentials(u *redis.UniversalOptions) error {
	username, password := o.URL.Username, o.URL.Password
	if o.Username != "" {
		username = o.Username
	}
	if !o.Password.IsZero() {
		password = o.Password
	}
	if !password.IsZero() {
		if _, err := password.Reveal(); err != nil {
			return fmt.Errorf("redisconn: %w", err)
		}
		u.CredentialsProviderContext = func(context.Context) (string, string, error) {
			secret, err := password.Reveal()
			return username, secret, err
		}
	}
	secret, err := o.SentinelPassword.Reveal()
	if err != nil {
		return fmt.Errorf("redisconn: sentinel: %w", err)
	}
	u.SentinelUsername, u.SentinelPassword = o.SentinelUsername, secret
	return nil
}

func orDefault[T time.Duration | int](v, fallback T) T {
	if v == 0 {
		return fallback
	}
	return v
}
