package refill

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

// store is the server, or the Cluster, that holds the buckets.
type store interface {
	// refill calls the refill script for the buckets, with at most perCall of them in a script call. The results are in
	// the order of calls.
	refill(ctx context.Context, calls []lua.RefillCall, perCall int) []lua.RefillResult
	// refillActive does the same for buckets of a shard of an active set: see lua.RefillActive.
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
	// sweep ends expired reservations and leases: of each bucket at most the number most. The results are in the order of
	// keys.
	sweep(ctx context.Context, keys []string, most int) []lua.SweepResult
	// plan writes how buckets are divided among their flows. The results are in the order of calls.
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

// ownerOf returns the index of the master that owns a slot. A slot without an owner is being moved. Then any worker
// will do, because calls fail until the slot has a new owner.
func ownerOf(masters []master, slot int) int {
	return max(0, slices.IndexFunc(masters, func(m master) bool { return m.owns(slot) }))
}

// keyOn returns a key that is on the master. It is the name or, on a Cluster, the name with the lowest number that
// gives a slot of the master.
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
	cluster *redis.ClusterClient // nil unless rdb is a Cluster's client
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
