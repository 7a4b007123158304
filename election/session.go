package election

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
)

// session is a lease that is kept alive, and the candidacy that depends on it. It ends when its trust window ends, when
// the lease or the key turns out to be deleted, or when it is closed. A session that has ended never begins again.
type session struct {
	elector *Elector
	lease   leaseID
	trust   *trust

	// ctx is for campaigning and leading. It ends with the context of Run. It also ends when the trust window ends or the
	// lease or the key is lost, and then its cause is ErrLeadershipLost.
	ctx  context.Context
	lose context.CancelCauseFunc

	// upkeep is the context of the session's goroutines. It outlives the context of Run, so that the lease is kept alive
	// until lead has returned.
	upkeep context.Context
	stop   context.CancelFunc
	tasks  sync.WaitGroup

	ending sync.Once
}

// openSession takes a lease and keeps it alive until the session is closed. The caller closes the session and then
// revokes the lease.
func (e *Elector) openSession(ctx context.Context) (*session, error) {
	sent := time.Now()
	granting, cancel := context.WithTimeout(ctx, e.requestTimeout(e.cfg.TTL))
	defer cancel()
	lease, ttl, err := e.store.grant(granting, e.cfg.TTL)
	if err != nil {
		return nil, err
	}
	s := &session{
		elector: e, lease: lease,
		trust: newTrust(trustedUntil(sent, ttl, e.cfg.SafetyMargin)),
	}
	s.ctx, s.lose = context.WithCancelCause(ctx)
	s.upkeep, s.stop = context.WithCancel(context.WithoutCancel(ctx))
	s.tasks.Go(s.watchTrust)
	s.tasks.Go(func() { s.renew(sent, ttl) })
	return s, nil
}

// end ends the trust and logs the reason, unless the session has ended already.
func (s *session) end(reason string) {
	s.ending.Do(func() {
		s.trust.end()
		s.lose(ErrLeadershipLost)
		s.stop()
		s.elector.log.Warn("lease lost", "reason", reason)
	})
}

// close ends the session, without a log message, and waits for its goroutines. It doesn't revoke the lease.
func (s *session) close() {
	s.ending.Do(func() {})
	s.trust.end()
	s.stop()
	s.tasks.Wait()
	s.lose(context.Canceled)
}

// watchTrust ends the session at the end of its trust window.
func (s *session) watchTrust() {
	for {
		left := s.trust.remaining(time.Now())
		if left <= 0 {
			s.end("lease was not renewed in time")
			return
		}
		if !timing.Sleep(s.upkeep.Done(), left) {
			return
		}
	}
}

// renew keeps the lease alive. It sends a renewal when a third of the trust window has passed since the last successful
// request was sent, and sooner after a failure. sent is an instant just before the request for the lease was sent.
// granted is the lease's TTL.
func (s *session) renew(sent time.Time, granted time.Duration) {
	e := s.elector
	period := e.requestTimeout(granted)
	for timing.Sleep(s.upkeep.Done(), period-time.Since(sent)) {
		ttl, at, err := s.renewOnce(period)
		switch {
		case s.upkeep.Err() != nil:
			return
		case errors.Is(err, errLeaseGone):
			s.end("lease was revoked or has expired")
			return
		case err != nil:
			e.observe(err)
			if !timing.Sleep(s.upkeep.Done(), e.jitter(period/4)) {
				return
			}
		case ttl < granted:
			s.end("lease was shortened") // watchTrust requires that the end of the window only moves ahead
			return
		default:
			e.observe(nil)
			if !s.trust.extend(time.Now(), trustedUntil(at, ttl, e.cfg.SafetyMargin)) {
				return // watchTrust ends the session
			}
			sent = at
		}
	}
}

// renewOnce renews the lease. It returns the TTL and an instant just before the request was sent.
func (s *session) renewOnce(timeout time.Duration) (time.Duration, time.Time, error) {
	sent := time.Now()
	ctx, cancel := context.WithTimeout(s.upkeep, timeout)
	defer cancel()
	ttl, err := s.elector.store.renew(ctx, s.lease)
	return ttl, sent, err
}
