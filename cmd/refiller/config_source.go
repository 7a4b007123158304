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

// configSource reads a replica's configuration from its file and from a document in etcd that all replicas share. The
// environment and flags override both.
type configSource struct {
	config.Source
	shared *etcdconn.Key // nil if there is no shared document

	of  content // the texts from which cfg was read; zero if there is no cfg
	cfg config.Config
}

// content identifies the texts from which a configuration was read.
type content struct {
	file   [sha256.Size]byte
	shared string
}

// load returns the configuration from the file and the shared document. It uses the value of the document that was last
// read from etcd. If neither has changed since the last call, it returns the remembered configuration, because parsing
// a large file is slow.
func (s *configSource) load() (config.Config, error) {
	before, beforeErr := s.currentContent()
	if beforeErr == nil && before == s.of {
		return s.cfg, nil
	}
	cfg, err := s.read()
	s.of, s.cfg = content{}, config.Config{}
	after, afterErr := s.currentContent()
	if err == nil && beforeErr == nil && afterErr == nil && after == before {
		s.of, s.cfg = before, cfg
	}
	return cfg, err
}

// currentContent identifies the texts from which read would read the configuration now.
func (s *configSource) currentContent() (content, error) {
	file, err := filewatch.Sum(s.Path)
	c := content{file: file}
	if s.shared != nil {
		c.shared = string(s.shared.Value())
	}
	return c, err
}

// read reads the configuration anew.
func (s *configSource) read() (config.Config, error) {
	source := s.Source
	if s.shared != nil {
		source.Shared = config.Shared{Source: "etcd:" + s.shared.Name(), Data: s.shared.Value()}
	}
	return config.Load(source)
}

// openShared opens a client of etcd, and adds the key of the shared document to the source. It reads nothing. cfg is
// the configuration from the file. It has the addresses of etcd and the prefix of the key.
func (s *configSource) openShared(cfg config.Config, log hclog.Logger) (closeEtcd func() error, err error) {
	if len(cfg.Election.Endpoints) == 0 {
		return nil, cli.Usage(errors.New("--config-etcd requires election.endpoints, the addresses of etcd"))
	}
	client, err := etcdconn.Open(cfg.Election.Options)
	if err != nil {
		return nil, err
	}
	s.shared = etcdconn.NewKey(client, cfg.RefillPrefix()+"/config", log)
	return client.Close, nil
}

// loadAtStart returns the configuration with which a replica starts. If the shared document can't be read or is
// invalid, it returns the configuration from the file alone. In this case wrong is the reason why the document is not
// used.
func (s *configSource) loadAtStart(ctx context.Context) (cfg config.Config, wrong, err error) {
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
