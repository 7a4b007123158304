package main

import (
	"context"
	"io"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
)

// dialEtcd makes a client of the etcd that a configuration names; it makes no
// request.
func dialEtcd(e config.Election) (*clientv3.Client, error) {
	dial := election.DialConfig{Endpoints: e.Endpoints, Username: e.Username, TLS: election.TLSConfig{CA: e.TLS.CA, Cert: e.TLS.Cert, Key: e.TLS.Key}}
	if !e.Password.IsZero() {
		var err error
		if dial.Password, err = e.Password.Reveal(); err != nil {
			return nil, err
		}
	}
	return election.Dial(dial)
}

// leaderOf asks who leads in the election under a prefix.
func leaderOf(ctx context.Context, client *clientv3.Client, prefix string) (election.Leader, error) {
	cfg := election.DefaultConfig()
	cfg.Client, cfg.Prefix, cfg.Identity = client, prefix, "refiller"
	cfg.Logger = newLogger(env{stderr: io.Discard}, config.Log{Level: "off"})
	candidate, err := election.New(cfg) // that never runs
	if err != nil {
		return election.Leader{}, err
	}
	return candidate.Leader(ctx)
}
