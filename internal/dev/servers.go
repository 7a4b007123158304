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

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/devserver"
	"github.com/tokenrefill/refiller/internal/etcdconn"
	"github.com/tokenrefill/refiller/internal/fields"
	"github.com/tokenrefill/refiller/lua"
)

// Ports that are used if they are free. Whoever listens on guardPort may prefer them: another playground on this machine
// keeps away from them, even while one of its own processes is about to listen.
const (
	redisPort = 16379
	etcdPort  = 12379
	guardPort = 19089
	adminPort = 19090 // of the first replica; the others follow
)

// ErrForeignKey is returned when a key of the given store that a sample bucket needs belongs to another program.
var ErrForeignKey = errors.New("dev: key belongs to another program")

// claimPorts tries to reserve the well-known ports until it is undone.
func (p *playground) claimPorts() (undo func()) {
	ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(guardPort)))
	if err != nil {
		return func() {}
	}
	p.claimed = true
	return func() { _ = ln.Close() } // nobody ever connected
}

// port is the well-known port, or 0 for any if they are another playground's.
func (p *playground) port(known int) int {
	if !p.claimed {
		return 0
	}
	return known
}

// startServers starts what isn't given, and returns how to end it, also with an error.
func (p *playground) startServers(ctx context.Context) (closeAll func(), err error) {
	var closers []func()
	closeAll = func() {
		for i := len(closers) - 1; i >= 0; i-- {
			closers[i]()
		}
	}
	p.settings = settings{redis: p.opts.Redis, mode: p.opts.Mode, etcd: p.opts.Etcd, listen: "127.0.0.1:0"}
	if p.settings.redis == "" {
		s, err := devserver.StartRedis(p.port(redisPort))
		if err != nil {
			return closeAll, hint(err, "--redis URL")
		}
		closers = append(closers, s.Close)
		p.settings.redis = "redis://" + s.Addr()
	}
	if p.settings.mode == config.ModeEtcd && len(p.settings.etcd) == 0 {
		s, err := devserver.StartEtcd(ctx, p.port(etcdPort), p.dir)
		if err != nil {
			return closeAll, hint(err, "--etcd ADDRS, or --mode race, which needs none")
		}
		closers = append(closers, s.Close)
		p.settings.etcd = []string{"http://" + s.Addr()}
	}
	path := filepath.Join(p.dir, "dev.yaml")
	if err := os.WriteFile(path, []byte(configText(p.settings)), 0o600); err != nil {
		return closeAll, fmt.Errorf("dev: write the configuration: %w", err)
	}
	p.environ = append(p.environ, redisVariable+"="+p.settings.redis)
	p.cfg, err = config.Load(config.Source{Path: path, Env: fields.EnvironmentOf(p.environ)})
	return closeAll, err
}

// hint tells what to do without an embedded server.
func hint(err error, flag string) error {
	if errors.Is(err, devserver.ErrLeftOut) {
		return fmt.Errorf("%w: give %s", err, flag)
	}
	return err
}

// check asks whether the servers answer and the sample buckets have their keys to themselves.
func (p *playground) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	for _, b := range p.cfg.Buckets {
		n, err := p.store.Exists(ctx, lua.TokensKey(b.Key), lua.IndexKey(b.Key)).Result()
		if err != nil {
			return fmt.Errorf("dev: the store %s doesn't answer: %w", p.cfg.Redis, err)
		}
		state, err := p.store.Exists(ctx, lua.ControlKey(b.Key)).Result()
		if err != nil {
			return fmt.Errorf("dev: the store %s doesn't answer: %w", p.cfg.Redis, err)
		}
		if n > 0 && state == 0 {
			return fmt.Errorf("%w: %q in %s is no bucket; give another store or database", ErrForeignKey, b.Key, p.cfg.Redis)
		}
	}
	if len(p.opts.Etcd) == 0 {
		return nil
	}
	e := p.cfg.Election
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
