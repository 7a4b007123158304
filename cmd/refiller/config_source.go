package main

import (
	"context"
	"crypto/sha256"
	"errors"

	"github.com/hashicorp/go-hclog"

	"github.com/tokenrefill/refiller/internal/cli"
	"github.com/tokenrefill/refiller/internal/cli/filewatch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
)

// configSource is where a replica's configuration comes from: its file, with the environment and flags laid over it,
// and what replicas share in etcd.
type configSource struct {
	config.Source
	shared *etcdconn.Key // nil: nothing is shared

	of  content // what cfg was read from; the zero content if there is no cfg
	cfg config.Config
}

// content is what a configuration is read from.
type content struct {
	file   [sha256.Size]byte
	shared string
}

// load returns the configuration from the file and from the shared document as it was last read from etcd. If neither
// has changed since the last call, it returns the remembered configuration, because parsing a large file takes a while.
func (s *configSource) load() (config.Config, error) {
	before, seen := s.content()
	if seen == nil && before == s.of {
		return s.cfg, nil
	}
	cfg, err := s.read()
	s.of, s.cfg = content{}, config.Config{}
	if after, unseen := s.content(); err == nil && seen == nil && unseen == nil && after == before {
		s.of, s.cfg = before, cfg
	}
	return cfg, err
}

func (s *configSource) content() (content, error) {
	file, err := filewatch.Sum(s.Path)
	c := content{file: file}
	if s.shared != nil {
		c.shared = string(s.shared.Value())
	}
	return c, err
}

func (s *configSource) read() (config.Config, error) {
	source := s.Source
	if s.shared != nil {
		source.Shared = config.Shared{Source: "etcd:" + s.shared.Name(), Data: s.shared.Value()}
	}
	return config.Load(source)
}

// follow adds the shared document to the source. cfg is the configuration from the file: it says where etcd is and
// which key has the document.
func (s *configSource) follow(cfg config.Config, log hclog.Logger) (closeEtcd func() error, err error) {
	if len(cfg.Election.Endpoints) == 0 {
		return nil, cli.Usage(errors.New("--config-etcd wants election.endpoints, which say where etcd is"))
	}
	client, err := etcdconn.Open(cfg.Election.Options)
	if err != nil {
		return nil, err
	}
	s.shared = etcdconn.NewKey(client, cfg.RefillPrefix()+"/config", log)
	return client.Close, nil
}

// first returns the configuration with which a replica starts. If the shared document can't be read or is invalid, that
// is the configuration from the file alone, and wrong says why the document is not used.
func (s *configSource) first(ctx context.Context) (cfg config.Config, wrong, err error) {
	if s.shared == nil {
		cfg, err = s.load()
		return cfg, nil, err
	}
	wrong = s.shared.Read(ctx)
	if wrong == nil {
		cfg, wrong = s.load()
		if wrong == nil {
			return cfg, nil, nil
		}
	}
	alone := configSource{Source: s.Source}
	cfg, err = alone.load()
	return cfg, wrong, err
}
