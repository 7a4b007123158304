package election

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/policy"
)

// The refill loop calls the simulated Redis through go-redis. A hook replies in the place of a connection. So arguments
// and replies have the format of the scripts. oracle.Bucket does the work of the scripts.

var errRedisAway = errors.New("redis is unavailable")

// refusal is an error reply of Redis.
type refusal string

func (r refusal) Error() string { return string(r) }

// RedisError implements redis.Error.
func (refusal) RedisError() {}

const (
	errForbidden = refusal("NOPERM this user has no permissions to access one of the keys used as arguments")
	errWrongType = refusal("WRONGTYPE Operation against a key holding the wrong kind of value")
)

// fakeRedis is a Redis in memory on the bubble's clock, with an account of what happened to each bucket under test.
type fakeRedis struct {
	without mechanism
	start   time.Time

	mu        sync.Mutex
	skew      time.Duration
	away      bool
	forbidden string // a bucket whose keys no client may use
	spoilt    string // a bucket whose keys hold something else
	buckets   map[string]*oracle.Bucket
	active    map[string]map[string]bool // names in the shards of active sets, by key
	accounts  map[string]*account
}

func newFakeRedis(accounts []*account, without mechanism) *fakeRedis {
	r := &fakeRedis{
		without: without, start: time.Now(), buckets: map[string]*oracle.Bucket{}, active: map[string]map[string]bool{},
		accounts: map[string]*account{},
	}
	for _, a := range accounts {
		a.redis, a.instants = r, map[int64]bool{}
		r.accounts[a.key] = a
	}
	return r
}

func (r *fakeRedis) now() int64 { return time.Now().Add(r.skew).UnixMicro() }

func (r *fakeRedis) change(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
}

// bucket returns the bucket of the key, which it creates if there is none. The caller holds r.mu.
func (r *fakeRedis) bucket(key string) *oracle.Bucket {
	b := r.buckets[key]
	if b == nil {
		b = &oracle.Bucket{}
		r.buckets[key] = b
	}
	return b
}

// enter puts a bucket into an active set. The caller holds r.mu.
func (r *fakeRedis) enter(set, key string) {
	if r.active[set] == nil {
		r.active[set] = map[string]bool{}
	}
	r.active[set][key] = true
}

// leave removes a bucket from an active set. The caller holds r.mu.
func (r *fakeRedis) leave(set, key string) {
	delete(r.active[set], key)
	if len(r.active[set]) == 0 {
		delete(r.active, set)
	}
}

// lose deletes all buckets. The caller holds r.mu.
func (r *fakeRedis) lose() {
	r.buckets, r.active = map[string]*oracle.Bucket{}, map[string]map[string]bool{}
	for _, a := range r.accounts {
		a.lost()
	}
}

// step moves the clock ahead by jump, or back if jump is negative. The caller holds r.mu.
func (r *fakeRedis) step(jump time.Duration) {
	r.skew += jump
	for _, a := range r.accounts {
		a.stepped(jump)
	}
}

// snapshot copies the buckets. restore puts the copies in the place of the buckets. The caller of each holds r.mu.
func (r *fakeRedis) snapshot() (restore func()) {
	buckets, active := map[string]*oracle.Bucket{}, map[string]map[string]bool{}
	for key, b := range r.buckets {
		buckets[key] = clone(b)
	}
	for set, names := range r.active {
		active[set] = maps.Clone(names)
	}
	var forget []func()
	for _, a := range r.accounts {
		forget = append(forget, a.mark())
	}
	return func() {
		r.buckets, r.active = buckets, active
		for _, f := range forget {
			f()
		}
	}
}

func clone(b *oracle.Bucket) *oracle.Bucket {
	c := &oracle.Bucket{Held: maps.Clone(b.Held), Ends: maps.Clone(b.Ends)}
	if b.Tokens != nil {
		c.Tokens = new(int64)
		*c.Tokens = *b.Tokens
	}
	if b.Index != nil {
		c.Index = new(int64)
		*c.Index = *b.Index
	}
	if b.Control != nil {
		s := *b.Control
		c.Control = &s
	}
	return c
}

// refill refills a bucket, and judges the outcome if the bucket has an account. The caller holds r.mu.
func (r *fakeRedis) refill(by, key string, call policy.Call) policy.Outcome {
	b, now := r.bucket(key), r.now()
	a := r.accounts[key]
	if a == nil {
		return b.Refill(call, now)
	}
	sent, before := call, clone(b)
	if o, done := r.without.before(b, &call, now); done {
		return o
	}
	o := b.Refill(call, now)
	r.without.after(b, before, o)
	if o.Status.Wrote() {
		a.refilled(by, sent, before, b, o)
	}
	return o
}

// redisLink is the connection of one replica to the simulated Redis.
type redisLink struct {
	*path
	redis *fakeRedis
	name  string
}

var _ redis.Hook = (*redisLink)(nil)

func (l *redisLink) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *redisLink) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return l.ProcessPipelineHook(nil)(ctx, []redis.Cmder{cmd})
	}
}

func (l *redisLink) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		var replies []any // once the caller has given up, only the server may use it
		err := l.carry(ctx, func() error {
			l.redis.mu.Lock()
			defer l.redis.mu.Unlock()
			if l.redis.away {
				return errRedisAway
			}
			for _, cmd := range cmds {
				replies = append(replies, l.redis.serve(l.name, cmd.Args()))
			}
			return nil
		})
		for i, cmd := range cmds {
			if err != nil {
				cmd.SetErr(err)
				continue
			}
			switch reply := replies[i].(type) {
			case error:
				cmd.SetErr(reply)
				if len(cmds) == 1 {
					err = reply
				}
			case []int64:
				cmd.(interface{ SetVal(v []int64) }).SetVal(reply)
			case int64:
				cmd.(interface{ SetVal(v int64) }).SetVal(reply)
			case []string:
				cmd.(interface {
					SetVal(page []string, cursor uint64)
				}).SetVal(reply, 0)
			default:
				cmd.(interface{ SetVal(v any) }).SetVal(reply)
			}
		}
		return err
	}
}

// serve returns the reply to a command. The caller holds r.mu.
func (r *fakeRedis) serve(by string, words []any) any {
	switch strings.ToLower(text(words[0])) {
	case "exists":
		n := int64(0)
		for _, key := range words[1:] {
			n += min(1, int64(len(r.active[text(key)])))
		}
		return n
	case "scard":
		return int64(len(r.active[text(words[1])]))
	case "sscan":
		return slices.Sorted(maps.Keys(r.active[text(words[1])]))
	case "srem":
		for _, name := range words[2:] {
			r.leave(text(words[1]), text(name))
		}
		return int64(len(words) - 2)
	}
	keys := make([]string, words[2].(int))
	for i := range keys {
		keys[i] = text(words[3+i])
		if r.forbidden != "" && keys[i] == r.forbidden {
			return errForbidden
		}
	}
	return r.script(by, keys, words[3+len(keys):])
}

// text returns a word of a command, which may be a pointer.
func text(word any) string {
	if p, ok := word.(*string); ok {
		return *p
	}
	return word.(string)
}

func number(word any) int64 {
	switch n := word.(type) {
	case *int64:
		return *n
	case int:
		return int64(n)
	}
	return word.(int64)
}
