package dev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/config/redisconn"
	"github.com/tokenrefill/refiller/internal/dev/devserver"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/lua"
)

const (
	alone     = 3                     // replicas of a single region
	perRegion = 2                     // replicas of each region if there are several
	oneWay    = 20 * time.Millisecond // delay from one of several regions to etcd, varied by up to a quarter
)

// A single region uses these ports if they are free and if it can listen on guardPort. So a second playground on this
// machine avoids the ports, even while a process of the first one is about to listen on one of them.
const (
	redisPort = 16379
	etcdPort  = 12379
	guardPort = 19089
	adminPort = 19090 // of the first replica; the other replicas have the next ports
)

// ErrForeignKey is returned when a key of the given store that a sample bucket needs belongs to another program.
var ErrForeignKey = errors.New("dev: key belongs to another program")

// region is a store with its replicas and its consumer.
type region struct {
	name     string // empty if there is only one
	cfg      config.Config
	store    redis.UniversalClient
	etcd     *faultproxy.Proxy // its connections to etcd; nil if they can't be cut
	isCut    atomic.Bool
	replicas []*replica
	consumer *consumer
	total    taken // of the watched bucket, at the last count
	lately   taken // per second, since the previous count
	share    share // of the pool, as last read
}

func (r *region) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return lua.Peek(ctx, r.store, key, 1)
}

// open starts the servers that aren't given, and makes the regions.
func (p *playground) open(ctx context.Context) error {
	port := func(int) int { return 0 }
	if p.opts.Regions == nil {
		if ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(guardPort))); err == nil {
			p.atEnd(func() { _ = ln.Close() }) // it never has a connection
			port = func(known int) int { return known }
		}
	}
	stores := make([]string, len(p.opts.names()))
	for i := range stores {
		stores[i] = p.opts.Redis
		if stores[i] != "" {
			continue
		}
		server, err := devserver.StartRedis(port(redisPort))
		if err != nil {
			return p.hint(err, "--redis URL")
		}
		p.atEnd(server.Close)
		stores[i] = "redis://" + server.Addr()
	}
	etcd := p.opts.Etcd
	if p.opts.elects() && len(etcd) == 0 {
		server, err := devserver.StartEtcd(ctx, port(etcdPort), p.dir)
		if err != nil {
			return p.hint(err, "--etcd ADDRESSES, or --mode race, which needs no etcd")
		}
		p.atEnd(server.Close)
		etcd = []string{"http://" + server.Addr()}
	}
	for i, name := range p.opts.names() {
		r, err := p.newRegion(name, stores[i], etcd, port)
		if err != nil {
			return err
		}
		p.regions = append(p.regions, r)
		if err := r.check(ctx, len(p.opts.Etcd) > 0); err != nil {
			return err
		}
	}
	return nil
}

// hint returns advice for programs without an embedded server.
func (p *playground) hint(err error, flag string) error {
	switch {
	case p.opts.Regions != nil:
		return fmt.Errorf("dev: --regions requires the embedded servers: %w", err)
	case errors.Is(err, devserver.ErrLeftOut):
		return fmt.Errorf("%w: give %s", err, flag)
	}
	return err
}

// newRegion makes a region. If there are several, its connections to etcd are slow and can be cut.
func (p *playground) newRegion(name, store string, etcd []string, port func(int) int) (r *region, err error) {
	r = &region{name: name}
	prefix, count := "replica-", alone
	if name != "" {
		prefix, count = name+"-", perRegion
		r.etcd, err = faultproxy.New(strings.TrimPrefix(etcd[0], "http://"), faultproxy.Options{})
		if err != nil {
			return nil, err
		}
		p.atEnd(func() { _ = r.etcd.Close() }) // all of its users have ended
		if err := r.etcd.Delay(faultproxy.Both, oneWay, oneWay/4); err != nil {
			return nil, err
		}
		etcd = []string{r.etcd.Addr()}
	}
	r.cfg, err = p.opts.config(name, store, etcd, p.environ)
	if err != nil {
		return nil, err
	}
	r.store, err = redisconn.Open(r.cfg.Redis)
	if err != nil {
		return nil, fmt.Errorf("dev: store: %w", err)
	}
	p.atEnd(func() { _ = r.store.Close() }) // nothing is under way
	for i := range count {
		r.replicas = append(r.replicas, &replica{
			playground: p, name: prefix + strconv.Itoa(i+1), port: port(adminPort + i),
			redis: store, config: func(listen string) string { return p.opts.configText(name, etcd, listen) },
		})
	}
	return r, nil
}

// check checks that the servers answer, and that no other program uses the keys of the buckets.
func (r *region) check(ctx context.Context, givenEtcd bool) error {
	ctx, cancel := context.WithTimeout(ctx, reachTimeout)
	defer cancel()
	for _, b := range r.cfg.Buckets {
		known := r.store.Exists(ctx, lua.TokensKey(b.Key), lua.IndexKey(b.Key))
		state := r.store.Exists(ctx, lua.ControlKey(b.Key))
		if err := cmp.Or(known.Err(), state.Err()); err != nil {
			return fmt.Errorf("dev: the store %s doesn't answer: %w", r.cfg.Redis, err)
		}
		if known.Val() > 0 && state.Val() == 0 {
			return fmt.Errorf("%w: %q in %s is not a bucket: use another store or database", ErrForeignKey, b.Key, r.cfg.Redis)
		}
	}
	if !givenEtcd {
		return nil
	}
	e := r.cfg.Election
	client, err := etcdconn.Open(e.Options)
	if err != nil {
		return fmt.Errorf("dev: %w", err)
	}
	defer func() { _ = client.Close() }() // the request has ended by now
	if _, err := client.Get(ctx, e.Prefix+"/lead/"); err != nil {
		return fmt.Errorf("dev: etcd %s doesn't answer: %w", strings.Join(e.Endpoints, ","), err)
	}
	return nil
}
