package election

import (
	"sync"
	"time"
)

// Term is one stretch of leading. A Term is a value that may be copied and used concurrently; its copies share the
// trust, which renewals of the lease extend. The zero Term is not trusted.
type Term struct {
	Epoch    int64  // strictly increases from term to term, unless etcd is restored
	Identity string // who leads
	Key      string // key in etcd whose create revision is Epoch

	trust *trust
}

// Remaining returns how long after now the term is still trusted, as far as renewals have got, or 0 if it is not. A
// term that has ended, or whose window has run out, has nothing remaining ever again.
func (t Term) Remaining(now time.Time) time.Duration {
	if t.trust == nil {
		return 0
	}
	return t.trust.remaining(now)
}

// Leader is what etcd says about who leads.
type Leader struct {
	Identity string
	Epoch    int64
}

// trustedUntil returns the end of the trust window that a grant or renewal opens. sent is an instant before the request
// was sent: the server counts ttl from later, so its lease outlasts the window by margin at least.
func trustedUntil(sent time.Time, ttl, margin time.Duration) time.Time {
	return sent.Add(ttl - margin)
}

// trust is the instant until which a term is trusted, which moves with renewals. The zero trust has ended.
type trust struct {
	mu    sync.Mutex
	until time.Time // zero: never trusted, or ended
}

func newTrust(until time.Time) *trust { return &trust{until: until} }

// extend moves the end of the window, unless the window has run out at now: then it reports false, for trust that was
// lost doesn't return.
func (t *trust) extend(now, until time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !now.Before(t.until) {
		return false
	}
	t.until = until
	return true
}

// end takes the trust away for good.
func (t *trust) end() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.until = time.Time{}
}

func (t *trust) remaining(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return max(0, t.until.Sub(now))
}
