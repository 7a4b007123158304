package fetch

import (
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1.
	"encoding/hex"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// bank is a server of buckets, by their model, for tests with a fake clock. It
// refills a bucket before each call. Its methods are safe for concurrent use.
type bank struct {
	redis.UniversalClient
	trip time.Duration // how long a call takes

	mu      sync.Mutex
	fate    func(script string) fault // nil: no faults
	buckets map[string]*policy.Bucket
	scripts map[string]string // names by hash
	calls   map[string]int    // by script
}

// fault is what becomes of a call.
type fault int

const (
	none      fault = iota
	lostCall        // it does not arrive
	lostReply       // it takes effect; the reply does not arrive
)

func newBank(buckets map[string]policy.Policy) *bank {
	b := &bank{buckets: make(map[string]*policy.Bucket), scripts: make(map[string]string), calls: make(map[string]int)}
	for key, p := range buckets {
		terms := p.Terms(policy.Fence{})
		b.buckets[key] = &policy.Bucket{}
		b.buckets[key].Refill(policy.Call{Create: policy.CreateInitial, Terms: &terms}, time.Now().UnixMicro())
	}
	return b
}

// with calls f with a bucket as it stands now.
func (b *bank) with(key string, f func(*policy.Bucket)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f(b.now(key))
}

// now brings a bucket up to date; nil if there is none. The lock is held.
func (b *bank) now(key string) *policy.Bucket {
	bucket, now := b.buckets[key], time.Now().UnixMicro()
	if bucket != nil {
		bucket.Refill(policy.Call{Version: policy.Version{Era: bucket.Control.Era, Index: *bucket.Index}}, now)
		bucket.Sweep(1000, now)
	}
	return bucket
}

// fail has what becomes of calls decided by f, or no longer if f is nil.
func (b *bank) fail(f func(script string) fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fate = f
}

// called is how many calls of a script there were.
func (b *bank) called(script string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.calls[script]
}

// Process implements lua.Client.
func (b *bank) Process(ctx context.Context, cmd redis.Cmder) error {
	args := cmd.Args()
	name, f := b.name(args)
	if name == "" {
		return noScript{}
	}
	if f != lostCall {
		reply := b.run(name, args)
		if f == none && b.trip == 0 {
			cmd.(interface{ SetVal(any) }).SetVal(reply)
			return nil
		}
		if f == none {
			timer := time.NewTimer(b.trip)
			defer timer.Stop()
			select {
			case <-timer.C:
				cmd.(interface{ SetVal(any) }).SetVal(reply)
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	<-ctx.Done()
	return ctx.Err()
}

// noScript is what Redis answers to a script that it doesn't know.
type noScript struct{}

func (noScript) Error() string { return "NOSCRIPT No matching script." }
func (noScript) RedisError()   {}

// name is which script a command calls, empty if the server doesn't know it, and what
// becomes of the call.
func (b *bank) name(args []any) (name string, f fault) {
	b.mu.Lock()
	defer b.mu.Unlock()
	body := args[1].(string)
	if args[0] == "eval" {
		name, _, _ := strings.Cut(strings.TrimPrefix(body, "-- "), ":")
		sum := sha1.Sum([]byte(body)) //nolint:gosec // as above
		body = hex.EncodeToString(sum[:])
		b.scripts[body] = name
	}
	if name = b.scripts[body]; name != "" && b.fate != nil {
		f = b.fate(name)
	}
	return name, f
}

// run runs a script.
func (b *bank) run(name string, args []any) any {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.calls[name]++
	keys := args[2].(int)
	key := *args[3].(*string)
	if name == "live" {
		return []any{int64(1), int64(1)}
	}
	number := func(i int) int64 { return args[3+keys+i].(int64) }
	bucket, now := b.now(key), time.Now().UnixMicro()
	if bucket == nil {
		return []any{int64(2)}
	}
	s := bucket.Control
	terms := s.Terms.Encode()
	denial := func(wait int64) []any {
		return []any{int64(0), *bucket.Tokens, wait, s.Era, *bucket.Index, s.Last, now, terms}
	}
	switch name {
	case "take":
		if t := bucket.Take(number(0), now); !t.OK {
			return denial(t.Wait)
		}
		return []any{int64(1), *bucket.Tokens, terms}
	case "upto":
		taken := min(number(0), *bucket.Tokens)
		if taken == 0 {
			return denial(bucket.Wait(1, now))
		}
		*bucket.Tokens -= taken
		return []any{int64(1), *bucket.Tokens, taken, terms}
	case "takemany":
		var runs []policy.Run
		for i := 3; i < len(args)-3-keys; i += 2 {
			runs = append(runs, policy.Run{N: number(i), Count: number(i + 1)})
		}
		results, left, _ := bucket.TakeMany(runs, now)
		reply, all := []any{int64(0), left, s.Era, *bucket.Index, s.Last, now, terms}, true
		for i, r := range results {
			reply = append(reply, r.Taken, r.Wait)
			all = all && r.Taken == runs[i].Count
		}
		if all {
			return []any{int64(1), left, terms}
		}
		return reply
	case "return":
		clamped, _ := bucket.Return(number(0))
		return []any{int64(1), *bucket.Tokens, clamped}
	case "peek":
		return []any{int64(1), *bucket.Tokens, bucket.Wait(number(0), now), s.Era, *bucket.Index, s.Last, now, terms, s.Carry, s.Step, s.Next,
			s.Outstanding, s.Due, s.Debt}
	case "lease":
		granted, clamped, held := bucket.Lease(args[3+keys].(string), number(1), number(2), number(3), number(4), number(5), now)
		switch held {
		case policy.HeldDone:
			return []any{int64(1), now, *bucket.Tokens, granted, clamped, s.Era, terms}
		case policy.HeldOther:
			return []any{int64(4), now}
		case policy.HeldInUse:
			return []any{int64(5)}
		}
		return []any{int64(6)}
	}
	panic("no such script: " + name)
}

var _ lua.Client = (*bank)(nil)
