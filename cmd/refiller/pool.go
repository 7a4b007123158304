package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
)

func poolCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "pool",
		Short: "Show the pools that regions share, and operate them",
		Args:  cli.UnknownCommand,
		RunE: func(*cobra.Command, []string) error {
			return cli.Usage(errors.New("pool: which command? status, plan, fence or lift"))
		},
	}
	cmd.AddCommand(poolStatusCommand(e), poolPlanCommand(e), poolFenceCommand(e), poolLiftCommand(e))
	return cmd
}

// pools is how a command reaches the pools in etcd.
type pools struct {
	connection
	operator string
}

func (p *pools) flags(cmd *cobra.Command) { p.addFlags(cmd, "etcd", "pool-registry") }

// open connects to the pools' etcd.
func (p *pools) open() (*clientv3.Client, config.Config, error) {
	cfg, err := p.load()
	if err != nil {
		return nil, cfg, err
	}
	if len(cfg.PoolRegistry.Endpoints) == 0 {
		return nil, cfg, cli.Usage(errors.New("where is etcd? give --config FILE or --etcd HOST:PORT"))
	}
	if o := p.laid; cfg.HasSeparateRegistry() && slices.ContainsFunc(o,
		func(o config.Override) bool { return strings.HasPrefix(o.Field, "election.") }) {
		return nil, cfg, cli.Usage(errors.New("the pools have an etcd of their own: give --pool-registry, not --etcd"))
	}
	client, err := etcdconn.Open(cfg.PoolRegistry.Options)
	return client, cfg, err
}

// whereEtcdIs adds the addresses of etcd to a timeout error, which says nothing else.
func whereEtcdIs(err error, cfg config.Config) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("etcd at %s does not answer: %w", strings.Join(cfg.PoolRegistry.Endpoints, ","), err)
	}
	return err
}
