// Package etcdconn makes the etcd clients of the programs from endpoints and credentials. Packages election and pool
// define the keys that the programs store in etcd.
//
// A client is made without waiting for etcd, so that a program starts while etcd is unavailable. Password and PEM files
// are read for each login and each connection, so all of them can be rotated. Errors show no password.
package etcdconn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/fields"
)

const (
	loginTimeout = 5 * time.Second
	// pingEvery and pingTimeout bound the time after which a silent connection is closed. etcd closes connections that
	// ping more often than every five seconds.
	pingEvery   = 10 * time.Second
	pingTimeout = 3 * time.Second
	// redialMax is the longest pause between two attempts to connect. By default gRPC would wait up to two minutes, even
	// after etcd is available again.
	redialMax      = 2 * time.Second
	connectTimeout = 3 * time.Second
)

// Options are the options of a connection to etcd, as fields of a configuration. They print without secrets.
type Options struct {
	// Addresses of members of etcd. They are required in mode etcd, and with pools unless the file has a pool_registry.
	// Either all of them use TLS, or none.
	Endpoints []string `yaml:"endpoints" is:"endpoint" env:"ENDPOINTS"`
	// User to log in as. It needs a password.
	Username string `yaml:"username" is:"user" env:"USERNAME"`
	// File with the user's password.
	Password credential.Password `yaml:"password_file" is:"password" env:"PASSWORD_FILE"`
	// PEM files for TLS. If a file is named, endpoints without a scheme use TLS, too.
	TLS credential.TLS `yaml:"tls" env:""`
}

const forms = "host:port, http://host:port or https://host:port"

// Kinds are the kinds of the values of Options.
var Kinds = fields.Credentials.And(fields.Kinds{"endpoint": fields.Text(forms, func(s string) (any, string) {
	if !isEndpoint(s) {
		return nil, fmt.Sprintf("%s: want %s, with a port from 1 to 65535", fields.Quote(credential.Redact(s)), forms)
	}
	return s, ""
})})

// isEndpoint reports whether s is an endpoint in one of the allowed forms.
func isEndpoint(s string) bool {
	scheme, address := splitEndpoint(s)
	if scheme != "" {
		u, err := url.Parse(s)
		if err != nil || scheme != "http" && scheme != "https" || u.Host != address {
			return false
		}
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil || !fields.IsHost(host) {
		return false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

func splitEndpoint(endpoint string) (scheme, address string) {
	if scheme, address, ok := strings.Cut(endpoint, "://"); ok {
		return scheme, address
	}
	return "", endpoint
}

// Validate reports every option that is wrong or contradicts another, as *fields.Error joined by errors.Join. It reads
// no file. Missing endpoints are no error here: Open reports them.
func (o Options) Validate() error {
	var errs []error
	bad := func(field, format string, args ...any) {
		errs = append(errs, &fields.Error{Field: field, Msg: fmt.Sprintf(format, args...)})
	}
	secure, seen := 0, map[string]bool{}
	for i, endpoint := range o.Endpoints {
		scheme, _ := splitEndpoint(endpoint)
		if scheme == "https" || scheme == "" && !o.TLS.IsZero() {
			secure++
		}
		item := fmt.Sprintf("endpoints[%d]", i)
		switch {
		case !isEndpoint(endpoint):
			bad(item, "%s: want %s, with a port from 1 to 65535", fields.Quote(credential.Redact(endpoint)), forms)
		case seen[endpoint]:
			bad(item, "%s is in the list twice", fields.Quote(endpoint))
		case scheme == "http" && !o.TLS.IsZero():
			bad("tls", "it can be set only with https endpoints, but %s is %s", item, endpoint)
		}
		seen[endpoint] = true
	}
	if secure != 0 && secure != len(o.Endpoints) {
		bad("endpoints", "%d of %d use TLS: want all or none", secure, len(o.Endpoints))
	}
	switch {
	case o.Username != "" && o.Password.IsZero():
		bad("username", "%s has no password: give password_file", fields.Quote(o.Username))
	case o.Username == "" && !o.Password.IsZero():
		bad("username", "it is required with password_file")
	}
	if missing := o.TLS.Incomplete(); missing != "" {
		bad("tls."+missing, "it is required: set both cert and key, or none")
	}
	return errors.Join(errs...)
}

// Open returns a client of etcd, for the caller to close. Open doesn't wait for etcd. The first request shows whether
// etcd is reachable and whether the login is right. Open fails if the options are wrong or a file can't be used.
func Open(o Options) (*clientv3.Client, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	if len(o.Endpoints) == 0 {
		return nil, errors.New("etcd: endpoints: the list is empty: want at least one " + forms)
	}
	password, err := o.Password.Reveal()
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	var made atomic.Bool
	options := []grpc.DialOption{
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: redialMax,
			},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithChainUnaryInterceptor(o.login(&made)),
	}
	if scheme, _ := splitEndpoint(o.Endpoints[0]); scheme == "https" || !o.TLS.IsZero() {
		if _, err := o.TLS.ClientConfig(); err != nil {
			return nil, fmt.Errorf("etcd: %w", err)
		}
		options = append(options, grpc.WithTransportCredentials(rotating{credentials.NewTLS(nil), o.TLS}))
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            o.Endpoints,
		Username:             o.Username,
		Password:             password,
		DialTimeout:          loginTimeout,
		DialKeepAliveTime:    pingEvery,
		DialKeepAliveTimeout: pingTimeout,
		Logger:               zap.NewNop(), // important failures are returned as errors
		DialOptions:          options,
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	made.Store(true)
	return client, nil
}

// login makes each login read the password again. While the client is being made, login reports that no login is
// needed. If it is needed, etcd answers the first request with "user name is empty", and the client then logs in and
// repeats the request.
func (o Options) login(made *atomic.Bool) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, opts ...grpc.CallOption,
	) error {
		if login, ok := req.(*etcdserverpb.AuthenticateRequest); ok {
			if !made.Load() {
				return rpctypes.ErrGRPCAuthNotEnabled
			}
			password, err := o.Password.Reveal()
			if err != nil {
				return fmt.Errorf("etcd: %w", err)
			}
			login.Password = password
		}
		return invoke(ctx, method, req, reply, conn, opts...)
	}
}

// rotating is TLS that reads its files for each connection.
type rotating struct {
	credentials.TransportCredentials
	files credential.TLS
}

// ClientHandshake implements credentials.TransportCredentials.
func (r rotating) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	config, err := r.files.ClientConfig()
	if err != nil {
		return nil, nil, fmt.Errorf("etcd: %w", err)
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

// Clone implements credentials.TransportCredentials.
func (r rotating) Clone() credentials.TransportCredentials {
	return rotating{r.TransportCredentials.Clone(), r.files}
}
