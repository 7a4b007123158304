package fetch

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	// mostShards is the largest number of shards. If there are several, each has room for at least leastOfShard buckets.
	mostShards   = 64
	leastOfShard = 1024
	// recentBuckets is how many buckets can be found without the lock of their shard.
	recentBuckets = 512
)

// bucket is a Client's memory of one bucket. Goroutines read it without a lock. They hold the lock of its shard while
// they change it, except for the marks.
type bucket struct {
	key   string
	known atomic.Pointer[info]        // never nil
	lines atomic.Pointer[lines]       // nil: no caller has waited
	block atomic.Pointer[block]       // of a bucket without flows; nil: none
	parts atomic.Pointer[flowBlocks]  // of a bucket with flows; nil: no flow ever had a block
	flows atomic.Pointer[flowDenials] // nil: no flow of the bucket was denied
	more  time.Time                   // when the bucket last got tokens that no reply reports

	rescued mark // set for a refill interval after a rescue
	refused mark // Redis refused its keys, so it has script calls of its own
}

// unseen is the info of every bucket that the Client has not used. unseenBucket represents all these buckets. Neither
// of them changes.
var (
	unseen       = new(info)
	unseenBucket = newBucket("")
)

func newBucket(key string) *bucket {
	b := &bucket{key: key}
	b.known.Store(unseen)
	return b
}

// used reports whether callers wait for the bucket, or it has a block. Such a bucket must not be forgotten.
func (b *bucket) used() bool { return b.block.Load() != nil || b.parts.Load().any() || b.waited() }

// waited reports whether callers wait for the bucket.
func (b *bucket) waited() bool {
	ls := b.lines.Load()
	return ls != nil && ls.waiters.Load() > 0
}

// mark marks something for a limited time. The zero mark has ended.
type mark struct{ until atomic.Pointer[time.Time] }

// active reports whether the mark has not ended.
func (m *mark) active(now time.Time) bool {
	until := m.until.Load()
	return until != nil && now.Before(*until)
}

// set sets the mark for a while.
func (m *mark) set(d time.Duration, now time.Time) {
	until := now.Add(d)
	m.until.Store(&until)
}

// claim sets the mark for a while, and reports whether it had ended before.
func (m *mark) claim(d time.Duration, now time.Time) bool {
	before, until := m.until.Load(), now.Add(d)
	return (before == nil || !now.Before(*before)) && m.until.CompareAndSwap(before, &until)
}

// buckets are the buckets that a Client used last. Each shard has two halves. When the young half is full, it becomes
// the old half. The buckets of the former old half are dropped, except those that must not be forgotten. If a bucket of
// the old half is used, it is put into the young half.
type buckets struct {
	seed   maphash.Seed
	shards []bucketShard
	// recent holds buckets that were found recently, by the hash of their keys. Each is in the young half of its shard.
	// Without recent, all goroutines that take from one bucket would write the cache line of its shard's lock.
	recent [recentBuckets]atomic.Pointer[bucket]
}

type bucketShard struct {
	of   *buckets
	half int // the most buckets of each half

	mu         sync.RWMutex
	young, old map[string]*bucket
	terms      *policy.Terms // of the last reply; buckets with equal policies share it, and its cache line
}

// newBuckets makes a memory for at least the size buckets that were used last. Each shard has room for some more than
// its part, since keys are not distributed evenly.
func newBuckets(size int) *buckets {
	n := max(1, min(mostShards, size/leastOfShard))
	half := size
	if n > 1 {
		half = size/n + size/n/8
	}
	bs := &buckets{seed: maphash.MakeSeed(), shards: make([]bucketShard, n)}
	for i := range bs.shards {
		bs.shards[i].of = bs
		bs.shards[i].half = half
		bs.shards[i].young = make(map[string]*bucket)
	}
	return bs
}

func (bs *buckets) shard(key string) *bucketShard { return bs.shardOf(maphash.String(bs.seed, key)) }

// shardOf returns the shard of the keys with a hash.
func (bs *buckets) shardOf(hash uint64) *bucketShard {
	return &bs.shards[hash>>32%uint64(len(bs.shards))]
}

// find returns the bucket of a key, unseenBucket if there is none.
func (bs *buckets) find(key string) *bucket {
	hash := maphash.String(bs.seed, key)
	recent := &bs.recent[hash%recentBuckets]
	if b := recent.Load(); b != nil && b.key == key {
		return b
	}
	s := bs.shardOf(hash)
	s.mu.RLock()
	b := s.young[key]
	old := b == nil && s.old[key] != nil
	if b != nil {
		recent.Store(b) // with the lock held: rotate removes it later
	}
	s.mu.RUnlock()
	switch {
	case b != nil:
		return b
	case old:
		return bs.obtain(key)
	}
	return unseenBucket
}

// obtain returns the bucket of a key. If there is none, it makes one.
func (bs *buckets) obtain(key string) *bucket {
	s := bs.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.obtain(key)
}

// obtain does the work of buckets.obtain, with the lock held.
func (s *bucketShard) obtain(key string) *bucket {
	b := s.young[key]
	if b != nil {
		return b
	}
	b = s.old[key]
	if b == nil {
		b = newBucket(key)
	}
	if len(s.young) >= s.half {
		s.rotate()
	}
	s.young[key] = b
	return b
}

// rotate drops the old half, except for the buckets in use, and makes the young half the old one. It also clears
// recent. Otherwise a bucket that is found there would never get into the new young half. The lock is held.
func (s *bucketShard) rotate() {
	for i := range s.of.recent {
		if s.of.recent[i].Load() != nil {
			s.of.recent[i].Store(nil)
		}
	}
	young := make(map[string]*bucket)
	for key, b := range s.old {
		if b.used() {
			young[key] = b
		}
	}
	s.old = s.young
	s.young = young
}

// addBlock adds a block to its bucket. If the bucket, or the block's flow, already has a block, it reports false.
func (bs *buckets) addBlock(blk *block) bool {
	s := bs.shard(blk.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(blk.key)
	if blk.flow == nil {
		return b.block.CompareAndSwap(nil, blk)
	}
	if b.parts.Load() == nil {
		b.parts.Store(&flowBlocks{})
	}
	return b.parts.Load().add(*blk.flow, blk)
}

// removeBlock removes a block of a bucket.
func (bs *buckets) removeBlock(blk *block) {
	s := bs.shard(blk.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(blk.key)
	if blk.flow == nil {
		b.block.CompareAndSwap(blk, nil)
		return
	}
	b.parts.Load().remove(*blk.flow, blk)
}

// forgive forgets a bucket's denial, because the bucket has more tokens. Denials whose replies arrive later are not
// remembered, either.
func (bs *buckets) forgive(key string) *bucket {
	s := bs.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(key)
	forgiven := *b.known.Load()
	forgiven.denied = nil
	b.known.Store(&forgiven)
	b.flows.Store(nil)
	b.more = time.Now()
	return b
}

// waited returns the buckets for which callers wait. A bucket of both halves is returned twice.
func (bs *buckets) waited() (found []*bucket) {
	for i := range bs.shards {
		s := &bs.shards[i]
		s.mu.RLock()
		for _, half := range []map[string]*bucket{s.young, s.old} {
			for _, b := range half {
				if b.waited() {
					found = append(found, b)
				}
			}
		}
		s.mu.RUnlock()
	}
	return found
}

// wait returns the lines of a bucket, and counts a caller that waits. The bucket isn't forgotten until the count of
// waiters is 0 again.
func (bs *buckets) wait(key string) *lines {
	s := bs.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(key)
	ls := b.lines.Load()
	if ls == nil {
		ls = &lines{}
		b.lines.Store(ls)
	}
	ls.waiters.Add(1)
	return ls
}

// remember records the reply to a take of n tokens that began at asked. It records the bucket's policy, which is nil if
// it has none. If the take was denied, it also records the denial. A known schedule stays while the policy is the same.
// If the bucket got more tokens since the call began, the denial is dropped, because it may be older than these tokens.
func (c *Client) remember(key string, n int64, leave policy.Leave, reply *lua.TakeReply, asked time.Time) *info {
	s := c.buckets.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b, now := s.obtain(key), time.Now()
	i := b.known.Load().updated(s.shared(reply.Terms), reply.Version.Era, now)
	// Denials of flows are remembered by flow.
	if !reply.OK && i.remembersDenials() && !i.divided() && asked.After(b.more) {
		i.denied = newDenial(n, leave.Of(i.limit()), reply, now)
	}
	if !reply.Repeated { // a repeated reply is of an earlier time
		b.known.Store(i)
		c.updateShare(key, i.share, reply.Remaining, true)
	}
	return i
}

// update changes the info of a bucket by change, and returns the new info.
func (bs *buckets) update(key string, change func(*info)) *info {
	s := bs.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.obtain(key)
	i := *b.known.Load()
	change(&i)
	b.known.Store(&i)
	return &i
}

// shared returns t, or the terms of the last reply if they are equal, so that buckets share them. The lock is held.
func (s *bucketShard) shared(t *policy.Terms) *policy.Terms {
	if t != nil && (s.terms == nil || *s.terms != *t) {
		s.terms = t
	}
	if t == nil {
		return nil
	}
	return s.terms
}
