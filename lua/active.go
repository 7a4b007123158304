package lua

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/policy"
)

// ActiveShards is the number of shards of a template's active set. The Cluster slot of a bucket decides in which shard
// it is.
const ActiveShards = 16

// activeTags are the hash tags of the shards. The slot of each tag is in the range of slots of the shard's buckets. So
// a shard and its buckets are usually on the same master.
var activeTags = func() (tags [ActiveShards]string) {
	for i, n := 0, 0; i < ActiveShards; n++ {
		if tag := "refiller:active:" + strconv.Itoa(n); Slot(tag)*ActiveShards/Slots == i {
			tags[i] = "{" + tag + "}:"
			i++
		}
	}
	return tags
}()

// ActiveShard returns the shard of a bucket.
func ActiveShard(key string) int { return Slot(key) * ActiveShards / Slots }

// ActiveKey returns the key of a shard of the active set, which holds the names of the template's buckets that are not
// full. The shards of all templates with the same number share a slot.
func ActiveKey(prefix string, shard int) string { return activeTags[shard] + "set:" + prefix }

// Shard is one part of the active set of a template.
type Shard struct {
	Prefix string // of the template
	Number int    // 0 to ActiveShards-1
}

// Slot returns the Cluster slot of the shard's keys.
func (s Shard) Slot() int { return Slot(activeTags[s.Number][1 : len(activeTags[s.Number])-2]) }

func (s Shard) key() string { return ActiveKey(s.Prefix, s.Number) }

// malformed returns the error of keys of the shard that hold something else.
func (s Shard) malformed(key, holds string) error {
	return fmt.Errorf("%w: the key %q does not hold %s", ErrMalformedBucket, key, holds)
}

// failed returns the error of a command on the shard's set.
func (s Shard) failed(err error) error {
	if redis.HasErrorPrefix(err, "WRONGTYPE") {
		return s.malformed(s.key(), "names of buckets")
	}
	return fmt.Errorf("refiller: active set: %w", err)
}

// CountResult is the number of names in a shard, or an error.
type CountResult struct {
	Count int64
	Err   error
}

// Counts returns how many names each shard holds, in one round trip.
func Counts(ctx context.Context, rdb redis.UniversalClient, shards []Shard) []CountResult {
	cmds, errs := each(ctx, rdb, len(shards),
		func(p redis.Pipeliner, i int) *redis.IntCmd { return p.SCard(ctx, shards[i].key()) })
	results := make([]CountResult, len(shards))
	for i, s := range shards {
		results[i].Count = cmds[i].Val()
		if errs[i] != nil {
			results[i] = CountResult{Err: s.failed(errs[i])}
		}
	}
	return results
}

// Names reads a part of the names in a shard. most is about the number of names to read. The caller begins with cursor
// 0, and calls Names again with next as the cursor until next is 0. A name that is in the shard all the time is
// returned at least once.
func (s Shard) Names(ctx context.Context, c Client, cursor uint64, most int) (names []string, next uint64, err error) {
	cmd := redis.NewScanCmd(ctx, nil, "sscan", s.key(), cursor, "count", most)
	if err := c.Process(ctx, cmd); err != nil {
		return nil, 0, s.failed(err)
	}
	names, next = cmd.Val()
	return names, next, nil
}

// outlast makes a set of a template live at least until the second till, in which the last of its buckets expires. If
// it fails, a later refill does the same.
func outlast(ctx context.Context, c Client, set string, till int64) {
	_ = c.Process(ctx, redis.NewIntCmd(ctx, "pexpireat", set, till*1000, "gt"))
}

// Add puts names into the shard.
func (s Shard) Add(ctx context.Context, c Client, names []string) error {
	return s.change(ctx, c, "sadd", names)
}

// Remove removes names from the shard.
func (s Shard) Remove(ctx context.Context, c Client, names []string) error {
	return s.change(ctx, c, "srem", names)
}

func (s Shard) change(ctx context.Context, c Client, command string, names []string) error {
	args := []any{command, s.key()}
	for _, name := range names {
		args = append(args, name)
	}
	if err := c.Process(ctx, redis.NewIntCmd(ctx, args...)); err != nil {
		return s.failed(err)
	}
	return nil
}

// Move moves names from the shard to the shard with the same number of another template.
func (s Shard) Move(ctx context.Context, c Client, prefix string, names []string) error {
	to := Shard{Prefix: prefix, Number: s.Number}
	args := make([]any, len(names))
	for i, name := range names {
		args[i] = name
	}
	if _, err := moveScript.run(ctx, c, []string{s.key(), to.key()}, args...); err != nil {
		return to.failed(err)
	}
	return nil
}

// OccupiedAtOnce is the most shards that one command checks. More would block the server for long.
const OccupiedAtOnce = 1000

// Occupied reports which of the shards hold names. It first sends commands for up to OccupiedAtOnce shards each. On a
// Cluster, the shards of a command share a slot. If a command finds a name, Occupied then checks its shards one by one.
func Occupied(ctx context.Context, rdb redis.UniversalClient, shards []Shard) ([]bool, error) {
	groups := [][]int{} // shards that go in one command
	_, cluster := rdb.(*redis.ClusterClient)
	last := map[int]int{} // the last group of a slot
	for i, s := range shards {
		slot := 0
		if cluster {
			slot = s.Slot()
		}
		g, there := last[slot]
		if !there || len(groups[g]) == OccupiedAtOnce {
			g = len(groups)
			last[slot], groups = g, append(groups, nil)
		}
		groups[g] = append(groups[g], i)
	}
	counts, err := exist(ctx, rdb, shards, groups)
	if err != nil {
		return nil, err
	}
	occupied, single := make([]bool, len(shards)), [][]int{}
	for g, n := range counts {
		if n > 0 {
			for _, i := range groups[g] {
				single = append(single, []int{i})
			}
		}
	}
	counts, err = exist(ctx, rdb, shards, single)
	if err != nil {
		return nil, err
	}
	for g, n := range counts {
		occupied[single[g][0]] = n > 0
	}
	return occupied, nil
}

// exist counts in one round trip how many shards of each group hold names.
func exist(ctx context.Context, rdb redis.UniversalClient, shards []Shard, groups [][]int) ([]int64, error) {
	cmds, errs := each(ctx, rdb, len(groups), func(p redis.Pipeliner, g int) *redis.IntCmd {
		keys := make([]string, len(groups[g]))
		for k, i := range groups[g] {
			keys[k] = shards[i].key()
		}
		return p.Exists(ctx, keys...)
	})
	counts := make([]int64, len(groups))
	for g, cmd := range cmds {
		if errs[g] != nil {
			return nil, fmt.Errorf("refiller: active set: %w", errs[g])
		}
		counts[g] = cmd.Val()
	}
	return counts, nil
}

// RefillActive refills buckets of a shard, as RefillBatch does, but creates none of them. A bucket that is full
// afterwards leaves the shard. A name that is no bucket leaves it, too. See RefillResult.Left. Every few refills a
// bucket gets a new expiry if less than half its life is left.
//
// A single Redis does all of this in the script call of the refill. On a Cluster the shard is in another slot than its
// buckets. So RefillActive changes the shard in further round trips: see leave.
func RefillActive(ctx context.Context, rdb redis.UniversalClient, s Shard, calls []RefillCall,
	perCall int) []RefillResult {
	for i := range calls {
		calls[i].Create = policy.CreateNever
	}
	if _, cluster := rdb.(*redis.ClusterClient); !cluster {
		results := refillBatch(ctx, rdb, calls, []string{s.key(), AliveKey(s.Prefix)}, perCall)
		for i := range results {
			results[i].Left = results[i].leaves()
		}
		return results
	}
	results := RefillBatch(ctx, rdb, calls, perCall)
	var gone []int
	var aging []string
	for i := range results {
		r := &results[i]
		switch {
		case r.leaves():
			gone = append(gone, i)
		case r.Err == nil && r.Status.Wrote() && (r.switched || r.Version.Index%refillsPerCheck(calls[i].Terms) == 0):
			aging = append(aging, calls[i].Key)
		}
	}
	leave(ctx, rdb, s, calls, gone, results)
	age(ctx, rdb, s, aging)
	return results
}

// leaves reports whether the bucket is to leave its shard.
func (r *RefillResult) leaves() bool {
	return r.Idle || r.Status == policy.StatusMalformed || r.Err == nil && !r.ofTemplate
}

// refillsPerCheck returns after how many refills a bucket's expiry is checked.
func refillsPerCheck(t *policy.Terms) int64 {
	if t == nil || t.Interval == 0 {
		return 1
	}
	return max(1, t.Lifetime().Microseconds()/(8*t.Interval)) // as in shared/policy.lua
}

// leave removes names from a shard that is in another slot than its buckets. A concurrent take may have entered its
// bucket just before the removal. So leave reads every bucket again after the removal, and enters those that aren't
// full. If nothing could be removed, a full bucket stays in the shard until its next refill. If leave fails after the
// removal, a bucket that isn't full may be missing from the shard. Then the bucket's next take that asks for the policy
// or is denied enters it.
func leave(ctx context.Context, rdb redis.UniversalClient, s Shard, calls []RefillCall, gone []int,
	results []RefillResult) {
	if len(gone) == 0 {
		return
	}
	names := make([]any, len(gone))
	for k, i := range gone {
		names[k] = calls[i].Key
	}
	if rdb.SRem(ctx, s.key(), names...).Err() != nil {
		return
	}
	readings, _ := each(ctx, rdb, len(gone),
		func(p redis.Pipeliner, k int) *redis.StringCmd { return p.Get(ctx, TokensKey(calls[gone[k]].Key)) })
	var back []any
	for k, i := range gone {
		tokens, err := readings[k].Int64()
		taken := !errors.Is(err, redis.Nil) &&
			(results[i].Status == policy.StatusUnknown || results[i].Idle && (err != nil || tokens < results[i].Tokens))
		results[i].Left = !taken
		if taken {
			back = append(back, calls[i].Key)
		}
	}
	if len(back) > 0 {
		_ = rdb.SAdd(ctx, s.key(), back...).Err() // if this fails, a later take enters the bucket, as above
	}
}

// age records the expiries of buckets that a refill may have renewed, in the shard and in the set of the buckets alive.
// If it fails for a bucket, a later refill records it.
func age(ctx context.Context, rdb redis.UniversalClient, s Shard, keys []string) {
	cmds, _ := each(ctx, rdb, len(keys),
		func(p redis.Pipeliner, i int) *redis.DurationCmd { return p.PExpireTime(ctx, TokensKey(keys[i])) })
	last := int64(0)
	for i, cmd := range cmds {
		if till := int64((cmd.Val() + time.Second - 1) / time.Second); cmd.Err() == nil && till > 0 {
			_ = rdb.ZAddXX(ctx, AliveKey(s.Prefix), redis.Z{Score: float64(till), Member: keys[i]}).Err()
			last = max(last, till)
		}
	}
	if last > 0 {
		outlast(ctx, rdb, s.key(), last)
		outlast(ctx, rdb, AliveKey(s.Prefix), last)
	}
}
