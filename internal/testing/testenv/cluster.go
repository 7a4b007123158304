package testenv

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	clusterMasters = 3
	clusterSlots   = 16384
)

// RedisCluster is a Redis Cluster of three masters that share all slots evenly. It has no replicas until
// [RedisCluster.Replicate]. When a master is down, the others go on serving their slots.
type RedisCluster struct {
	t       testing.TB
	options options
	nodes   []*RedisServer
	control []*redis.Client // one for each node
	ids     []string        // node ids, in the order of nodes

	replicas []*RedisServer
}

// Cluster starts the masters and waits until each of them serves its slots and knows the others. Every node gets the
// options. [WithTLS] and [WithDataDir] are not supported.
func Cluster(t testing.TB, opts ...Option) *RedisCluster {
	t.Helper()
	o := newOptions(opts)
	if o.certs != nil || o.dataDir != "" {
		t.Fatalf("testenv: WithTLS and WithDataDir are not options of Cluster")
	}
	c := &RedisCluster{t: t, options: o}
	bus := make([]int, clusterMasters)
	for i := range clusterMasters {
		var node *RedisServer
		node, bus[i] = c.start("node" + strconv.Itoa(i))
		c.nodes = append(c.nodes, node)
		c.control = append(c.control, node.Client())
	}
	if err := c.form(bus); err != nil {
		t.Fatalf("testenv: form cluster: %v", err)
	}
	if err := pollUntil(c.formed); err != nil {
		t.Fatalf("testenv: wait for cluster: %v", err)
	}
	return c
}

// start starts a node that doesn't know the other nodes yet. It returns the node and the port of its cluster bus.
func (c *RedisCluster) start(name string) (node *RedisServer, bus int) {
	onFreePorts(c.t, 2, func(ports []int) (err error) {
		bus = ports[1]
		proxy, announced := frontOf(c.t, c.options, ports[0])
		node, err = startRedis(c.t, name, ports[0], c.options, "--cluster-enabled", "yes",
			"--cluster-port", strconv.Itoa(bus), "--cluster-announce-ip", "127.0.0.1",
			"--cluster-announce-port", announced, "--cluster-announce-bus-port", strconv.Itoa(bus),
			"--cluster-node-timeout", "3000", "--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")
		if err == nil {
			node.proxy = proxy
		}
		return err
	})
	return node, bus
}

// Replicate starts a replica of each master, and waits until each replica is in sync and all masters know it. From then
// on a replica becomes the master some seconds after its master has stopped. The replicas are in the order of
// [RedisCluster.Nodes].
func (c *RedisCluster) Replicate() []*RedisServer {
	c.t.Helper()
	replicas := make([]*RedisServer, clusterMasters)
	control := make([]*redis.Client, clusterMasters)
	for i := range replicas {
		node, bus := c.start("replica" + strconv.Itoa(i))
		replicas[i] = node
		control[i] = node.Client()
		if err := pollUntil(func(ctx context.Context) error {
			return c.control[0].Do(ctx, "cluster", "meet", "127.0.0.1", node.Port(), bus).Err()
		}); err != nil {
			c.t.Fatalf("testenv: meet the replica of node %d: %v", i, err)
		}
	}
	for i, id := range c.ids {
		replicate := func(ctx context.Context) error { return control[i].ClusterReplicate(ctx, id).Err() }
		if err := pollUntil(replicate); err != nil { // fails until the node knows its master
			c.t.Fatalf("testenv: replicate node %d: %v", i, err)
		}
	}
	for i, node := range replicas {
		if err := pollUntil(func(ctx context.Context) error { return c.replicated(ctx, node, control[i]) }); err != nil {
			c.t.Fatalf("testenv: wait for the replica of node %d: %v", i, err)
		}
	}
	c.replicas = replicas
	return replicas
}

// replicated returns nil once a replica is in sync and all masters know it as a replica.
func (c *RedisCluster) replicated(ctx context.Context, node *RedisServer, control *redis.Client) error {
	id, err := control.ClusterMyID(ctx).Result()
	if err != nil {
		return err
	}
	link, err := node.info(ctx, control, "replication", "master_link_status")
	if err != nil {
		return err
	}
	if link != "up" {
		return fmt.Errorf("its link is %s", link)
	}
	for i, master := range c.control {
		nodes, err := master.ClusterNodes(ctx).Result()
		if err != nil {
			return err
		}
		known := false
		for line := range strings.Lines(nodes) {
			known = known || strings.HasPrefix(line, id+" ") && strings.Contains(line, " slave ")
		}
		if !known {
			return fmt.Errorf("node %d does not know it", i)
		}
	}
	return nil
}

// form gives each node its slots and lets the first one meet the others.
func (c *RedisCluster) form(bus []int) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	for i, node := range c.control {
		id, err := node.ClusterMyID(ctx).Result()
		if err != nil {
			return err
		}
		c.ids = append(c.ids, id)
		first, last := i*clusterSlots/clusterMasters, (i+1)*clusterSlots/clusterMasters-1
		if err := node.ClusterAddSlotsRange(ctx, first, last).Err(); err != nil {
			return err
		}
		// The epochs are different. Otherwise the nodes would first have to resolve a conflict.
		if err := node.Do(ctx, "cluster", "set-config-epoch", i+1).Err(); err != nil {
			return err
		}
	}
	for i, node := range c.nodes[1:] {
		if err := c.control[0].Do(ctx, "cluster", "meet", "127.0.0.1", node.Port(), bus[i+1]).Err(); err != nil {
			return err
		}
	}
	return nil
}

// formed returns nil once every node is in state ok and knows the owners of all slots.
func (c *RedisCluster) formed(ctx context.Context) error {
	for i, node := range c.control {
		info, err := node.ClusterInfo(ctx).Result()
		if err != nil {
			return err
		}
		for _, want := range []string{"cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3",
			"cluster_size:3"} {
			if !strings.Contains(info, want+"\r\n") {
				return fmt.Errorf("node %d lacks %s in:\n%s", i, want, info)
			}
		}
	}
	return nil
}

// Nodes returns the servers that were the masters at the start.
func (c *RedisCluster) Nodes() []*RedisServer { return append([]*RedisServer(nil), c.nodes...) }

// Servers returns all servers, masters and replicas.
func (c *RedisCluster) Servers() []*RedisServer { return append(c.Nodes(), c.replicas...) }

// Masters returns the servers that say that they are masters with slots. A server that is paused is left out.
func (c *RedisCluster) Masters() (masters []*RedisServer) {
	for _, s := range c.Servers() {
		if c.serves(s, func(first, last int) bool { return true }) {
			masters = append(masters, s)
		}
	}
	return masters
}

// Master returns the server that says that it serves a slot. It returns nil if no server that answers says so.
func (c *RedisCluster) Master(slot int) *RedisServer {
	for _, s := range c.Servers() {
		if c.serves(s, func(first, last int) bool { return first <= slot && slot <= last }) {
			return s
		}
	}
	return nil
}

// serves reports whether a server says that it is a master with a range of slots that is wanted.
func (c *RedisCluster) serves(s *RedisServer, wanted func(first, last int) bool) bool {
	if !s.Running() {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	client := redis.NewClient(s.ClientOptions())
	defer func() { _ = client.Close() }()
	nodes, err := client.ClusterNodes(ctx).Result()
	if err != nil {
		return false
	}
	for line := range strings.Lines(nodes) {
		fields := strings.Fields(line)
		const slots = 8 // id, address, flags, master, ping, pong, epoch, link; then the ranges
		if len(fields) <= slots || !strings.Contains(fields[2], "myself,master") {
			continue
		}
		for _, r := range fields[slots:] {
			var first, last int
			switch n, _ := fmt.Sscanf(r, "%d-%d", &first, &last); n { // a slot that moves has no number here
			case 1:
				last = first
			case 0:
				continue
			}
			if wanted(first, last) {
				return true
			}
		}
	}
	return false
}

// Addrs returns the addresses of the nodes, or of their proxies if the nodes have proxies.
func (c *RedisCluster) Addrs() []string {
	addrs := make([]string, len(c.nodes))
	for i, n := range c.nodes {
		addrs[i] = n.announced()
	}
	return addrs
}

// URL returns the addresses as a URL.
func (c *RedisCluster) URL() string { return "redis-cluster://" + strings.Join(c.Addrs(), ",") }

// Client returns a new client of the cluster. The client honours the deadline of a call's context. It is closed when
// the test ends.
func (c *RedisCluster) Client() *redis.ClusterClient { return c.client(nil) }

// Direct is like Client, but the connections bypass the proxies.
func (c *RedisCluster) Direct() *redis.ClusterClient { return c.client(pastProxies(c.Servers)) }

func (c *RedisCluster) client(dial dialer) *redis.ClusterClient {
	client := redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:                 c.Addrs(),
		Password:              c.options.password,
		Dialer:                dial,
		DialerRetries:         1,
		ContextTimeoutEnabled: true,
	})
	c.t.Cleanup(func() { _ = client.Close() })
	return client
}

// Slot returns the slot of a key.
func (c *RedisCluster) Slot(key string) int {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := errors.New("no node is running")
	for i, node := range c.nodes {
		if !node.Running() {
			continue
		}
		var slot int64
		slot, err = c.control[i].ClusterKeySlot(ctx, key).Result()
		if err == nil {
			return int(slot)
		}
	}
	c.t.Errorf("testenv: slot of %q: %v", key, err)
	return 0
}

// Owner returns the master that says that it serves a slot. It checks only the servers that were the masters at the
// start.
func (c *RedisCluster) Owner(slot int) *RedisServer {
	c.t.Helper()
	i, err := c.owner(slot)
	if err != nil {
		c.t.Errorf("testenv: owner of slot %d: %v", slot, err)
		return c.nodes[0]
	}
	return c.nodes[i]
}

// owner returns the index of the node that says that it serves a slot.
func (c *RedisCluster) owner(slot int) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := errors.New("no node serves it")
	for i, node := range c.nodes {
		if !node.Running() {
			continue
		}
		shards, e := c.control[i].ClusterShards(ctx).Result()
		if e != nil {
			err = e
			continue
		}
		for _, shard := range shards {
			if len(shard.Nodes) == 0 || shard.Nodes[0].ID != c.ids[i] { // no test calls this in a cluster with replicas
				continue
			}
			for _, r := range shard.Slots {
				if r.Start <= int64(slot) && int64(slot) <= r.End {
					return i, nil
				}
			}
		}
	}
	return 0, err
}

// MoveSlot moves a slot with its keys to another master. It calls [RedisCluster.StartMove], [SlotMove.MoveKeys] and
// [SlotMove.Finish]. After that the former owner replies MOVED to calls for the slot.
func (c *RedisCluster) MoveSlot(slot int, to *RedisServer) error {
	m, err := c.StartMove(slot, to)
	if err != nil {
		return err
	}
	if err := m.MoveKeys(); err != nil {
		return err
	}
	return m.Finish()
}

// SlotMove is a slot on its way from one master to another.
type SlotMove struct {
	c        *RedisCluster
	slot     int
	from, to int
}

// StartMove marks a slot as migrating to another master. Until [SlotMove.Finish], the owner replies ASK to a call for a
// key that it doesn't have. It replies TRYAGAIN to a script if only some of the script's keys have been moved.
func (c *RedisCluster) StartMove(slot int, to *RedisServer) (*SlotMove, error) {
	if slot < 0 || slot >= clusterSlots {
		return nil, fmt.Errorf("testenv: slot %d is not in 0..%d", slot, clusterSlots-1)
	}
	from, err := c.owner(slot)
	if err != nil {
		return nil, fmt.Errorf("testenv: owner of slot %d: %w", slot, err)
	}
	m := &SlotMove{c: c, slot: slot, from: from, to: -1}
	for i, n := range c.nodes {
		if n == to {
			m.to = i
		}
	}
	if m.to < 0 || m.to == from {
		return nil, fmt.Errorf("testenv: move slot %d: the target must be another node of the cluster", slot)
	}
	if err := m.setSlot(m.to, "importing", m.from); err != nil {
		return nil, err
	}
	return m, m.setSlot(m.from, "migrating", m.to)
}

// setSlot sets the slot's state on a node: importing from other, migrating to other, or owned by other.
func (m *SlotMove) setSlot(node int, state string, other int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	err := m.c.control[node].Do(ctx, "cluster", "setslot", m.slot, state, m.c.ids[other]).Err()
	if err != nil {
		return fmt.Errorf("testenv: set slot %d %s: %w", m.slot, state, err)
	}
	return nil
}

// MoveKeys moves the named keys of the slot. Without names it moves all keys of the slot.
func (m *SlotMove) MoveKeys(keys ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	if len(keys) > 0 {
		return m.migrate(ctx, keys)
	}
	for {
		keys, err := m.c.control[m.from].ClusterGetKeysInSlot(ctx, m.slot, 1000).Result()
		if err != nil {
			return fmt.Errorf("testenv: keys in slot %d: %w", m.slot, err)
		}
		if len(keys) == 0 {
			return nil
		}
		if err := m.migrate(ctx, keys); err != nil {
			return err
		}
	}
}

// migrate moves keys. If the target has just started, migrate first waits until it is a part of the cluster again.
func (m *SlotMove) migrate(ctx context.Context, keys []string) error {
	args := []any{"migrate", "127.0.0.1", m.c.nodes[m.to].Port(), "", 0, 5000}
	if m.c.options.password != "" {
		args = append(args, "auth", m.c.options.password)
	}
	args = append(args, "keys")
	for _, key := range keys {
		args = append(args, key)
	}
	for {
		err := m.c.control[m.from].Do(ctx, args...).Err()
		switch {
		case err == nil:
			return nil
		case !strings.Contains(err.Error(), "CLUSTERDOWN") || ctx.Err() != nil:
			return fmt.Errorf("testenv: move keys of slot %d: %w", m.slot, err)
		}
		time.Sleep(pollInterval)
	}
}

// Finish makes all masters regard the target as the owner of the slot. The target is changed first, so that the slot
// has an owner at every moment.
func (m *SlotMove) Finish() error {
	order := []int{m.to, m.from}
	for i := range m.c.nodes {
		if i != m.to && i != m.from {
			order = append(order, i)
		}
	}
	for _, node := range order {
		if !m.c.nodes[node].Running() {
			continue
		}
		if err := m.setSlot(node, "node", m.to); err != nil {
			return err
		}
	}
	return nil
}
