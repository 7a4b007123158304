package main

import (
	"context"
	"io"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/config"
)

// leaderOf reads from etcd which replica leads. prefix is the prefix of the election's keys.
func leaderOf(ctx context.Context, client *clientv3.Client, prefix string) (election.Leader, error) {
	cfg := election.DefaultConfig()
	cfg.Client = client
	cfg.Prefix = prefix
	cfg.Identity = "refiller"
	cfg.Logger = newLogger(env{Stderr: io.Discard}, config.Log{Level: "off"})
	candidate, err := election.New(cfg) // the candidate never runs
	if err != nil {
		return election.Leader{}, err
	}
	return candidate.Leader(ctx)
}
