package fetch

import (
	"context"
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1.
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/internal/testing/oracle"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

// fake is a server for tests with a fake clock. Its buckets are those of the model in package oracle. It refills a
// bucket before each call. Its methods are safe for concurrent use.
type fake struct {
	redis.UniversalClient
	trip time.Duration // how long a round trip takes

	mu   sync.Mutex
	fate func(script string) fault // nil: no faults
	// asked is called for each call of takes. If it doesn't return nil, all takes are denied, with this time as their
	// wait.
	asked   func(takes int) (denied *time.Duration)
	endless bool // every bucket exists, and never runs out
	buckets map[string]*oracle.Bucket
	scripts map[string]string // names by hash
	calls   map[string]int    // by script
}

// fault is the fate of a call.
type fault int

const (
	none      fault = iota
	lostCall        // the call does not arrive
	lostReply       // the call is executed, but its reply does not arrive
	refused         // the connection is refused
)

func newFake(buckets map[string]policy.Policy) *fake {
	f := &fake{buckets: make(map[string]*oracle.Bucket), scripts: make(map[string]string), calls: make(map[string]int)}
	for key, p := range buckets {
		terms := p.Terms(policy.Fence{})
		f.buckets[key] = &oracle.Bucket{}
		f.buckets[key].Refill(policy.Call{Create: policy.CreateInitial, Terms: &terms}, time.Now().UnixMicro())
	}
	return f
}

// generous makes a server on which every bucket exists and never runs out.
func generous() *fake {
	f := newFake(nil)
	f.endless = true
	return f
}

// with calls change with a bucket, after it has brought the bucket up to date.
func (f *fake) with(key string, change func(*oracle.Bucket)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f.now(key))
}

// now brings a bucket up to date and returns it, or nil if there is none. The lock is held.
func (f *fake) now(key string) *oracle.Bucket {
	bucket, now := f.buckets[key], time.Now().UnixMicro()
	if f.endless {
		terms, tokens := hourly(policy.MaxTokens/2).Terms(policy.Fence{}), int64(policy.MaxTokens/2)
		control := &policy.Control{Terms: terms, Era: 1, Last: now}
		return &oracle.Bucket{Bucket: policy.Bucket{Tokens: &tokens, Index: new(int64), Control: control}}
	}
	if bucket != nil && f.asked == nil {
		bucket.Refill(policy.Call{Version: policy.Version{Era: bucket.Control.Era, Index: *bucket.Index}}, now)
		bucket.Sweep(1000, now)
	}
	return bucket
}

// fail makes fate decide the fate of calls. With nil, calls have no faults any more.
func (f *fake) fail(fate func(script string) fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fate = fate
}

// called returns how many calls of the scripts there were.
func (f *fake) called(scripts ...string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, script := range scripts {
		n += f.calls[script]
	}
	return n
}

// isTake reports whether a script makes takes, and not reservations or leases, which have records.
func isTake(script string) bool { return script == "take" || script == "takes" }

// Process implements lua.Client.
func (f *fake) Process(ctx context.Context, cmd redis.Cmder) error {
	return f.exec(ctx, []redis.Cmder{cmd})
}

// Pipeline implements redis.UniversalClient.
func (f *fake) Pipeline() redis.Pipeliner { return &fakePipe{f: f} }

type fakePipe struct {
	redis.Pipeliner
	f    *fake
	cmds []redis.Cmder
}

func (p *fakePipe) Process(_ context.Context, cmd redis.Cmder) error {
	p.cmds = append(p.cmds, cmd)
	return nil
}

func (p *fakePipe) Exec(ctx context.Context) ([]redis.Cmder, error) {
	return p.cmds, p.f.exec(ctx, p.cmds)
}

// exec makes a round trip.
func (f *fake) exec(ctx context.Context, cmds []redis.Cmder) (err error) {
	lost, down := false, false
	for _, cmd := range cmds {
		if _, reads := cmd.(*redis.StringCmd); reads {
			cmd.SetErr(redis.Nil) // nothing is published
			continue
		}
		name, fate := f.name(cmd.Args())
		lost, down = lost || fate == lostCall || fate == lostReply, down || fate == refused
		if name == "" {
			cmd.SetErr(noScript{})
		} else if fate == none || fate == lostReply {
			switch reply := f.run(name, cmd.Args()).(type) {
			case []int64:
				cmd.(interface{ SetVal([]int64) }).SetVal(reply)
			default:
				cmd.(interface{ SetVal(any) }).SetVal(reply)
			}
		}
	}
	switch {
	case down:
		err = fmt.Errorf("connection refused")
	case lost:
		<-ctx.Done()
		err = ctx.Err()
	case f.trip > 0:
		err = pause(ctx, f.trip)
	}
	for _, cmd := range cmds {
		if err != nil {
			cmd.SetErr(err)
		} else if cmd.Err() != nil {
			err = cmd.Err()
			break
		}
	}
	return err
}

// pause waits as a socket does, until the deadline of the context.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < d {
		timer.Reset(time.Until(deadline))
		<-timer.C
		return context.DeadlineExceeded
	}
	<-timer.C
	return nil
}

// noScript is the error of Redis for a script that it doesn't know.
type noScript struct{}

func (noScript) Error() string { return "NOSCRIPT No matching script." }
func (noScript) RedisError()   {}

// name returns the name of the script that a command calls, and the fate of the call. The name is empty if the server
// doesn't know the script.
func (f *fake) name(args []any) (name string, fate fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	body := args[1].(string)
	if args[0] == "eval" {
		name, _, _ := strings.Cut(strings.TrimPrefix(body, "-- "), ":")
		sum := sha1.Sum([]byte(body)) //nolint:gosec // as above
		body = hex.EncodeToString(sum[:])
		f.scripts[body] = name
	}
	name = f.scripts[body]
	if name != "" && f.fate != nil {
		fate = f.fate(name)
	}
	return name, fate
}

// words reads a command's keys and arguments.
type words struct {
	all  []any
	keys int
	next int
}

func readWords(args []any) *words {
	return &words{all: args, keys: args[2].(int), next: 3 + args[2].(int)}
}

func (w *words) key(i int) string {
	if key, ok := w.all[3+i].(*string); ok {
		return *key
	}
	return w.all[3+i].(string)
}

func (w *words) text() string {
	w.next++
	return fmt.Sprint(w.all[w.next-1])
}

func (w *words) number() int64 {
	n, err := strconv.ParseInt(w.text(), 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

// run runs a script.
func (f *fake) run(name string, args []any) any {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[name]++
	w := readWords(args)
	switch name {
	case "take":
		return f.take(w)
	case "takes":
		return f.takes(w)
	case "heartbeat":
		return []any{int64(1), int64(1), int64(1)}
	}
	bucket, now := f.now(w.key(0)), time.Now().UnixMicro()
	if bucket == nil {
		return []any{int64(2)}
	}
	s := bucket.Control
	terms := s.Terms.Encode()
	switch name {
	case "return":
		n, era := w.number(), w.number()
		if era != 0 && era != s.Era {
			return []any{int64(4), *bucket.Tokens}
		}
		clamped, _ := bucket.Return(n)
		return []any{int64(1), *bucket.Tokens, clamped}
	case "peek":
		return []any{int64(1), *bucket.Tokens, bucket.Wait(w.number(), now), s.Era, *bucket.Index, s.Last, now, terms,
			s.Carry, s.Step, s.Next,
			s.Outstanding, s.Due, s.Debt, int64(0), *bucket.Index - s.Index}
	case "lease":
		granted, clamped, held := bucket.Lease(w.text(), w.number(), w.number(), w.number(), w.number(), w.number(), now)
		switch held {
		case oracle.HeldDone:
			return []any{int64(1), now, *bucket.Tokens, granted, clamped, s.Era, terms}
		case oracle.HeldOther:
			return []any{int64(4), now}
		case oracle.HeldInUse:
			return []any{int64(5)}
		}
		return []any{int64(6)}
	}
	panic("no such script: " + name)
}

// take does the work of the script take.
func (f *fake) take(w *words) []int64 {
	totals := make([]int64, w.keys)
	for i := range totals {
		totals[i] = w.number()
	}
	leaves := make([]int64, w.keys)
	for w.next < len(w.all) {
		from, leave := w.number(), w.number()
		w.number() // below
		for i := int(from) - 1; i < w.keys; i++ {
			leaves[i] = leave
		}
	}
	reply := make([]int64, w.keys)
	for i, total := range totals {
		reply[i] = -1
		if b := f.now(w.key(i)); b != nil && f.asked == nil && *b.Tokens-total >= leaves[i] {
			*b.Tokens -= total
			reply[i] = *b.Tokens
		}
	}
	return reply
}

// takes does the work of the script takes.
func (f *fake) takes(w *words) []int64 {
	if w.number() > 0 {
		panic("templates")
	}
	now := time.Now().UnixMicro()
	reply := []int64{now}
	for key := 0; key < w.keys; key += 2 {
		reply = f.withAllKeys(w, w.key(key), reply, now)
	}
	return reply
}

// withAllKeys appends the reply for one bucket that is asked with all keys.
func (f *fake) withAllKeys(w *words, key string, reply []int64, now int64) []int64 {
	w.number()
	w.number()
	withPolicy, inLine := w.number() == 1, w.number() == 1
	w.number()
	runs := make([]policy.Run, w.number())
	for i := range runs {
		n := w.number()
		runs[i] = policy.Run{N: max(1, n), Count: w.number(), UpTo: n == 0}
		if leave := w.text(); strings.HasSuffix(leave, "%") {
			runs[i].Leave.Percent, _ = strconv.ParseInt(strings.TrimSuffix(leave, "%"), 10, 64)
		} else {
			runs[i].Leave.Tokens, _ = strconv.ParseInt(leave, 10, 64)
		}
	}
	b := f.now(key)
	if b == nil {
		return append(reply, 2)
	}
	var due *time.Duration
	if f.asked != nil {
		due = f.asked(f.calls["take"] + f.calls["takes"])
	}
	results, all := make([]policy.RunTaking, len(runs)), true
	for i, run := range runs {
		if due != nil {
			results[i].Wait = due.Microseconds()
		} else if all || !inLine {
			one, _, _ := oracle.TakeMany(&b.Bucket, []policy.Run{run}, now)
			results[i] = one[0]
		}
		all = all && results[i].Taken == run.Count
	}
	for i, run := range runs {
		if due == nil && results[i].Taken < run.Count {
			results[i].Wait = b.Wait(run.N+run.Leave.Of(b.Control.Terms.Capacity), now)
		}
	}
	reply = append(reply, 1, *b.Tokens, b.Control.Era, *b.Index, b.Control.Last, 0)
	var numbers []int64
	if withPolicy || !all {
		for _, word := range strings.Fields(b.Control.Terms.Encode()) {
			n, _ := strconv.ParseInt(word, 10, 64)
			numbers = append(numbers, n)
		}
	}
	reply = append(append(reply, int64(len(numbers))), numbers...)
	for _, r := range results {
		reply = append(reply, r.Taken, r.Wait)
	}
	return reply
}

var _ lua.Client = (*fake)(nil)
