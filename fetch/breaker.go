package fetch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/tokenrefill/refiller/lua"
)

const (
	// A breaker opens after breakerFailures calls in a row that the server did not
	// answer, of which the last is breakerSpan after the first: merged takes fail
	// together, and one slow moment is no outage.
	breakerFailures = 5
	breakerSpan     = 20 * time.Millisecond
	// It closes after breakerProbes probes in a row that were answered. They are
	// probeFirst apart, and up to probeMost while none is answered; each pause is
	// between half and one and a half times that.
	breakerProbes = 3
	probeFirst    = 50 * time.Millisecond
	probeMost     = 250 * time.Millisecond
	// breakersOfCluster split the slots of a Cluster: slots of one master mostly
	// follow one another, and one master's outage is not all buckets'.
	breakersOfCluster = 64
)

// breaker keeps takes from a server that doesn't answer. While it is open, no take
// is sent; a goroutine of the Client asks the server by itself.
type breaker struct {
	why atomic.Uint32 // a Reason: it is open

	failures atomic.Int32 // in a row
	mu       sync.Mutex
	first    time.Time // of these
}

// open is the Reason why the breaker is open, ReasonNone if it is closed.
func (b *breaker) open() Reason { return Reason(b.why.Load()) }

// succeed notes an answer.
func (b *breaker) succeed() {
	if b.failures.Load() != 0 {
		b.failures.Store(0)
	}
}

// fail notes a call that was not answered, and reports whether that opened the
// breaker, which the caller then has probed.
func (b *breaker) fail(why Reason, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := b.failures.Add(1)
	if n == 1 {
		b.first = now
	}
	if n < breakerFailures || now.Sub(b.first) < breakerSpan {
		return false
	}
	return b.why.CompareAndSwap(uint32(ReasonNone), uint32(why))
}

// breakers are those of a Client: one for a single server, several for the slots of
// a Cluster or Ring.
type breakers []breaker

func newBreakers(rdb redis.UniversalClient) breakers {
	if _, ok := rdb.(*redis.Client); ok {
		return make(breakers, 1)
	}
	return make(breakers, breakersOfCluster)
}

// of is the breaker of a bucket's server.
func (bs breakers) of(key string) *breaker {
	if len(bs) == 1 {
		return &bs[0]
	}
	return &bs[lua.Slot(key)*len(bs)/lua.Slots]
}

// shutError is the cause of an ErrUnavailable that no call was made for.
type shutError struct{ reason Reason }

func (e *shutError) Error() string { return "not asked, since calls fail: " + e.reason.String() }

// shut is the error of a take while its server's breaker is open.
func shut(why Reason) error { return fmt.Errorf("%w: %w", ErrUnavailable, &shutError{why}) }

// note tells a bucket's breaker what became of a call that began at the instant.
// A caller's own deadline counts if it left the server time to answer; what a
// caller cancels says nothing.
func (c *Client) note(key string, began time.Time, err error) {
	if !c.config.breaker {
		return
	}
	b := c.breakers.of(key)
	if err == nil || answered(err) {
		b.succeed()
		return
	}
	why, now := ReasonOf(err), time.Now()
	if why == ReasonNone && errors.Is(err, context.DeadlineExceeded) && now.Sub(began) >= minSocketWait {
		why = ReasonDeadline
	}
	if why != ReasonNone && b.fail(why, now) {
		c.stats.opened.Add(1)
		c.workers.spawn(func() { c.probe(b, key) })
	}
}

// probe asks the server of a bucket until it answers reliably, or the Client is
// closed.
func (c *Client) probe(b *breaker, key string) {
	pause := probeFirst
	for good := 0; good < breakerProbes; {
		if c.nap(time.Duration((0.5 + c.jitter()) * float64(pause))) {
			return
		}
		if c.alive(key) {
			good++
			pause = probeFirst
		} else {
			good = 0
			pause = min(2*pause, probeMost)
		}
	}
	b.failures.Store(0)
	b.why.Store(uint32(ReasonNone))
}

// alive reports whether the server of a bucket lets a consumer write. A server that
// refuses just this call is alive.
func (c *Client) alive(key string) bool {
	err := c.beat(key, nil)
	return err == nil || answered(err) || ReasonOf(err) == ReasonRefused
}

// nap sleeps and reports whether the Client was closed meanwhile.
func (c *Client) nap(d time.Duration) (closed bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return false
	case <-c.workers.quit:
		return true
	}
}
