package refill

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// store is the buckets' server.
type store interface {
	// refill calls the refill script for each bucket, at most perCall in a call;
	// the results are in order.
	refill(ctx context.Context, calls []lua.RefillCall, perCall int) []lua.RefillResult
	// refillActive calls the refill script for buckets of a shard of an active set:
	// see lua.RefillActive.
	refillActive(ctx context.Context, s lua.Shard, calls []lua.RefillCall, perCall int) []lua.RefillResult
	// occupied reports which shards hold names, and counts returns how many they hold.
	// names, add, remove and move are for the names in one shard: see package lua.
	occupied(ctx context.Context, shards []lua.Shard) ([]bool, error)
	counts(ctx context.Context, shards []lua.Shard) []lua.CountResult
	names(ctx context.Context, s lua.Shard, cursor uint64, most int) (names []string, next uint64, err error)
	add(ctx context.Context, s lua.Shard, names []string) error
	remove(ctx context.Context, s lua.Shard, names []string) error
	move(ctx context.Context, s lua.Shard, prefix string, names []string) error
	// peek reads one bucket.
	peek(ctx context.Context, key string) (lua.PeekReply, error)
	// sweep ends the expired reservations and leases of the buckets, at most as many of
	// each bucket as most; the results are in order.
	sweep(ctx context.Context, keys []string, most int) []lua.SweepResult
	// plan writes how buckets are divided among their flows; the results are in order.
	plan(ctx context.Context, calls []lua.PlanCall) []lua.PlanResult
	// masters returns the servers that hold the slots.
	masters(ctx context.Context) ([]master, error)
}

// master is a Redis server that owns slots, and so buckets.
type master struct {
	id    string
	slots []slotRange // sorted; nil: all
}

type slotRange struct{ from, to int }

func (m master) equal(o master) bool { return m.id == o.id && slices.Equal(m.slots, o.slots) }

func (m master) owns(slot int) bool {
	if m.slots == nil {
		return true
	}
	return slices.ContainsFunc(m.slots, func(r slotRange) bool { return r.from <= slot && slot <= r.to })
}

// ownerOf returns the index of the master that owns a slot. A slot without an owner is moving: any worker will do, as
// its calls fail until the slot has arrived.
func ownerOf(masters []master, slot int) int {
	return max(0, slices.IndexFunc(masters, func(m master) bool { return m.owns(slot) }))
}

// keyOn returns a key on the master: the name, or on a Cluster the first numbered one whose slot it owns.
func keyOn(m master, name string) string {
	if m.slots == nil {
		return name
	}
	for n := 0; ; n++ {
		if key := name + ":" + strconv.Itoa(n); m.owns(lua.Slot(key)) {
			return key
		}
	}
}

// redisStore is a store on real servers.
type redisStore struct {
	rdb     redis.UniversalClient
	cluster *redis.ClusterClient // nil unless a Cluster
}

var _ store = (*redisStore)(nil)

func newRedisStore(rdb redis.UniversalClient) *redisStore {
	cluster, _ := rdb.(*redis.ClusterClient)
	return &redisStore{rdb: rdb, cluster: cluster}
}

func (s *redisStore) refill(ctx context.Context, calls []lua.RefillCall, perCall int) []lua.RefillResult {
	return lua.RefillBatch(ctx, s.rdb, calls, perCall)
}

func (s *redisStore) refillActive(ctx context.Context, shard lua.Shard, calls []lua.RefillCall,
	perCall int) []lua.RefillResult {
	return lua.RefillActive(ctx, s.rdb, shard, calls, perCall)
}

func (s *redisStore) occupied(ctx context.Context, shards []lua.Shard) ([]bool, error) {
	return lua.Occupied(ctx, s.rdb, shards)
}

func (s *redisStore) counts(ctx context.Context, shards []lua.Shard) []lua.CountResult {
	return lua.Counts(ctx, s.rdb, shards)
}

func (s *redisStore) names(ctx context.Context, shard lua.Shard, cursor uint64, most int) ([]string, uint64, error) {
	return shard.Names(ctx, s.rdb, cursor, most)
}

func (s *redisStore) add(ctx context.Context, shard lua.Shard, names []string) error {
	return shard.Add(ctx, s.rdb, names)
}

func (s *redisStore) move(ctx context.Context, shard lua.Shard, prefix string, names []string) error {
	return shard.Move(ctx, s.rdb, prefix, names)
}

func (s *redisStore) remove(ctx context.Context, shard lua.Shard, names []string) error {
	return shard.Remove(ctx, s.rdb, names)
}

func (s *redisStore) peek(ctx context.Context, key string) (lua.PeekReply, error) {
	return lua.Peek(ctx, s.rdb, key, 1)
}

func (s *redisStore) sweep(ctx context.Context, keys []string, most int) []lua.SweepResult {
	return lua.Sweep(ctx, s.rdb, keys, most)
}

func (s *redisStore) plan(ctx context.Context, calls []lua.PlanCall) []lua.PlanResult {
	return lua.PlanBatch(ctx, s.rdb, calls)
}

func (s *redisStore) masters(ctx context.Context) ([]master, error) {
	if s.cluster == nil {
		return []master{{}}, nil
	}
	shards, err := s.cluster.ClusterShards(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("refill: cluster topology: %w", err)
	}
	var all []master
	for _, shard := range shards {
		m := master{slots: []slotRange{}}
		for _, n := range shard.Nodes {
			if n.Role == "master" {
				m.id = n.ID
			}
		}
		for _, r := range shard.Slots {
			m.slots = append(m.slots, slotRange{int(r.Start), int(r.End)})
		}
		if len(m.slots) > 0 {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b master) int { return a.slots[0].from - b.slots[0].from })
	return all, nil
}
