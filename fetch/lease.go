package fetch

import (
	"cmp"
	"fmt"
	"hash/maphash"
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
	minLeaseHold = 10 * time.Millisecond
	maxLeaseHold = time.Hour
)

const (
	// leaseGrace is how much longer than the hold time the bucket keeps a block. Otherwise a block could not be given back
	// after a time in which its server was unavailable.
	leaseGrace = 2 * time.Second
	// leaseMargin is the last part of leaseGrace. In this part, takers get no tokens of the block any more. Otherwise a
	// process that is stopped after it read its clock could use a token that the bucket has counted as unused.
	leaseMargin = time.Second
	// maxLeases bounds the blocks of a Client, and with them its goroutines.
	maxLeases = 4096
	// leaseFrom is the number of takes from a bucket within a hold time that make its block begin. A block costs some
	// calls: to begin it, to keep it and to give it back. It should save more calls than that.
	leaseFrom = 8
	// places is the number of buckets without a block whose takes can be counted at the same time.
	places = 1024
)

// WithLease makes the Client hold blocks of tokens in memory. A block has up to most tokens; most is 1 to
// policy.MaxTokens. Take and TakeUpTo can take from a block without a call. Their Result then has SourceLeased. The
// option applies to all buckets, or to those that ForKeys and ForPrefix name. If several options match a key, the
// option that names the key applies. If none names it, the option with the longest prefix applies.
//
// A bucket's block begins with its eighth take within the hold time, granted or not:
//
//   - Its size is the number of tokens that are taken within about a third of hold, but no more than most and the
//     capacity.
//   - When half of it is left, the Client asks for more. A call gets at most half of the tokens in the bucket.
//   - Unused tokens go back within hold, which is 10 ms to an hour, and at Close.
//   - While the bucket's server is unavailable, takes use the block, for about a second beyond hold.
//
// If the block has too few tokens for a take, the take is made from the bucket. It is denied if the bucket also has too
// few tokens, even if block and bucket together have enough. TakeUpTo takes from both, but not the tokens that another
// call moves between the two at that moment. Tokens of other consumers' blocks can't be taken until they come back.
// WithLeave counts the tokens that the bucket had at the block's last call, and those that are left in the block.
//
// Blocks have three costs:
//
//   - Other consumers are denied tokens that are unused in a block, for up to hold.
//   - If a process dies, its blocks are dropped, because it is unknown how many of their tokens were used.
//   - A bucket is refilled while blocks hold some of its tokens. So the takes in a period can exceed capacity plus
//     credit, by the tokens that were in blocks when the period began. Result.Outstanding of a Peek is the number of
//     these tokens. A bucket whose policy is strict leaves room for these tokens, so its takes never exceed the bound.
//
// While a call of this Client waits for a bucket (Wait), the Client holds no block of it. Takes with a request id,
// TakeAll and Reserve never use blocks. Buckets without a policy, and those of a template whose Enforce is
// policy.EnforceLazy, have no blocks.
//
// A bucket with flows has a separate block for each flow that takes so often. The block gets the tokens that a TakeUpTo
// for the flow would get, and these tokens count as asked for by the flow. When they go back, the flow gets the right
// back that it paid. Undo of a take from such a block gives no right back.
func WithLease(most int64, hold time.Duration) LeaseOption {
	return LeaseOption{rule: leaseRule{most, hold}}
}

// LeaseOption is an Option; WithLease makes one.
type LeaseOption struct {
	rule     leaseRule
	keys     []string
	prefixes []string
	noKeys   bool // ForKeys was called without a key
}

// leaseRule has the largest number of tokens of a block, and the time for which a block is held.
type leaseRule struct {
	most int64
	hold time.Duration
}

// ForKeys restricts the option to the buckets with these keys, and to those that earlier ForKeys and ForPrefix have
// named. There must be a key, because an option that names no bucket would apply to all of them.
func (o LeaseOption) ForKeys(keys ...string) LeaseOption {
	o.noKeys = o.noKeys || len(keys) == 0
	o.keys = slices.Concat(o.keys, keys)
	return o
}

// ForPrefix restricts the option to the buckets whose keys begin with prefix, such as those of a template, and to those
// that earlier ForKeys and ForPrefix have named.
func (o LeaseOption) ForPrefix(prefix string) LeaseOption {
	o.prefixes = slices.Concat(o.prefixes, []string{prefix})
	return o
}

func (o LeaseOption) applyClient(c *config) error {
	if o.rule.most < 1 || o.rule.most > policy.MaxTokens {
		return fmt.Errorf("%w: a lease of %d tokens; want 1 to %d", ErrInvalidOption, o.rule.most, int64(policy.MaxTokens))
	}
	if o.rule.hold < minLeaseHold || o.rule.hold > maxLeaseHold {
		return fmt.Errorf("%w: a lease is held for %s; want %s to %s", ErrInvalidOption, o.rule.hold, minLeaseHold,
			maxLeaseHold)
	}
	if o.noKeys {
		return fmt.Errorf("%w: ForKeys of a lease without a key", ErrInvalidOption)
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

// leaseRules determine which buckets have blocks. With the zero value, no bucket has one.
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

// of returns the rule of a bucket.
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

// leases are the blocks of a Client. A nil leases has none.
type leases struct {
	c     *Client
	rules leaseRules
	began time.Time // instants are counted from here, on the monotonic clock

	mu     sync.Mutex
	blocks map[*block]struct{}

	// seen counts the takes from each bucket without a block in the current hold time. The hash of the bucket's key
	// determines the place of its count. Keys that share a place displace one another. So if very many keys are equally
	// busy, few of them get a block. With a count for each bucket, 256 goroutines that take from 10,000 keys would make
	// blocks for all keys. They would make 39,000 takes/s in place of 133,000, and some takes would fail.
	seed maphash.Seed
	seen [places]atomic.Uint64
}

func newLeases(c *Client) *leases {
	if c.config.leases.none() {
		return nil
	}
	return &leases{c: c, rules: c.config.leases, began: time.Now(), blocks: make(map[*block]struct{}),
		seed: maphash.MakeSeed()}
}

func (ls *leases) now() time.Duration { return time.Since(ls.began) }

// takeLocal takes up to n tokens from the block of the bucket or of a flow. It takes none if that would be fewer than
// least. If few tokens are left it returns the block, and the caller has to call the block's signal. A caller that asks
// the bucket for more tokens does so first.
func (b *bucket) takeLocal(flow string, least, n int64, leave policy.Leave) (Result, *block) {
	blk := b.blockOf(flow)
	if blk == nil {
		return Result{}, nil
	}
	r, few := blk.takeLocal(least, n, leave)
	if !few {
		blk = nil
	}
	return r, blk
}

// yield makes the keeper of a block give its tokens back, because a caller waits. It is the block of the bucket or of a
// flow.
func (b *bucket) yield(flow string) {
	if blk := b.blockOf(flow); blk != nil {
		timing.Signal(blk.wake)
	}
}

// missed counts a take for a flow that asked the bucket itself and got n tokens; n is 0 if it was denied. A denial does
// not count as use of an existing block. Otherwise takes could prolong a block that has the tokens which they lack.
func (ls *leases) missed(key, flow string, n int64) {
	b := ls.c.buckets.find(key)
	if blk := b.blockOf(flow); blk != nil {
		blk.miss(n)
		return
	}
	rule, ok := ls.rules.of(key)
	if !ok || n > rule.most || b == unseenBucket {
		return
	}
	if _, isLazy := ls.c.templates.kind(key).(*lazy); isLazy {
		return
	}
	// A place has half of the key's hash, then the number of the hold time, and in the last octal digit the number of
	// takes.
	of := (*string)(nil)
	hash := maphash.String(ls.seed, key)
	if b.known.Load().divided() {
		of = &flow
		hash = maphash.String(ls.seed, key+"\x00"+flow)
	}
	begins := hash>>32<<32 | uint64(uint32(ls.now()/rule.hold)*leaseFrom)
	place := &ls.seen[hash%places]
	times := uint64(1)
	if seen := place.Load(); seen-seen%leaseFrom == begins {
		times += seen % leaseFrom
	}
	if times == leaseFrom {
		ls.begin(newBlock(ls, key, of, rule), n)
		times = 0
	}
	place.Store(begins + times)
}

// begin begins a block, unless there are too many or the Client is closed.
func (ls *leases) begin(blk *block, n int64) {
	blk.miss(max(1, n))
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if len(ls.blocks) < maxLeases && ls.c.buckets.addBlock(blk) && ls.c.life.spawn(blk.keep) {
		ls.blocks[blk] = struct{}{}
		return
	}
	ls.c.buckets.removeBlock(blk)
}

// end forgets a block that holds nothing.
func (ls *leases) end(blk *block) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.blocks, blk)
	ls.c.buckets.removeBlock(blk)
}

// held returns how many tokens all blocks have.
func (ls *leases) held() int64 {
	if ls == nil {
		return 0
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	sum := int64(0)
	for blk := range ls.blocks {
		sum += blk.left.Load()
	}
	return sum
}
