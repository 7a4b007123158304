package election

import (
	"sync"
	"time"
)

// Term is a time during which one candidate leads. A Term may be copied and used concurrently. Its copies share the
// trust, which renewals of the lease extend. The zero Term is not trusted.
type Term struct {
	Epoch    int64  // strictly increases from term to term, unless etcd is restored
	Identity string // of the leader, see Config.Identity
	Key      string // key in etcd whose create revision is Epoch

	trust *trust
}

// Remaining returns how long after now the term is still trusted if it isn't renewed again, or 0 if it isn't trusted.
// After the term or its window has ended, Remaining is always 0.
func (t Term) Remaining(now time.Time) time.Duration {
	if t.trust == nil {
		return 0
	}
	return t.trust.remaining(now)
}

// Leader is the leader according to the keys in etcd.
type Leader struct {
	Identity string
	Epoch    int64
}

// trustedUntil returns the end of the trust window after a grant or renewal. sent is an instant before the request was
// sent. The server counts ttl from a later time, so its lease ends at least margin after the window.
func trustedUntil(sent time.Time, ttl, margin time.Duration) time.Time {
	return sent.Add(ttl - margin)
}

// trust holds the instant until which a term is trusted. Renewals move this instant ahead. The zero trust has ended.
type trust struct {
	mu    sync.Mutex
	until time.Time // zero: never trusted, or ended
}

func newTrust(until time.Time) *trust { return &trust{until: until} }

// extend moves the end of the window. If the window has ended by now, extend returns false, because trust that has
// ended never begins again.
func (t *trust) extend(now, until time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !now.Before(t.until) {
		return false
	}
	t.until = until
	return true
}

// end ends the trust for ever.
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
