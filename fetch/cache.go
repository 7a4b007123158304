package fetch

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	denialMaxAge = time.Second // how long a denial is believed
	// policyMaxAge is how long a bucket's policy is believed: to be told it costs a take almost as much again, and a
	// denial tells it anyway.
	policyMaxAge = 10 * time.Second
	// pooledMaxAge is policyMaxAge of a pool's bucket, whose grant comes and goes.
	pooledMaxAge = time.Second
	// scheduleMaxAge is how often the instants of a stepped bucket are asked for while its next one is overdue.
	scheduleMaxAge = time.Second
)

// info is what a Client has learned of a bucket. It doesn't change: what is learned later makes another one.
type info struct {
	terms   *policy.Terms // nil: the bucket has no policy
	era     int64
	share   *share // of a bucket with degraded mode local; nil if there are too many
	learned time.Time
	denied  denial
	more    time.Time // when the bucket last got tokens that no answer tells of

	// Of a stepped bucket.
	asked time.Time     // when its instants were last asked for
	next  time.Time     // the instant to come; zero if not known
	step  time.Duration // from the instant before to next
}

// denial is the last one of a bucket: takes of n tokens or more, which leave as many or more, are denied until then.
// The zero denial denies nothing.
type denial struct {
	n, leave int64
	left     int64        // the tokens held
	at       lua.Refilled // then
	until    time.Time    // no longer than denialMaxAge
	due      time.Time    // of n tokens; zero if they are not due
}

func (d *denial) holds(n, leave int64, now time.Time) bool {
	return d.n > 0 && n >= d.n && leave >= d.leave && now.Before(d.until)
}

// deniedFor is how long until n tokens, and those to be left, are due, which the last denial denies; less than 0 is
// never.
func (i *info) deniedFor(n, leave int64, now time.Time) time.Duration {
	d := &i.denied
	if d.due.IsZero() {
		return -1
	}
	due := d.due.Sub(now)
	if n+leave > d.n+d.leave {
		due = max(due, i.untilDue(n+leave, d.left, d.at)-now.Sub(i.learned))
	}
	return due
}

// exceeded is the error of a take of more tokens than the bucket ever holds.
func (i *info) exceeded(key string, n int64, leave policy.Leave) error {
	if i.terms == nil || i.terms.Shadow || n+leave.Of(i.terms.Capacity) <= i.terms.Capacity {
		return nil
	}
	if leave == (policy.Leave{}) {
		return fmt.Errorf("%w: %d tokens of bucket %q, which holds at most %d", ErrExceedsCapacity, n, key, i.terms.Capacity)
	}
	return fmt.Errorf("%w: %d tokens of bucket %q, and %d to be left; it holds at most %d",
		ErrExceedsCapacity, n, key, leave.Of(i.terms.Capacity), i.terms.Capacity)
}

// shadowed reports whether denials are admitted.
func (i *info) shadowed() bool { return i.terms != nil && i.terms.Shadow }

func (i *info) limit() int64 {
	if i.terms == nil {
		return 0
	}
	return i.terms.Capacity
}

// pooled reports whether the bucket is a pool's.
func (i *info) pooled() bool { return i.terms != nil && i.terms.Pool }

// fresh reports whether the policy may be believed.
func (i *info) fresh(now time.Time) bool {
	if i.pooled() {
		return now.Sub(i.learned) < pooledMaxAge
	}
	return now.Sub(i.learned) < policyMaxAge
}

// onFloor reports whether the bucket is a pool's without a grant in force, as the scripts told when the policy was
// learned.
func (i *info) onFloor() bool { return i.pooled() && i.terms.GrantEra == 0 }

// stepped reports whether the bucket is refilled at instants.
func (i *info) stepped() bool { return i.terms != nil && i.terms.Kind == policy.Stepped }

// lacksSchedule reports whether a stepped bucket's instants are to be asked for: once a step, and while that is overdue
// once in scheduleMaxAge.
func (i *info) lacksSchedule(now time.Time) bool {
	return !now.Before(i.next) && now.Sub(i.asked) >= scheduleMaxAge
}

// resetAfter is the time until a bucket of this policy that holds tokens is full. A grant counts as if it went on.
func (i *info) resetAfter(tokens int64, now time.Time) time.Duration {
	if i.terms == nil {
		return Never
	}
	t := *i.terms
	if t.GrantEra != 0 {
		t.Tokens = t.GrantTokens
	}
	t.GrantTokens = 0
	t.GrantEnd = 0
	t.GrantEra = 0
	s := policy.Control{Terms: t}
	if !i.next.IsZero() {
		s.Next = i.next.Sub(now).Microseconds()
		s.Step = s.Next - i.step.Microseconds()
	}
	b := policy.Bucket{Tokens: &tokens, Control: &s}
	return wait(micros(b.Wait(t.Capacity, 0)))
}

// untilDue is the time until n tokens, which may exceed the capacity, fall due in a bucket that was found with the
// tokens; negative if that is not known.
func (i *info) untilDue(n, tokens int64, at lua.Refilled) time.Duration {
	if i.terms == nil || i.terms.Kind == policy.Stepped || n > policy.MaxTokens {
		return -1
	}
	t := *i.terms
	t.Capacity = policy.MaxTokens
	b := policy.Bucket{Tokens: &tokens, Control: &policy.Control{Terms: t, Era: at.Version.Era, Last: at.Last}}
	return micros(b.Wait(n, at.Now))
}

// wait is a script's waiting time as a Result shows it.
func wait(d time.Duration) time.Duration {
	if d < 0 {
		return Never
	}
	return d
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

// cache remembers what was learned of buckets. It holds no more than two halves: when the young one is full it becomes
// the old one, and the former old one is dropped. What is in use is learned again every policyMaxAge, so it is young.
type cache struct {
	half int // the most buckets of each half

	mu         sync.RWMutex
	young, old map[string]*info
	terms      *policy.Terms // put last: buckets of one policy share it, in the processor's cache too
}

func newCache(half int) *cache { return &cache{half: half, young: make(map[string]*info)} }

// unseen is what is known of a bucket that was never seen.
var unseen = new(info)

func (c *cache) get(key string) *info {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.find(key)
}

// find is get with the lock held.
func (c *cache) find(key string) *info {
	if i, ok := c.young[key]; ok {
		return i
	}
	if i, ok := c.old[key]; ok {
		return i
	}
	return unseen
}

// put remembers what is known from a call that began at asked. It may drop the denial: if the bucket got more tokens
// since then, the denial may be older than they are.
func (c *cache) put(key string, i *info, asked time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i.more = c.find(key).more
	if !asked.After(i.more) {
		i.denied = denial{}
	}
	if i.terms != nil {
		if c.terms != nil && *c.terms == *i.terms {
			i.terms = c.terms
		}
		c.terms = i.terms
	}
	c.store(key, i)
}

// store stores an info in the young half. The lock is held.
func (c *cache) store(key string, i *info) {
	if _, ok := c.young[key]; !ok && len(c.young) >= c.half {
		c.old, c.young = c.young, make(map[string]*info)
	}
	c.young[key] = i
}

// forgive forgets a bucket's denial, and those whose answer is still to come, since there are more tokens.
func (c *cache) forgive(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	forgiven := *c.find(key)
	forgiven.denied = denial{}
	forgiven.more = time.Now()
	c.store(key, &forgiven)
}

// learn remembers what the answer to a call that began at asked tells of a bucket: its policy, nil if it has none, and
// a denial of a take of n. What is known of a schedule stays while the policy is the same.
func (c *Client) learn(key string, n int64, leave policy.Leave, reply *lua.TakeReply, asked time.Time) *info {
	before := c.cache.get(key)
	now := time.Now()
	i := new(info)
	if before.terms != nil && reply.Terms != nil && *before.terms == *reply.Terms {
		*i = *before
		i.denied = denial{}
	}
	i.terms, i.learned = reply.Terms, now
	if reply.Version.Era != 0 {
		i.era = reply.Version.Era
	}
	if !reply.OK && !i.pooled() { // a pool's share grows by the denials that its bucket counts
		i.denied = denial{n: n, leave: leave.Of(i.limit()), left: reply.Remaining, at: reply.Refilled,
			until: now.Add(denialMaxAge)}
		if reply.Wait >= 0 {
			i.denied.due = now.Add(reply.Wait)
			if i.denied.due.Before(i.denied.until) {
				i.denied.until = i.denied.due
			}
		}
	}
	if t := reply.Terms; t != nil && t.Degraded == policy.DegradedLocal {
		i.share = c.shareOf(key, *t)
	}
	if !reply.Repeated { // what it tells is of an earlier time
		c.cache.put(key, i, asked)
	}
	return i
}

// learnSchedule asks for the instants of a stepped bucket, about once a step. Without an answer they stay unknown: the
// take that wants them is done.
func (c *Client) learnSchedule(t *task, before *info) *info {
	i := new(info)
	*i = *before
	i.asked = time.Now()
	t.brief = true
	reply, err := attempt(t, true, func() (lua.PeekReply, error) { return t.kind.peek(t.ctx, t, t.key) })
	if err == nil && reply.Terms != nil && reply.Next > reply.Step {
		i.next = i.asked.Add(micros(reply.Next - reply.Now))
		i.step = micros(reply.Next - reply.Step)
	}
	c.cache.put(t.key, i, i.learned)
	return i
}

// untilFull is the time until a bucket that was looked at is full.
func untilFull(p lua.PeekReply) time.Duration {
	b := policy.Bucket{Tokens: &p.Tokens, Control: &policy.Control{
		Terms: *p.Terms, Era: p.Version.Era, Last: p.Last, Carry: p.Carry, Step: p.Step, Next: p.Next,
	}}
	return wait(micros(b.Wait(p.Terms.Capacity, p.Now)))
}

const (
	// mostMarks bounds the keys of marks.
	mostMarks = 1 << 14
	// marksRest is the least time between two searches of full marks for those that are over: one takes as long as some
	// takes.
	marksRest = 10 * time.Millisecond
)

// marks are keys that are marked for a while. The zero marks have none.
type marks[K comparable] struct {
	mu     sync.Mutex
	until  map[K]time.Time
	search time.Time // not before
}

func (m *marks[K]) has(key K) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.until) > 0 && time.Now().Before(m.until[key])
}

// claim marks a key for a while, and reports whether it wasn't marked, and there was room.
func (m *marks[K]) claim(key K, d time.Duration, now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	until, known := m.until[key]
	if now.Before(until) {
		return false
	}
	if !known && len(m.until) >= mostMarks && !now.Before(m.search) {
		maps.DeleteFunc(m.until, func(_ K, until time.Time) bool { return !now.Before(until) })
		m.search = now.Add(marksRest)
	}
	if !known && len(m.until) >= mostMarks {
		return false
	}
	if m.until == nil {
		m.until = make(map[K]time.Time)
	}
	m.until[key] = now.Add(d)
	return true
}
