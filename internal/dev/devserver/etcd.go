//go:build !production

package devserver

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
)

// closeTimeout bounds the time for which Close waits for clients that don't disconnect, such as a watch in another
// terminal.
const closeTimeout = 2 * time.Second

// StartEtcd starts an empty etcd of one member on loopback, on the preferred port if that is free, and waits until it
// serves. Its files go into dir, which must exist, with its warnings in etcd.log.
func StartEtcd(ctx context.Context, preferredPort int, dir string) (*Server, error) {
	return onFreePort(preferredPort, func(addr string) (*Server, error) {
		client := url.URL{Scheme: "http", Host: addr}
		cfg := embed.NewConfig()
		cfg.Dir = filepath.Join(dir, "etcd")
		cfg.LogOutputs, cfg.LogLevel = []string{filepath.Join(dir, "etcd.log")}, "warn"
		cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
		cfg.ListenPeerUrls = nil // it has no peers, so the advertised address is only a name
		cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
		cfg.TickMs, cfg.ElectionMs = 50, 500 // so that leases of a second are possible
		cfg.UnsafeNoFsync = true             // its data is not used after it has ended
		cfg.AutoCompactionMode, cfg.AutoCompactionRetention = embed.CompactorModePeriodic, "5m"
		e, err := embed.StartEtcd(cfg)
		if err != nil {
			return nil, fmt.Errorf("devserver: start etcd: %w", err)
		}
		s := &Server{addr: addr, stop: func() { closeEtcd(e) }}
		select {
		case <-e.Server.ReadyNotify():
			return s, nil
		case err = <-e.Err():
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.Close()
		return nil, fmt.Errorf("devserver: start etcd: %w", err)
	})
}

func closeEtcd(e *embed.Etcd) {
	closed := make(chan struct{})
	go func() { // ends within etcd's own time limit of some seconds
		e.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
	}
}
