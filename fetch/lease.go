package fetch

import (
	"cmp"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// Limits of the time that a block is held.
const (
	MinLeaseHold = 10 * time.Millisecond
	MaxLeaseHold = time.Hour
)

const (
	// leaseGrace is how much longer than its hold time a block lasts, so that the bucket can still be told of it after
	// a stretch in which it was away.
	leaseGrace = 2 * time.Second
	// leaseMargin is the part of leaseGrace in which tokens are no longer handed out: a process may stand still between
	// the look at its clock and the work that the token is for.
	leaseMargin = time.Second
	// maxLeases bounds the blocks of a Client, and with them its goroutines.
	maxLeases   = 4096
	leaseShards = 64
	places      = 1024
	// leaseFrom is with which take of a bucket within a hold time its block begins: to begin one, keep it and give it
	// back takes some calls, and they should be fewer than those that it spares.
	leaseFrom = 8
)

// WithLease has the Client hold blocks of up to most tokens, 1 to policy.MaxTokens, in memory, and answer Take and
// TakeUpTo from them without a call. Such an answer has SourceLeased. It is for all buckets, or for those of ForKeys
// and ForPrefix; of several options that match a key, the one that names it counts, then the one with the longest
// prefix.
//
// A bucket's block begins with its eighth take within the hold time, granted or not. It is as large as what is taken
// within about a third of hold, and no larger than most and the capacity; more is asked for when half of it is left,
// and a call is given no more than half of what the bucket holds. What nobody took goes back within hold, MinLeaseHold
// to MaxLeaseHold, and with Close. While the bucket's server is away what is left is used up, for about a second beyond
// hold. A take that finds too few tokens in the block is put to the bucket; if that has too few as well, but both
// together enough, the take gets some of each, with two calls. Tokens that a call moves between the two just then are
// in neither: such a take may be denied, and a TakeUpTo get fewer, although they are there. Tokens of other consumers'
// blocks are out of reach until they come back. WithLeave counts what the bucket had at the block's last call and what
// is left in the block.
//
// The price is that others are denied tokens that lie unused in a block, for up to hold, that a process that dies takes
// its block with it (nobody can tell what was used of it, so it is dropped), and that a bucket refills behind the
// blocks taken from it: what is taken in a window can exceed capacity and credit by the tokens that were in blocks when
// it began. Result.Outstanding of a Peek tells how many are. A bucket whose policy is strict leaves room for them
// instead, and keeps the bound.
//
// While somebody in this Client waits for a bucket (Wait), it holds no block of it. Takes with a request id, TakeAll
// and Reserve are put to the bucket. Buckets without a policy, and those of a template whose Enforce is
// policy.EnforceLazy, have no blocks.
func WithLease(most int64, hold time.Duration) LeaseOption {
	return LeaseOption{rule: leaseRule{most, hold}}
}

// LeaseOption is an Option; WithLease makes one.
type LeaseOption struct {
	rule     leaseRule
	keys     []string
	prefixes []string
}

// leaseRule says how many tokens a block may have and how long it is held.
type leaseRule struct {
	most int64
	hold time.Duration
}

// ForKeys restricts the option to the buckets with these keys, beside those that it is for already.
func (o LeaseOption) ForKeys(keys ...string) LeaseOption {
	o.keys = slices.Concat(o.keys, keys)
	return o
}

// ForPrefix restricts the option to the buckets whose keys begin with prefix, such as those of a template, beside those
// that it is for already.
func (o LeaseOption) ForPrefix(prefix string) LeaseOption {
	o.prefixes = slices.Concat(o.prefixes, []string{prefix})
	return o
}

func (o LeaseOption) applyClient(c *config) error {
	if o.rule.most < 1 || o.rule.most > policy.MaxTokens {
		return fmt.Errorf("%w: a lease of %d tokens; want 1 to %d", ErrInvalidOption, o.rule.most, int64(policy.MaxTokens))
	}
	if o.rule.hold < MinLeaseHold || o.rule.hold > MaxLeaseHold {
		return fmt.Errorf("%w: a lease is held for %s; want %s to %s", ErrInvalidOption, o.rule.hold, MinLeaseHold,
			MaxLeaseHold)
	}
	if len(o.keys) == 0 && len(o.prefixes) == 0 {
		o.prefixes = []string{""}
	}
	for _, key := range o.keys {
		if err := lua.CheckKey(key); err != nil {
			return fmt.Errorf("%w: lease: %w", ErrInvalidOption, err)
		}
		if _, twice := c.leases.keys[key]; twice {
			return fmt.Errorf("%w: two leases of bucket %q", ErrInvalidOption, key)
		}
		if c.leases.keys == nil {
			c.leases.keys = make(map[string]leaseRule)
		}
		c.leases.keys[key] = o.rule
	}
	for _, prefix := range o.prefixes {
		i, twice := slices.BinarySearchFunc(c.leases.prefixes, prefix,
			func(p prefixRule, prefix string) int { return longestFirst(p.prefix, prefix) })
		if twice {
			return fmt.Errorf("%w: two leases of buckets with prefix %q", ErrInvalidOption, prefix)
		}
		c.leases.prefixes = slices.Insert(c.leases.prefixes, i, prefixRule{prefix, o.rule})
	}
	return nil
}

// leaseRules say which buckets have blocks. The zero leaseRules have none do.
type leaseRules struct {
	keys     map[string]leaseRule
	prefixes []prefixRule // the longest first
}

type prefixRule struct {
	prefix string
	leaseRule
}

func longestFirst(a, b string) int { return cmp.Or(cmp.Compare(len(b), len(a)), strings.Compare(a, b)) }

func (r *leaseRules) none() bool { return len(r.keys) == 0 && len(r.prefixes) == 0 }

// of is the rule of a bucket.
func (r *leaseRules) of(key string) (leaseRule, bool) {
	if rule, ok := r.keys[key]; ok {
		return rule, true
	}
	for _, p := range r.prefixes {
		if strings.HasPrefix(key, p.prefix) {
			return p.leaseRule, true
		}
	}
	return leaseRule{}, false
}

// leases are the blocks of a Client. A nil leases has none. A take looks a block up without a lock: maps are copied to
// be changed, which only happens when a block begins or ends.
type leases struct {
	c      *Client
	rules  leaseRules
	began  time.Time // instants are counted from here, on the monotonic clock
	seed   maphash.Seed
	count  atomic.Int32 // blocks
	shards [leaseShards]struct {
		mu     sync.Mutex // held to change blocks
		blocks atomic.Pointer[map[string]*block]
	}
	// seen has, for the hash of a key, how often a bucket without a block was taken from in which of its hold times.
	// Keys that share a place displace one another.
	seen [places]atomic.Uint64
}

func newLeases(c *Client) *leases {
	if c.config.leases.none() {
		return nil
	}
	ls := &leases{c: c, rules: c.config.leases, began: time.Now(), seed: maphash.MakeSeed()}
	for i := range ls.shards {
		ls.shards[i].blocks.Store(new(map[string]*block))
	}
	return ls
}

func (ls *leases) now() time.Duration { return time.Since(ls.began) }

func (ls *leases) hash(key string) uint64 { return maphash.String(ls.seed, key) }

// at is the block of a key, nil if there is none.
func (ls *leases) at(key string, hash uint64) *block {
	return (*ls.shards[hash%leaseShards].blocks.Load())[key]
}

// draw takes as many tokens of a bucket's block as there are, from least up to n. If few are left it returns the block,
// which the caller is to signal: after it has asked the bucket for more, if it does.
func (ls *leases) draw(key string, least, n int64, leave policy.Leave) (Result, *block) {
	if ls == nil {
		return Result{}, nil
	}
	b := ls.at(key, ls.hash(key))
	if b == nil {
		return Result{}, nil
	}
	r, few := b.draw(least, n, leave)
	if !few {
		b = nil
	}
	return r, b
}

// offer returns how many of up to n tokens of a bucket its block has now.
func (ls *leases) offer(key string, n int64, leave policy.Leave) int64 {
	if b := ls.at(key, ls.hash(key)); b != nil {
		return b.offer(n, leave)
	}
	return 0
}

// missed notes that n tokens were wanted of the bucket itself.
func (ls *leases) missed(key string, n int64) {
	if ls == nil {
		return
	}
	hash := ls.hash(key)
	if b := ls.at(key, hash); b != nil {
		b.miss(n)
		return
	}
	rule, ok := ls.rules.of(key)
	if !ok || n > rule.most {
		return
	}
	if _, isLazy := ls.c.templates.kind(key).(*lazy); isLazy {
		return
	}
	begins := hash>>32<<32 | uint64(uint32(ls.now()/rule.hold)*leaseFrom)
	place := &ls.seen[hash/leaseShards%places]
	times := uint64(1)
	if seen := place.Load(); seen-seen%leaseFrom == begins {
		times += seen % leaseFrom
	}
	if times == leaseFrom {
		ls.begin(key, hash, rule, n)
		times = 0
	}
	place.Store(begins + times)
}

// begin begins a block, unless there are too many or the Client is closed.
func (ls *leases) begin(key string, hash uint64, rule leaseRule, n int64) {
	shard := &ls.shards[hash%leaseShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	blocks := *shard.blocks.Load()
	if blocks[key] != nil {
		return
	}
	b := newBlock(ls, key, rule)
	b.miss(n)
	if ls.count.Add(1) > maxLeases || !ls.c.life.spawn(b.keep) {
		ls.count.Add(-1)
		return
	}
	blocks = maps.Clone(blocks)
	if blocks == nil {
		blocks = make(map[string]*block)
	}
	blocks[key] = b
	shard.blocks.Store(&blocks)
}

// end forgets a block that holds nothing.
func (ls *leases) end(b *block) {
	shard := &ls.shards[ls.hash(b.key)%leaseShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	blocks := maps.Clone(*shard.blocks.Load())
	delete(blocks, b.key)
	shard.blocks.Store(&blocks)
	ls.count.Add(-1)
}

// yield has a bucket's block given back, since somebody waits for the bucket.
func (ls *leases) yield(key string) {
	if ls == nil {
		return
	}
	if b := ls.at(key, ls.hash(key)); b != nil {
		timing.Signal(b.wake)
	}
}

// held is how many tokens all blocks have.
func (ls *leases) held() int64 {
	if ls == nil {
		return 0
	}
	sum := int64(0)
	for i := range ls.shards {
		for _, b := range *ls.shards[i].blocks.Load() {
			sum += b.left.Load()
		}
	}
	return sum
}
