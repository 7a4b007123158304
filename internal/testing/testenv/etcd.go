package testenv

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// EtcdUser is the name of the user that [WithPassword] makes.
const EtcdUser = "root"

// EtcdCluster is a cluster of etcd processes.
type EtcdCluster struct {
	t       testing.TB
	options options
	members []*EtcdMember
}

// EtcdMember is one etcd process. It also has the methods of [Process]. All are safe for concurrent use.
type EtcdMember struct {
	*Process
	name       string
	clientPort int
	scheme     string
}

// Etcd starts a cluster of 1 or 3 members and waits until every member serves linearizable reads. A leader that was
// killed is replaced after about half a second. Members don't sync their files to disk: the data survives Kill, but not
// a crash of the machine.
func Etcd(t testing.TB, members int, opts ...Option) *EtcdCluster {
	t.Helper()
	if members != 1 && members != 3 {
		t.Fatalf("testenv: etcd members must be 1 or 3, not %d", members)
	}
	o := newOptions(opts)
	o.refuseData(t, "Etcd")
	binary := EtcdProgram(t)
	c := &EtcdCluster{t: t, options: o}
	onFreePorts(t, 2*members, func(ports []int) error {
		for _, m := range c.members { // members of an earlier attempt that failed because a port was taken
			m.Kill()
		}
		c.members = nil
		if err := c.start(binary, ports[:members], ports[members:]); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
		defer cancel()
		return c.waitStarted(ctx, "")
	})
	if o.password != "" {
		if err := c.enableAuth(); err != nil {
			t.Fatalf("testenv: enable etcd authentication: %v", err)
		}
	}
	return c
}

func (c *EtcdCluster) start(binary string, clientPorts, peerPorts []int) error {
	scheme := "http"
	if c.options.certs != nil {
		scheme = "https"
	}
	initial := make([]string, len(peerPorts))
	for i, port := range peerPorts {
		initial[i] = fmt.Sprintf("m%d=http://%s", i, loopback(port))
	}
	for i, port := range clientPorts {
		name := "m" + strconv.Itoa(i)
		client, peer := scheme+"://"+loopback(port), "http://"+loopback(peerPorts[i])
		args := []string{
			"--name", name, "--data-dir", "data",
			"--listen-client-urls", client, "--advertise-client-urls", client,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
			"--initial-cluster", strings.Join(initial, ","), "--initial-cluster-state", "new",
			"--initial-cluster-token", strconv.Itoa(peerPorts[0]),
			"--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync", "--bcrypt-cost", "4",
		}
		if certs := c.options.certs; certs != nil {
			args = append(args, "--cert-file", certs.CertFile, "--key-file", certs.KeyFile,
				"--trusted-ca-file", certs.CAFile, "--client-cert-auth")
		}
		p, err := startProcess(c.t, Command{
			Name: "etcd-" + name, Path: binary, Args: append(args, c.options.args...), Env: c.options.env,
		})
		if err != nil {
			return err
		}
		c.members = append(c.members, &EtcdMember{Process: p, name: name, clientPort: port, scheme: scheme})
	}
	return nil
}

// Endpoints returns the client URLs of all members.
func (c *EtcdCluster) Endpoints() []string {
	endpoints := make([]string, len(c.members))
	for i, m := range c.members {
		endpoints[i] = m.Endpoint()
	}
	return endpoints
}

// Members returns the members.
func (c *EtcdCluster) Members() []*EtcdMember { return append([]*EtcdMember(nil), c.members...) }

// Leader returns the member that a majority of the members names as the leader. It reports false if there is none.
func (c *EtcdCluster) Leader(ctx context.Context) (*EtcdMember, bool) {
	votes := make(map[uint64]int)
	ids := make(map[uint64]*EtcdMember)
	for _, m := range c.members {
		status, err := c.status(ctx, m)
		if err == nil && status.Leader != 0 {
			votes[status.Leader]++
			ids[status.Header.MemberId] = m
		}
	}
	for id, n := range votes {
		if m := ids[id]; m != nil && n > len(c.members)/2 {
			return m, true
		}
	}
	return nil, false
}

func (c *EtcdCluster) status(ctx context.Context, m *EtcdMember) (*clientv3.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second) // a paused member never answers
	defer cancel()
	client, err := clientv3.New(c.clientConfig(ctx, c.options.password, m.Endpoint()))
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	return client.Status(ctx, m.Endpoint())
}

// Client returns a new client of the given endpoints, or of all members if no endpoint is given. The client is closed
// when the test ends.
func (c *EtcdCluster) Client(endpoints ...string) *clientv3.Client {
	c.t.Helper()
	if len(endpoints) == 0 {
		endpoints = c.Endpoints()
	}
	client, err := clientv3.New(c.clientConfig(context.Background(), c.options.password, endpoints...))
	if err != nil {
		c.t.Fatalf("testenv: etcd client: %v", err)
	}
	c.t.Cleanup(func() { _ = client.Close() })
	return client
}

func (c *EtcdCluster) clientConfig(ctx context.Context, password string, endpoints ...string) clientv3.Config {
	cfg := clientv3.Config{Context: ctx, Endpoints: endpoints, DialTimeout: readyTimeout, Logger: zap.NewNop()}
	if c.options.certs != nil {
		cfg.TLS = c.options.certs.ClientConfig()
	}
	if password != "" {
		cfg.Username, cfg.Password = EtcdUser, password
	}
	return cfg
}

// WaitReady waits until every running member serves linearizable reads. It fails when ctx ends. ctx needs a deadline if
// a member may be paused or the majority down.
func (c *EtcdCluster) WaitReady(ctx context.Context) error {
	for _, m := range c.members {
		if !m.Running() {
			continue
		}
		if err := c.waitMember(ctx, c.options.password, m); err != nil {
			return err
		}
	}
	return nil
}

// waitStarted waits until every member serves linearizable reads.
func (c *EtcdCluster) waitStarted(ctx context.Context, password string) error {
	for _, m := range c.members {
		if err := c.waitMember(ctx, password, m); err != nil {
			return err
		}
	}
	return nil
}

func (c *EtcdCluster) waitMember(ctx context.Context, password string, m *EtcdMember) error {
	return m.await(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		client, err := clientv3.New(c.clientConfig(ctx, password, m.Endpoint()))
		if err != nil {
			return err
		}
		defer func() { _ = client.Close() }()
		_, err = client.Get(ctx, "ready")
		return err
	})
}

// enableAuth makes the root user and requires authentication from then on.
func (c *EtcdCluster) enableAuth() error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	client, err := clientv3.New(c.clientConfig(ctx, "", c.Endpoints()...))
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	if _, err := client.RoleAdd(ctx, EtcdUser); err != nil {
		return err
	}
	if _, err := client.UserAdd(ctx, EtcdUser, c.options.password); err != nil {
		return err
	}
	if _, err := client.UserGrantRole(ctx, EtcdUser, EtcdUser); err != nil {
		return err
	}
	if _, err := client.AuthEnable(ctx); err != nil {
		return err
	}
	return c.waitStarted(ctx, c.options.password)
}

// Name returns the member's name.
func (m *EtcdMember) Name() string { return m.name }

// Addr returns the host and port for clients.
func (m *EtcdMember) Addr() string { return loopback(m.clientPort) }

// Endpoint returns the URL for clients.
func (m *EtcdMember) Endpoint() string { return m.scheme + "://" + m.Addr() }

// Restart stops the member if it is running, starts it again with its data, and waits until it listens. The member
// serves once a majority runs: see [EtcdCluster.WaitReady].
func (m *EtcdMember) Restart() {
	m.t.Helper()
	m.Process.Restart()
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	if err := m.awaitListening(ctx, m.Addr()); err != nil {
		m.t.Errorf("%v", err)
	}
}
