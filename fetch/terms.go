package fetch

import (
	"fmt"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/policy"
)

const (
	denialMaxAge = time.Second // how long a denial is believed
	termsHalf    = 16384       // buckets in each half of the cache
	// termsMaxAge is how long a bucket's terms are believed: a take of a bucket that
	// asks for them costs almost twice as much as another, and a denial brings them
	// anyway.
	termsMaxAge = 10 * time.Second
	// pooledMaxAge is termsMaxAge of a pool's bucket, whose grant comes and goes.
	pooledMaxAge = time.Second
	// scheduleMaxAge is how often the instants of a stepped bucket are asked for
	// while its next one is overdue.
	scheduleMaxAge = time.Second
)

// known is what a client has learned of a bucket. It doesn't change: what is learned
// later makes another one.
type known struct {
	terms   *policy.Terms // nil: the bucket has no policy
	learned time.Time

	denied denial
	stand  *stand // of a bucket with degraded mode local; nil if there are too many

	// Of a stepped bucket.
	asked time.Time     // when its instants were last asked for
	next  time.Time     // the instant to come; zero if not known
	step  time.Duration // from the instant before to next
}

// denial is the last one of a bucket: takes of n tokens or more are denied until
// then. The zero denial denies nothing.
type denial struct {
	n     int64
	left  int64     // the tokens held
	until time.Time // no longer than denialMaxAge
	due   time.Time // of n tokens; zero if they are not due
}

func (d denial) holds(n int64, now time.Time) bool { return d.n > 0 && n >= d.n && now.Before(d.until) }

// newDenial remembers that a bucket that holds left tokens denied a take of n,
// which are due after wait; a negative wait is never.
func newDenial(n, left int64, wait time.Duration, now time.Time) denial {
	d := denial{n: n, left: left, until: now.Add(denialMaxAge)}
	if wait >= 0 {
		d.due = now.Add(wait)
		d.until = earlier(d.until, d.due)
	}
	return d
}

// exceeded is the error of a take of more tokens than the bucket ever holds.
func (k *known) exceeded(key string, n int64) error {
	if k.terms == nil || n <= k.terms.Capacity || k.terms.Shadow {
		return nil
	}
	return fmt.Errorf("%w: %d tokens of bucket %q, which holds at most %d", ErrExceedsCapacity, n, key, k.terms.Capacity)
}

// shadowed reports whether denials are admitted.
func (k *known) shadowed() bool { return k.terms != nil && k.terms.Shadow }

func (k *known) limit() int64 {
	if k.terms == nil {
		return 0
	}
	return k.terms.Capacity
}

// pooled reports whether the bucket is a pool's.
func (k *known) pooled() bool { return k.terms != nil && k.terms.Pool }

// maxAge is how long the terms are believed.
func (k *known) maxAge() time.Duration {
	if k.pooled() {
		return pooledMaxAge
	}
	return termsMaxAge
}

// onFloor reports whether the bucket is a pool's without a grant in force, as
// the scripts told when the terms were learned.
func (k *known) onFloor() bool {
	return k.pooled() && k.terms.GrantEra == 0
}

// stepped reports whether the bucket is refilled at instants.
func (k *known) stepped() bool { return k.terms != nil && k.terms.Kind == policy.Stepped }

// lacksSchedule reports whether a stepped bucket's instants are to be asked for: once a
// step, and while that is overdue once in scheduleMaxAge.
func (k *known) lacksSchedule(now time.Time) bool {
	return !now.Before(k.next) && now.Sub(k.asked) >= scheduleMaxAge
}

// resetAfter is the time until a bucket of these terms that holds tokens is
// full. A grant counts as if it went on.
func (k *known) resetAfter(tokens int64, now time.Time) time.Duration {
	if k.terms == nil {
		return Never
	}
	t := *k.terms
	if t.GrantEra != 0 {
		t.Tokens = t.GrantTokens
	}
	t.GrantTokens, t.GrantEnd, t.GrantEra = 0, 0, 0
	s := policy.Control{Terms: t}
	if !k.next.IsZero() {
		s.Next = k.next.Sub(now).Microseconds()
		s.Step = s.Next - k.step.Microseconds()
	}
	b := policy.Bucket{Tokens: &tokens, Control: &s}
	return wait(micros(b.Wait(t.Capacity, 0)))
}

// untilDue is the time until n tokens, which may exceed the capacity, fall due in
// a bucket that was found with the tokens; negative if that is not known.
func (k *known) untilDue(n, tokens int64, at lua.Refilled) time.Duration {
	if k.terms == nil || k.terms.Kind == policy.Stepped || n > policy.MaxTokens {
		return -1
	}
	t := *k.terms
	t.Capacity = policy.MaxTokens
	b := policy.Bucket{Tokens: &tokens, Control: &policy.Control{Terms: t, Era: at.Version.Era, Last: at.Last}}
	return time.Duration(b.Wait(n, at.Now)) * time.Microsecond
}

// wait is a script's waiting time as a Result shows it.
func wait(d time.Duration) time.Duration {
	if d < 0 {
		return Never
	}
	return d
}

// terms remembers what was learned of buckets. It holds no more than two halves:
// when the young one is full it becomes the old one, and the former old one is
// dropped. What is in use is learned again every termsMaxAge, so it is young.
type terms struct {
	mu         sync.RWMutex
	young, old map[string]*known
}

func newTerms() *terms { return &terms{young: make(map[string]*known)} }

// nothing is known of a bucket that was never seen.
var nothing = new(known)

// get returns what is known of a bucket and whether its terms may be believed.
func (t *terms) get(key string, now time.Time) (*known, bool) {
	t.mu.RLock()
	k, ok := t.young[key]
	if !ok {
		k, ok = t.old[key]
	}
	t.mu.RUnlock()
	if !ok {
		return nothing, false
	}
	return k, now.Sub(k.learned) < k.maxAge()
}

func (t *terms) put(key string, k *known) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.young[key]; !ok && len(t.young) >= termsHalf {
		t.old, t.young = t.young, make(map[string]*known, termsHalf)
	}
	t.young[key] = k
}

// forgive forgets a bucket's denial, since there are more tokens.
func (t *terms) forgive(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, half := range []map[string]*known{t.young, t.old} {
		if k, ok := half[key]; ok && k.denied != (denial{}) {
			forgiven := *k
			forgiven.denied = denial{}
			half[key] = &forgiven
		}
	}
}
