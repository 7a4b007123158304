package dev

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/devserver"
	"github.com/tokenrefill/refiller/internal/etcdconn"
	"github.com/tokenrefill/refiller/internal/fields"
	"github.com/tokenrefill/refiller/internal/redisconn"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const replicaCount = 3

// Ports that are used if they are free. Whoever listens on guardPort may prefer them: another playground on this
// machine keeps away from them, even while one of its own processes is about to listen.
const (
	redisPort = 16379
	etcdPort  = 12379
	guardPort = 19089
	adminPort = 19090 // of the first replica; the others follow
)

// ErrForeignKey is returned when a key of the given store that a sample bucket needs belongs to another program.
var ErrForeignKey = errors.New("dev: key belongs to another program")

// sampleScene is one store with sample buckets, three replicas and, if it is asked for, kills of the one that refills.
type sampleScene struct {
	*playground
	claimed  bool // the well-known ports are ours
	settings settings
	cfg      config.Config
	followed []*followed
	gaps     gaps
	reports  []report
	active   atomic.Pointer[string] // the replica that refilled most in the last second
	killed   atomic.Int64           // the process that the playground killed last
}

func (s *sampleScene) title() string {
	return "Three replicas keep some buckets full, and a demo consumer takes."
}

// claimPorts tries to reserve the well-known ports.
func (s *sampleScene) claimPorts() {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(guardPort)))
	if err == nil {
		s.claimed = true
		s.atEnd(func() { _ = ln.Close() }) // nobody ever connected
	}
}

// port is the well-known port, or 0 for any if they are another playground's.
func (s *sampleScene) port(known int) int {
	if !s.claimed {
		return 0
	}
	return known
}

// open starts what isn't given.
func (s *sampleScene) open(ctx context.Context) error {
	s.claimPorts()
	s.settings = settings{redis: s.opts.Redis, mode: s.opts.Mode, etcd: s.opts.Etcd, listen: "127.0.0.1:0"}
	if s.settings.redis == "" {
		server, err := devserver.StartRedis(s.port(redisPort))
		if err != nil {
			return hint(err, "--redis URL")
		}
		s.atEnd(server.Close)
		s.settings.redis = "redis://" + server.Addr()
	}
	if s.settings.mode == config.ModeEtcd && len(s.settings.etcd) == 0 {
		server, err := devserver.StartEtcd(ctx, s.port(etcdPort), s.dir)
		if err != nil {
			return hint(err, "--etcd ADDRS, or --mode race, which needs none")
		}
		s.atEnd(server.Close)
		s.settings.etcd = []string{"http://" + server.Addr()}
	}
	path := filepath.Join(s.dir, "dev.yaml")
	if err := os.WriteFile(path, []byte(configText(s.settings)), 0o600); err != nil {
		return fmt.Errorf("dev: write the configuration: %w", err)
	}
	s.environ = append(s.environ, redisVariable+"="+s.settings.redis)
	var err error
	if s.cfg, err = config.Load(config.Source{Path: path, Env: fields.EnvironmentOf(s.environ)}); err != nil {
		return err
	}
	for _, b := range s.cfg.Buckets {
		if b.Policy.Steps == nil {
			s.followed = append(s.followed, &followed{key: b.Key})
		}
	}
	store, err := redisconn.Open(s.cfg.Redis)
	if err != nil {
		return fmt.Errorf("dev: store: %w", err)
	}
	s.atEnd(func() { _ = store.Close() }) // nothing is under way
	r := &region{url: s.cfg.Redis.String(), store: store, demands: demands}
	s.regions = append(s.regions, r)
	for i := range replicaCount {
		r.replicas = append(r.replicas, s.newReplica("replica-"+strconv.Itoa(i+1), s.port(adminPort+i),
			func(listen string) string {
				own := s.settings
				own.listen = listen
				return configText(own)
			}))
	}
	return s.check(ctx)
}

// hint tells what to do without an embedded server.
func hint(err error, flag string) error {
	if errors.Is(err, devserver.ErrLeftOut) {
		return fmt.Errorf("%w: give %s", err, flag)
	}
	return err
}

// check asks whether the servers answer and the sample buckets have their keys to themselves.
func (s *sampleScene) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	for _, b := range s.cfg.Buckets {
		n, err := s.regions[0].store.Exists(ctx, lua.TokensKey(b.Key), lua.IndexKey(b.Key)).Result()
		if err != nil {
			return fmt.Errorf("dev: the store %s doesn't answer: %w", s.cfg.Redis, err)
		}
		state, err := s.regions[0].store.Exists(ctx, lua.ControlKey(b.Key)).Result()
		if err != nil {
			return fmt.Errorf("dev: the store %s doesn't answer: %w", s.cfg.Redis, err)
		}
		if n > 0 && state == 0 {
			return fmt.Errorf("%w: %q in %s is no bucket; give another store or database", ErrForeignKey, b.Key, s.cfg.Redis)
		}
	}
	if len(s.opts.Etcd) == 0 {
		return nil
	}
	e := s.cfg.Election
	client, err := etcdconn.Open(e.Options)
	if err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	defer func() { _ = client.Close() }() // it has answered or not
	if _, err := client.Get(ctx, e.Prefix+"/lead/"); err != nil {
		return fmt.Errorf("dev: etcd %s doesn't answer: %w", strings.Join(e.Endpoints, ","), err)
	}
	return nil
}

// begin waits until somebody refills.
func (s *sampleScene) begin(ctx context.Context) error {
	active, err := s.firstActive(ctx)
	if err != nil {
		return err
	}
	s.active.Store(&active.name)
	s.reports = ask(ctx, s.replicas())
	i := introduction{
		redis: s.cfg.Redis.String(), embeddedRedis: s.opts.Redis == "", embeddedEtcd: len(s.opts.Etcd) == 0,
		logs: s.dir, buckets: s.cfg.Buckets, victim: active.pid(), killEvery: s.opts.KillEvery,
	}
	if s.opts.Mode == config.ModeEtcd {
		i.etcd = s.cfg.Election.Endpoints
	}
	for _, r := range s.replicas() {
		i.replicas = append(i.replicas, replicaLine{r.name, r.url(), r.pid()})
	}
	s.screen.println(i.lines(s.screen.style, s.screen.width())...)
	return nil
}

func (s *sampleScene) acts() []func(context.Context) {
	if s.opts.KillEvery > 0 {
		return []func(context.Context){s.follow, s.killActive}
	}
	return []func(context.Context){s.follow}
}

func (s *sampleScene) look(ctx context.Context, m moment) view {
	before := s.reports
	s.reports = ask(ctx, s.replicas())
	a := compare(before, s.reports)
	s.active.Store(&a.active)
	v := s.totals(m)
	v.who, v.lately = a.describe(s.opts.Mode), m.lately[0]
	v.p50, v.longest, v.kills = s.gaps.summary()
	for _, b := range s.cfg.Buckets {
		r, err := s.peek(ctx, b.Key)
		if err != nil && !errors.Is(err, lua.ErrUnknownBucket) {
			v.store = err
		}
		v.levels = append(v.levels, level{key: b.Key, tokens: r.Tokens, capacity: b.Policy.Capacity})
		if b.Key == watched {
			v.index = r.Version.Index
		}
	}
	return v
}

func (s *sampleScene) summary(m moment) string {
	text := s.totals(m).held(s.screen.style)
	if p50, longest, n := s.gaps.summary(); n > 0 {
		text += "; refill gap: " + gapSummary(p50, longest, n)
	}
	return text
}

// totals is a view of what was admitted, and of its bound.
func (s *sampleScene) totals(m moment) sampleView {
	return sampleView{elapsed: m.elapsed, total: m.total[0],
		bound: bound(s.cfg.Buckets[0].Policy, m.elapsed, s.longestGap())}
}

// bound is the most tokens that a bucket which is refilled with such gaps can admit within elapsed.
func bound(p policy.Policy, elapsed, gap time.Duration) int64 {
	return p.Capacity + p.Rate.Over(elapsed) + 1 + p.Rate.Over(max(gap, p.Interval))
}

func (s *sampleScene) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return lua.Peek(ctx, s.regions[0].store, key, 1)
}
