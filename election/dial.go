package election

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

const (
	loginTimeout = 5 * time.Second
	// pingEvery and pingTimeout bound how long a connection that went silent is believed in. etcd closes connections
	// that ping more often than every five seconds.
	pingEvery   = 10 * time.Second
	pingTimeout = 3 * time.Second
	// redialMax keeps an outage from outlasting itself: gRPC alone would wait up to two minutes before trying again.
	redialMax      = 2 * time.Second
	connectTimeout = 3 * time.Second
)

// DialConfig says how to reach etcd.
type DialConfig struct {
	// Endpoints are the members, each host:port, http://host:port or https://host:port, all with or all without TLS. At
	// least one.
	Endpoints []string
	// Username and Password log in. Both or neither.
	Username, Password string
	// TLS is used with https endpoints, and with those that name no scheme if any of its fields is set.
	TLS TLSConfig
}

// TLSConfig names PEM files.
type TLSConfig struct {
	CA        string // authorities that the server's certificate is checked with; empty: those of the system
	Cert, Key string // certificate and key to show to the server; both or neither
}

// Validate returns all that is wrong with c, each problem with the field's name, or nil. It reads no files.
func (c DialConfig) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("election: "+format, args...)) }
	if len(c.Endpoints) == 0 {
		bad("Endpoints must name at least one member of etcd")
	}
	secure := 0
	for i, endpoint := range c.Endpoints {
		scheme, addr := splitEndpoint(endpoint)
		if scheme == "https" || scheme == "" && c.TLS != (TLSConfig{}) {
			secure++
		}
		if scheme != "" && scheme != "http" && scheme != "https" || !validAddr(addr) {
			bad("Endpoints[%d] must be host:port, http://host:port or https://host:port, not %q", i, endpoint)
		} else if scheme == "http" && c.TLS != (TLSConfig{}) {
			bad("Endpoints[%d] %q must not be http while TLS is set: its connection would not be encrypted", i, endpoint)
		}
	}
	if secure != 0 && secure != len(c.Endpoints) {
		bad("Endpoints must all use TLS or none: %d of %d do", secure, len(c.Endpoints))
	}
	if (c.Username == "") != (c.Password == "") {
		bad("Username and Password must be set both or neither")
	}
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		bad("TLS.Cert and TLS.Key must be set both or neither, not %q and %q", c.TLS.Cert, c.TLS.Key)
	}
	return errors.Join(errs...)
}

// Dial returns a client of etcd, for the caller to close. It doesn't wait for etcd: whether that is reachable, and
// whether the login is right, shows with the first request. So a program starts while etcd is away. Dial fails if c is
// not valid or a file of it can't be used.
func Dial(c DialConfig) (*clientv3.Client, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	tlsConfig, err := c.tlsConfig()
	if err != nil {
		return nil, err
	}
	var dialled atomic.Bool
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            c.Endpoints,
		Username:             c.Username,
		Password:             c.Password,
		TLS:                  tlsConfig,
		DialTimeout:          loginTimeout,
		DialKeepAliveTime:    pingEvery,
		DialKeepAliveTimeout: pingTimeout,
		Logger:               zap.NewNop(), // what matters comes back as an error
		DialOptions: []grpc.DialOption{
			grpc.WithConnectParams(grpc.ConnectParams{
				Backoff: backoff.Config{
					BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: redialMax,
				},
				MinConnectTimeout: connectTimeout,
			}),
			grpc.WithChainUnaryInterceptor(loginLater(&dialled)),
		},
	})
	if err != nil {
		return nil, fmt.Errorf("election: dial etcd: %w", err)
	}
	dialled.Store(true)
	return client, nil
}

// loginLater keeps the client from logging in while it is being made, by telling it that no login is needed. etcd
// answers the first request that does need one with "user name is empty", upon which the client logs in and repeats it.
func loginLater(dialled *atomic.Bool) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		if !dialled.Load() && strings.HasSuffix(method, "/Authenticate") {
			return rpctypes.ErrGRPCAuthNotEnabled
		}
		return invoke(ctx, method, req, reply, conn, opts...)
	}
}

// tlsConfig returns nil if connections go without TLS.
func (c DialConfig) tlsConfig() (*tls.Config, error) {
	scheme, _ := splitEndpoint(c.Endpoints[0])
	if c.TLS == (TLSConfig{}) && scheme != "https" {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.TLS.CA != "" {
		pem, err := os.ReadFile(c.TLS.CA)
		if err != nil {
			return nil, fmt.Errorf("election: TLS.CA: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("election: TLS.CA: no certificate in %s", c.TLS.CA)
		}
	}
	if c.TLS.Cert != "" {
		pair, err := tls.LoadX509KeyPair(c.TLS.Cert, c.TLS.Key)
		if err != nil {
			return nil, fmt.Errorf("election: TLS.Cert and TLS.Key: %w", err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return cfg, nil
}

func splitEndpoint(endpoint string) (scheme, addr string) {
	if scheme, addr, ok := strings.Cut(endpoint, "://"); ok {
		return scheme, addr
	}
	return "", endpoint
}

func validAddr(addr string) bool {
	host, port, err := net.SplitHostPort(addr)
	n, portErr := strconv.Atoi(port)
	return err == nil && host != "" && portErr == nil && n >= 1 && n <= 65535
}
