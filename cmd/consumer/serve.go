package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/fetch/fetchotel"
	"github.com/tokenrefill/refiller/fetch/fetchprom"
	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/sidecar"
	"github.com/tokenrefill/refiller/internal/sidecar/envoy"
)

// connectTime bounds the wait for Redis before the sidecar accepts its first call.
const connectTime = 2 * time.Second

// serve has the values of the sidecar's flags.
type serve struct {
	conn      connection
	poolSize  int
	cacheSize int
	deadline  time.Duration
	tls       credential.ServerTLS
	files     limitFiles
	windows   envoy.WindowOptions
	policies  []string
	logLevel  string
	logFormat string
	options   sidecar.Options
}

func newServeCommand(e env) *cobra.Command {
	s := serve{conn: connection{environ: e.Environ}, windows: envoy.DefaultWindowOptions()}
	s.options = sidecar.Options{Limits: sidecar.DefaultLimits(), Drain: sidecar.DefaultDrain()}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve buckets over HTTP, over gRPC and to Envoy",
		Long: `Serve buckets to programs that don't use the Go SDK, until SIGINT or SIGTERM. The interfaces are HTTP with
JSON (described at /openapi.yaml), gRPC (refiller.v1.Buckets and refiller.v1.Limits, with health checks and reflection),
and Envoy's rate limit service (with --envoy).

An address is host:port or unix:/path. The flags for addresses, and --envoy, may be repeated.

Any client that reaches an address can take and return tokens. On addresses other than loopback addresses and Unix
sockets, require client certificates with --tls-client-ca.

The files of --limits and --envoy are read again when they change, and on SIGHUP. "consumer check" validates them.

Each flag can also be set by an environment variable, which applies if the flag isn't given. Separate the values of a
list by commas.`,
		Example: `  consumer serve
  consumer serve --http unix:/run/buckets.sock --grpc none
  consumer serve --limits limits.yaml
  consumer serve --grpc 0.0.0.0:8081 --tls-cert c.pem --tls-key k.pem \
    --tls-client-ca ca.pem --envoy limits.yaml`,
		Args: cli.Positional(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return s.run(cmd, e) },
	}
	f, o := cmd.Flags(), &s.options
	f.StringArrayVar(&o.HTTP, "http", []string{"127.0.0.1:8080"}, "address for HTTP, or none for no HTTP")
	f.StringArrayVar(&o.GRPC, "grpc", []string{"127.0.0.1:8081"}, "address for gRPC and for Envoy, or none for no gRPC")
	f.StringArrayVar(&o.Admin, "admin", nil,
		"address that serves only probes and metrics, over plain HTTP; the addresses of --http serve them, too")
	f.IntVar(&s.poolSize, "redis-connections", 2*redisconn.DefaultPoolSize,
		fmt.Sprintf("largest number of connections to each Redis server, from 1 to %d", redisconn.MaxPoolSize))
	f.IntVar(&s.cacheSize, "cache-size", 1<<15,
		"number of buckets that are at least kept in memory; up to twice as many are kept, at about 300 bytes each")
	f.DurationVar(&s.deadline, "deadline", 0,
		"timeout of a call to Redis, from 1ms to --client-timeout; 0 for four round trips, but at least 50ms for buckets "+
			"and 500ms for other limits, and at most 1s")
	f.StringArrayVar(&s.policies, "metrics-policy", nil,
		"bucket, or prefix of buckets followed by *, that has its own label in the metrics; other buckets share a label")
	f.StringArrayVar(&s.files.named, "limits", nil,
		"file of named limits (refilled or lazy buckets, windows, pacing, schedules); read again when it changes")
	f.StringArrayVar(&s.files.envoy, "envoy", nil,
		"file of rate limits for one domain of Envoy, or directory of such files; read again when it changes")
	f.BoolVar(&s.files.shadow, "envoy-shadow", false,
		"treat each limit for Envoy as if it had shadow_mode, so that no request is denied")
	f.BoolVar(&s.files.headers, "envoy-headers", false,
		"let Envoy add the headers RateLimit-Limit, RateLimit-Remaining, RateLimit-Reset and Retry-After to responses")
	f.BoolVar(&s.files.quota, "envoy-quota", false, "treat each limit for Envoy as if it had quota_mode")
	f.StringVar(&s.files.names.Limit, "envoy-limit-header", "RateLimit-Limit", "name of the header with the limit")
	f.StringVar(&s.files.names.Remaining, "envoy-remaining-header", "RateLimit-Remaining",
		"name of the header with the remaining tokens")
	f.StringVar(&s.files.names.Reset, "envoy-reset-header", "RateLimit-Reset",
		"name of the header with the seconds until the limit is reset")
	f.StringVar(&s.windows.Prefix, "envoy-key-prefix", "", "prefix of the Redis keys of Envoy's windows")
	f.IntVar(&s.windows.Remembered, "envoy-local-cache", s.windows.Remembered,
		"number of Envoy's exhausted windows that are denied from memory, each for up to a second; 0 for none")
	f.StringVar(&s.tls.Cert, "tls-cert", "",
		"PEM file of the server's certificate, for TLS on TCP addresses; read again for each handshake")
	f.StringVar(&s.tls.Key, "tls-key", "", "PEM file of the private key of the server's certificate")
	f.StringVar(&s.tls.ClientCA, "tls-client-ca", "",
		"PEM file of the certificate authorities of clients; if it is given, clients must have a certificate")
	f.IntVar(&o.Limits.Calls, "calls", o.Limits.Calls,
		"largest number of calls that run at once, without waits for tokens; further calls queue")
	f.IntVar(&o.Limits.ClientCalls, "client-calls", o.Limits.ClientCalls,
		"largest number of calls of one client that run at once")
	f.IntVar(&o.Limits.Queue, "queue", o.Limits.Queue, "largest number of calls in the queue")
	f.DurationVar(&o.Limits.QueueWait,
		"queue-wait", o.Limits.QueueWait,
		"longest time in the queue for a call without a deadline")
	f.IntVar(&o.Limits.TokenWaits, "waits", o.Limits.TokenWaits,
		"largest number of waits for tokens at a time; one client may have half of them")
	f.IntVar(&o.Limits.Connections,
		"client-connections", o.Limits.Connections,
		"largest number of connections of one client")
	f.IntVar(&o.Limits.Body, "max-request", o.Limits.Body, "largest size of a request in bytes")
	f.DurationVar(&o.Limits.ConnectionAge, "max-connection-age", o.Limits.ConnectionAge,
		"age at which a connection is closed, so that its client reconnects, perhaps to another sidecar; 0 for no limit")
	f.DurationVar(&o.Limits.Wait, "max-wait", o.Limits.Wait, "longest wait for tokens that a call may request")
	f.DurationVar(&o.Limits.Patience, "client-timeout", o.Limits.Patience,
		"longest time for a client to send a request, and to read the reply")
	f.DurationVar(&o.Drain.Delay, "drain-delay", o.Drain.Delay,
		"time after SIGTERM or SIGINT in which calls are still accepted, while health checks fail")
	f.DurationVar(&o.Drain.Timeout, "drain-timeout", o.Drain.Timeout,
		"longest time for running calls to finish after --drain-delay")
	f.StringVar(&s.logLevel, "log-level", "info", "lowest level of log messages: trace, debug, info, warn, error or off")
	f.StringVar(&s.logFormat, "log-format", "text", "format of log messages: text or json")
	describeVariables(cmd)
	s.conn.addFlags(cmd)
	cli.Group(cmd, "Redis", "redis-", "deadline", "cache-size")
	cli.Group(cmd, "TLS", "tls-")
	cli.Group(cmd, "Envoy", "envoy-")
	cli.Group(cmd, "load limits", "calls", "client-", "queue", "queue-wait", "waits", "max-")
	cli.Group(cmd, "shutdown", "drain-")
	return cmd
}

func (s *serve) run(cmd *cobra.Command, e env) error {
	if err := fromEnvironment(cmd, e.Environ); err != nil {
		return err
	}
	if err := s.check(cmd, e); err != nil {
		return err
	}
	log := s.options.Logger
	redisconn.SetLogger(log.Named("redis"))
	rdb, err := s.conn.open(s.poolSize)
	if err != nil {
		return err
	}
	defer rdb.Close()
	hook := fetchprom.New(fetchprom.Policies(s.policies...))
	opts := []fetch.Option{fetch.WithHook(hook), fetch.WithCacheSize(s.cacheSize)}
	traces, shutdown, err := newTraces(cmd.Context(), e.Environ, log)
	if err != nil {
		return err
	}
	defer shutdown()
	if traces != nil {
		s.options.Traces = traces
		opts = append(opts, fetch.WithHook(fetchotel.New(traces, fetchotel.Policies(s.policies...))))
	}
	if s.deadline > 0 {
		opts = append(opts, fetch.WithTimeout(s.deadline))
	}
	s.options.Client, err = fetch.New(rdb, opts...)
	if err != nil {
		return err
	}
	hook.Watch(s.options.Client)
	registry := prometheus.NewRegistry()
	registry.MustRegister(hook, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.options.Registry = registry
	s.options.Metrics = promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry, MaxRequestsInFlight: 4})
	defer closeClient(s.options.Client)
	follower, err := s.files.follow(log)
	if err != nil {
		return err
	}
	defer follower.Close()
	registry.MustRegister(follower.ok)
	windows := envoy.NewWindows(rdb, s.options.CallDeadline, s.windows)
	load := func() (inForce, error) { return s.files.load(rdb, s.options.Client, windows) }
	first, err := load()
	if err != nil {
		return err
	}
	s.options.Envoy, s.options.Named = first.envoy, first.named
	server, err := sidecar.Listen(s.options)
	if errors.Is(err, sidecar.ErrOptions) {
		return cli.Usage(err)
	}
	if err != nil {
		return err
	}
	s.logAddresses(log, server)
	connect(cmd.Context(), s.options.Client, log)
	following, stop := context.WithCancel(cmd.Context())
	var follow sync.WaitGroup
	follow.Go(func() { follower.run(following, load, func(now inForce) { use(server, now) }, log) })
	defer follow.Wait()
	defer stop()
	return server.Run(cmd.Context())
}

// connect prepares the client, so that its first call takes no longer than later calls. If Redis does not answer, the
// sidecar serves nevertheless, and the buckets' degraded modes apply.
func connect(ctx context.Context, client *fetch.Client, log hclog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	if err := client.Ready(ctx); err != nil && ctx.Err() != context.Canceled {
		log.Warn("Redis does not answer yet", "error", err)
	}
}

// check completes the options. If a flag or a file is wrong, it returns an error that names it.
func (s *serve) check(cmd *cobra.Command, e env) (err error) {
	s.options.Logger, err = s.logger(cmd, e)
	if err != nil {
		return err
	}
	s.options.HTTP, s.options.GRPC = given(s.options.HTTP), given(s.options.GRPC)
	s.options.Deadline = s.deadline
	if err := s.options.Validate(); err != nil {
		return cli.Usage(err)
	}
	if most := s.options.Limits.Patience; s.deadline != 0 && s.deadline < time.Millisecond || s.deadline > most {
		return cli.Usage(fmt.Errorf("--deadline %s: want 1ms to %s (the value of --client-timeout), or 0", s.deadline,
			most))
	}
	if s.poolSize < 1 || s.poolSize > redisconn.MaxPoolSize {
		return cli.Usage(fmt.Errorf("--redis-connections %d: want 1 to %d", s.poolSize, redisconn.MaxPoolSize))
	}
	if err := s.files.validate(); err != nil {
		return err
	}
	if err := s.windows.Validate(); err != nil {
		return cli.Usage(err)
	}
	s.options.TLS, err = s.serverTLS()
	return err
}

// logAddresses logs the addresses on which the server listens. It warns about addresses on which any client of the
// network can take tokens.
func (s *serve) logAddresses(log hclog.Logger, server *sidecar.Server) {
	for protocol, addresses := range map[string][]net.Addr{
		"http": server.HTTPAddrs(), "admin": server.AdminAddrs(), "grpc": server.GRPCAddrs(),
	} {
		for _, a := range addresses {
			log.Info("listening", "protocol", protocol, "network", a.Network(), "address", a.String())
			tcp, ok := a.(*net.TCPAddr)
			if ok && protocol != "admin" && !tcp.IP.IsLoopback() && (s.options.TLS == nil || s.tls.ClientCA == "") {
				log.Warn("every client that reaches this address can take and return tokens: "+
					"set --tls-cert, --tls-key and --tls-client-ca",
					"protocol", protocol, "address", a.String(), "tls", s.options.TLS != nil)
			}
		}
	}
}

func (s *serve) logger(cmd *cobra.Command, e env) (hclog.Logger, error) {
	level := hclog.LevelFromString(s.logLevel)
	if level == hclog.NoLevel {
		return nil, cli.Usage(fmt.Errorf("--log-level %q: want trace, debug, info, warn, error or off", s.logLevel))
	}
	if s.logFormat != "text" && s.logFormat != "json" {
		return nil, cli.Usage(fmt.Errorf("--log-format %q: want text or json", s.logFormat))
	}
	return cli.QueuedLogger(cmd, hclog.LoggerOptions{Name: "consumer", Output: e.Stderr, Level: level,
		JSONFormat: s.logFormat == "json"}), nil
}

func (s *serve) serverTLS() (*tls.Config, error) {
	if s.tls.IsZero() {
		return nil, nil
	}
	if s.tls.Cert == "" || s.tls.Key == "" {
		return nil, cli.Usage(errors.New("TLS needs both --tls-cert and --tls-key"))
	}
	return s.tls.Config()
}

// given returns the addresses, except those that are empty or "none".
func given(addresses []string) []string {
	return slices.DeleteFunc(addresses, func(a string) bool { return strings.TrimSpace(a) == "" || a == "none" })
}
