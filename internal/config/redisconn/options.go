package redisconn

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
	"github.com/tokenrefill/refiller/internal/engine"
)

// The defaults of timeouts and sizes, and their ranges.
const (
	DefaultDialTimeout = 2 * time.Second
	DefaultReadTimeout = 2 * time.Second // also of writes
	MinTimeout         = time.Millisecond
	MaxTimeout         = time.Minute
	DefaultPoolSize    = 32
	MaxPoolSize        = 10_000
)

// topologyAge is the highest age of a Cluster client's map of slots. After a node was lost, the client does not send a
// script again, so no error makes it search for the node that took over. It searches when the map has this age.
const topologyAge = 2 * time.Second

// Options are the options of a connection to Redis, as fields of a configuration. They print without secrets.
type Options struct {
	// Address of Redis.
	URL URL `yaml:"url,required" is:"redis url" env:"URL"`
	// User to log in as. It replaces the user in the URL.
	Username string `yaml:"username" is:"user" env:"USERNAME"`
	// File with the user's password. It replaces the password in the URL.
	Password credential.Password `yaml:"password_file" is:"password" env:"PASSWORD_FILE"`
	// User of the sentinels themselves.
	SentinelUsername string `yaml:"sentinel_username" is:"user" env:"SENTINEL_USERNAME"`
	// File with the sentinels' password.
	SentinelPassword credential.Password `yaml:"sentinel_password_file" is:"password" env:"SENTINEL_PASSWORD_FILE"`
	// PEM files for TLS, also to the sentinels. The URL must be in a rediss form.
	TLS credential.TLS `yaml:"tls" env:""`
	// Longest time to make a connection.
	DialTimeout time.Duration `yaml:"dial_timeout" is:"redis timeout" default:"2s"`
	// Longest wait for an answer.
	ReadTimeout time.Duration `yaml:"read_timeout" is:"redis timeout" default:"2s"`
	// Longest time to send a request.
	WriteTimeout time.Duration `yaml:"write_timeout" is:"redis timeout" default:"2s"`
	// Most connections to each server.
	PoolSize int `yaml:"pool_size" is:"redis connections" default:"32"`
}

// Validate reports every option that contradicts another or is out of range, as *fields.Error joined by errors.Join. It
// reads no file.
func (o Options) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &fields.Error{Field: field, Msg: fmt.Sprintf(format, args...)})
	}
	if len(o.URL.Addrs) == 0 {
		bad("url", "is missing: want %s", Forms)
	}
	switch none := o.Password.IsZero() && o.URL.Password.IsZero(); {
	case none && o.Username != "":
		bad("username", "%q has no password: give password_file", o.Username)
	case none && o.URL.Username != "": // the name is not shown, since it may be a password
		bad("url", "has a user but no password: give password_file")
	}
	if !o.TLS.IsZero() && !o.URL.TLS {
		bad("tls", "it can be set only with a rediss://, rediss-sentinel:// or rediss-cluster:// url")
	}
	if missing := o.TLS.Incomplete(); missing != "" {
		bad("tls."+missing, "it is required: set both cert and key, or none")
	}
	if o.URL.Kind != Sentinel && !o.SentinelPassword.IsZero() {
		bad("sentinel_password_file", "it can be set only with a redis-sentinel:// url")
	}
	if o.URL.Kind != Sentinel && o.SentinelUsername != "" {
		bad("sentinel_username", "it can be set only with a redis-sentinel:// url")
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

// String returns the address with the user in force, without secrets.
func (o Options) String() string {
	u := o.URL
	if o.Username != "" {
		u.Username = o.Username
	}
	return u.String()
}

// Open returns a client, which connects when it is first used. The caller must close it. Errors name the wrong option
// or file.
func Open(o Options) (redis.UniversalClient, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("redisconn: %w", err)
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
		// The handshake of maintenance notifications costs a round trip for each connection to a server that doesn't have
		// them.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
	if o.URL.TLS {
		if _, err := o.TLS.ClientConfig(); err != nil {
			return nil, fmt.Errorf("redisconn: %w", err)
		}
		u.Dialer = o.dialTLS
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
		c.NewClient = func(o *redis.Options) *redis.Client {
			client := redis.NewClient(o)
			engine.AskOthers(client, *o, c.Addrs, func(o redis.Options) *redis.Client { return redis.NewClient(&o) })
			return client
		}
		return redis.NewClusterClient(c), nil
	default:
		s := u.Simple()
		if o.URL.Kind == Unix {
			s.Network = "unix"
		}
		return redis.NewClient(s), nil
	}
}

// dialTLS makes a connection with the present content of the files.
func (o Options) dialTLS(ctx context.Context, network, addr string) (net.Conn, error) {
	config, err := o.TLS.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("redisconn: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, orDefault(o.DialTimeout, DefaultDialTimeout))
	defer cancel()
	dialer := tls.Dialer{Config: config}
	return dialer.DialContext(ctx, network, addr)
}

// credentials makes every new connection read the credentials. It fails if a file can't be read now.
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
	if !o.SentinelPassword.IsZero() {
		if _, err := o.SentinelPassword.Reveal(); err != nil {
			return fmt.Errorf("redisconn: sentinel: %w", err)
		}
		u.OnConnect = o.loginToSentinel
	}
	return nil
}

// loginToSentinel logs in on a new connection, unless go-redis has done so. go-redis has no provider of the sentinels'
// credentials. It also calls loginToSentinel for connections to the master, on which it has logged in before.
func (o Options) loginToSentinel(ctx context.Context, conn *redis.Conn) error {
	if err := conn.Ping(ctx).Err(); !redis.HasErrorPrefix(err, "NOAUTH") {
		return err
	}
	secret, err := o.SentinelPassword.Reveal()
	switch {
	case err != nil:
		return fmt.Errorf("redisconn: sentinel: %w", err)
	case o.SentinelUsername != "":
		return conn.AuthACL(ctx, o.SentinelUsername, secret).Err()
	default:
		return conn.Auth(ctx, secret).Err()
	}
}

func orDefault[T time.Duration | int](v, fallback T) T {
	if v == 0 {
		return fallback
	}
	return v
}
