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
		Short: "Show and control the pools that regions share",
		Args:  cli.UnknownCommand,
		RunE: func(*cobra.Command, []string) error {
			return cli.Usage(errors.New("pool: no subcommand was given: want status, plan, fence or lift"))
		},
	}
	cmd.AddCommand(poolStatusCommand(e), poolPlanCommand(e), poolFenceCommand(e), poolLiftCommand(e))
	return cmd
}

// pools has the settings with which a command reaches the pools in etcd.
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
		return nil, cfg, cli.Usage(errors.New("no address of etcd was given: want --config FILE or --etcd HOST:PORT"))
	}
	ofElection := func(o config.Override) bool { return strings.HasPrefix(o.Field, "election.") }
	if cfg.HasSeparateRegistry() && slices.ContainsFunc(p.fromFlags, ofElection) {
		return nil, cfg, cli.Usage(errors.New(
			"the pools are in another etcd than the election: want --pool-registry instead of --etcd"))
	}
	client, err := etcdconn.Open(cfg.PoolRegistry.Options)
	return client, cfg, err
}

// withEtcdAddresses adds the addresses of etcd to an error of a timeout, which does not name the server. It returns
// other errors as they are.
func withEtcdAddresses(err error, cfg config.Config) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("etcd at %s does not answer: %w", strings.Join(cfg.PoolRegistry.Endpoints, ","), err)
	}
	return err
}
