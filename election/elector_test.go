package election

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
)

// member is an elector on a fake server, run by the test.
type member struct {
	*Elector
	store  *fakeStore
	logs   *bytes.Buffer // read it after the elector has come to rest
	led    chan ledTerm  // one per call of lead
	cancel context.CancelFunc
	done   chan struct{} // closed when Run has returned
}

// ledTerm is a running call of lead.
type ledTerm struct {
	Term
	ctx  context.Context
	done chan<- error // ends lead with this error
}

func testConfig(identity string) Config {
	cfg := DefaultConfig()
	cfg.Identity = identity
	return cfg
}

func newMember(server *fakeServer, identity string) *member {
	m := &member{
		store: server.connect(identity), logs: &bytes.Buffer{},
		led: make(chan ledTerm, 100), done: make(chan struct{}),
	}
	cfg := testConfig(identity)
	cfg.Logger = hclog.New(&hclog.LoggerOptions{Output: m.logs, Level: hclog.Debug, DisableTime: true})
	m.Elector = newElector(cfg, m.store)
	m.random = func() float64 { return 0.5 } // each wait is exactly as long as configured
	return m
}

// start runs the elector with a lead that announces each term and lasts until the test ends it.
func (m *member) start(t *testing.T) *member {
	return m.startLead(t, func(ctx context.Context, term Term) error {
		done := make(chan error)
		m.led <- ledTerm{Term: term, ctx: ctx, done: done}
		return <-done
	})
}

// startObedient is like start, but lead also returns when its context ends.
func (m *member) startObedient(t *testing.T) *member {
	return m.startLead(t, func(ctx context.Context, term Term) error {
		done := make(chan error)
		m.led <- ledTerm{Term: term, ctx: ctx, done: done}
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

func (m *member) startLead(t *testing.T, lead func(context.Context, Term) error) *member {
	ctx, cancel := context.WithCancel(t.Context())
	m.cancel = cancel
	go func() {
		defer close(m.done)
		if err := m.Run(ctx, lead); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	return m
}

// stop ends a member whose lead returns when its context ends.
func (m *member) stop() {
	m.cancel()
	<-m.done
}

// next receives from c within a day of the bubble's time.
func next[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(24 * time.Hour):
		require.Fail(t, "no value arrived within a day")
		panic("unreachable")
	}
}

func (m *member) leads() bool {
	select {
	case term := <-m.led:
		m.led <- term
		return true
	default:
		return false
	}
}

func TestALoneCandidateLeadsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		begin := time.Now()
		m := newMember(server, "a")
		require.Equal(t, RoleIdle, m.State().Role)
		m.startObedient(t)
		term := next(t, m.led)
		require.Zero(t, time.Since(begin))
		require.Equal(t, "a", term.Identity)
		require.NotEmpty(t, term.Key)
		require.Equal(t, m.cfg.TTL-m.cfg.SafetyMargin, term.Remaining(time.Now()))
		require.Equal(t, State{Role: RoleLeader, Term: term.Term, Terms: 1}, m.State())
		leader, err := m.Leader(t.Context())
		require.NoError(t, err)
		require.Equal(t, Leader{Identity: "a", Epoch: term.Epoch}, leader)

		m.stop()
		require.Zero(t, time.Since(begin))
		require.ErrorIs(t, context.Cause(term.ctx), context.Canceled)
		require.Zero(t, term.Remaining(time.Now()))
		require.Equal(t, State{Role: RoleIdle, Terms: 1}, m.State())
		_, err = m.Leader(t.Context())
		require.ErrorIs(t, err, ErrNoLeader)
		require.Zero(t, server.countLeases())
	})
}

func TestALeaderStaysWhileItsLeaseIsRenewed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMember(newFakeServer(), "a").startObedient(t)
		term := next(t, m.led)
		time.Sleep(24 * time.Hour)
		require.NoError(t, term.ctx.Err())
		require.Positive(t, term.Remaining(time.Now()))
		m.stop()
	})
}

func TestTrustCountsFromBeforeTheRenewalWasSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		m := newMember(server, "a")
		begin := time.Now()
		m.startObedient(t)
		term := next(t, m.led)
		period := m.requestTimeout(m.cfg.TTL)
		renewals := 0
		m.store.setPlan(func(op string) call {
			if op == "renew" {
				renewals++
				if renewals == 1 {
					return call{back: period - time.Millisecond} // succeeds just before it would time out
				}
			}
			return call{lostThere: true}
		})
		next(t, term.ctx.Done())
		require.Equal(t, ErrLeadershipLost, context.Cause(term.ctx))
		window := m.cfg.TTL - m.cfg.SafetyMargin
		require.Equal(t, period+window, time.Since(begin), "the last renewal was sent one period after the start")
		_, expires, ok := server.keyOf("a")
		require.True(t, ok)
		require.GreaterOrEqual(t, time.Until(expires), m.cfg.SafetyMargin)
		m.stop()
	})
}

func TestTrustCountsFromBeforeTheGrantWasSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMember(newFakeServer(), "a")
		m.store.setPlan(func(op string) call {
			switch op {
			case "grant":
				return call{back: time.Second}
			case "renew":
				return call{lostThere: true}
			}
			return call{}
		})
		begin := time.Now()
		m.startObedient(t)
		term := next(t, m.led)
		require.Equal(t, time.Second, time.Since(begin))
		next(t, term.ctx.Done())
		require.Equal(t, m.cfg.TTL-m.cfg.SafetyMargin, time.Since(begin))
		m.stop()
	})
}

func TestTheGrantedTTLCounts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		server.grantTTL = 30 * time.Second
		m := newMember(server, "a").startObedient(t)
		term := next(t, m.led)
		require.Equal(t, 29*time.Second, term.Remaining(time.Now()))
		time.Sleep(time.Minute)
		require.Equal(t, 6, m.store.count("renew"), "the time between renewals is a third of the window")
		m.stop()
	})
}

func TestAnExpiredTrustWindowStaysExpired(t *testing.T) {
	t.Parallel()
	now := time.Now()
	term := Term{Epoch: 1, trust: newTrust(trustedUntil(now, 5*time.Second, time.Second))}
	require.Equal(t, 4*time.Second, term.Remaining(now))
	require.True(t, term.trust.extend(now.Add(time.Second), now.Add(5*time.Second)))
	require.Equal(t, time.Second, term.Remaining(now.Add(4*time.Second)))

	paused := now.Add(time.Minute)
	require.Zero(t, term.Remaining(paused), "the process was stopped for longer than its window")
	require.False(t, term.trust.extend(paused, paused.Add(4*time.Second)), "a late reply does not restore trust")
	require.Zero(t, term.Remaining(paused))
	term.trust.end()
	require.Zero(t, term.Remaining(now))
	require.False(t, term.trust.extend(now, paused))
	require.Zero(t, Term{Epoch: 1}.Remaining(now))
}

func TestRunWaitsForLeadBeforeItResigns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a := newMember(server, "a").start(t)
		first := next(t, a.led)
		b := newMember(server, "b").startObedient(t)
		synctest.Wait()
		require.Equal(t, RoleStandby, b.State().Role)

		a.cancel()
		next(t, first.ctx.Done())
		time.Sleep(time.Minute) // lead takes far longer than a TTL to wind down
		require.False(t, b.leads())
		require.Positive(t, first.Remaining(time.Now()), "the lease is kept alive while Lead runs")

		released := time.Now()
		first.done <- nil
		second := next(t, b.led)
		require.Zero(t, time.Since(released), "the standby leads as soon as the leader resigns")
		require.Greater(t, second.Epoch, first.Epoch)
		next(t, a.done)
		b.stop()
	})
}

func TestALostTermIsNotRenewedWhileLeadWindsDown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a := newMember(server, "a").start(t)
		first := next(t, a.led)
		a.store.setPlan(blackHole)
		next(t, first.ctx.Done())
		require.Equal(t, RoleCandidate, a.State().Role, "a process that lost trust is not the leader")
		a.store.setPlan(nil)
		b := newMember(server, "b").startObedient(t)
		next(t, b.led)
		first.done <- nil
		b.stop()
		third := next(t, a.led)
		a.cancel()
		third.done <- nil
		next(t, a.done)
	})
}

func TestResigningIsBounded(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"grant", "enrol", "ahead", "wait-deleted", "leading"} {
		t.Run(op, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := newFakeServer()
				other := newMember(server, "other").startObedient(t)
				next(t, other.led)
				m := newMember(server, "a")
				if op == "leading" {
					other.stop()
					m.startObedient(t)
					next(t, m.led)
					m.store.setPlan(blackHole)
				} else {
					hanging := false
					m.store.setPlan(func(o string) call {
						hanging = hanging || o == op
						return call{lostThere: hanging}
					})
					m.startObedient(t)
				}
				synctest.Wait()
				begin := time.Now()
				m.stop()
				require.LessOrEqual(t, time.Since(begin), m.cfg.ResignTimeout)
				if op != "leading" {
					other.stop()
				}
				time.Sleep(m.cfg.TTL)
				require.Zero(t, server.countLeases())
			})
		})
	}
}

func TestADeletedLeaderKeyEndsTheTermAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		m := newMember(server, "a").startObedient(t)
		first := next(t, m.led)
		time.Sleep(time.Hour)
		begin := time.Now()
		server.deleteKeyOf("a")
		next(t, first.ctx.Done())
		require.Zero(t, time.Since(begin))
		require.Equal(t, ErrLeadershipLost, context.Cause(first.ctx))
		require.Zero(t, first.Remaining(time.Now()))
		second := next(t, m.led)
		require.Greater(t, second.Epoch, first.Epoch)
		require.Equal(t, m.cfg.RetryInterval, time.Since(begin))
		require.EqualValues(t, 2, m.State().Terms)
		m.stop()
	})
}

func TestADeletedLeaderKeyIsNoticedWithoutTheWatch(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]call{
		"silent watch":   {deafReader: true},
		"refusing watch": {refused: errRefused},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := newFakeServer()
				m := newMember(server, "a")
				m.store.setPlan(func(op string) call {
					if op == "wait-deleted" {
						return broken
					}
					return call{}
				})
				m.startObedient(t)
				term := next(t, m.led)
				server.deleteKeyOf("a")
				begin := time.Now()
				next(t, term.ctx.Done())
				require.LessOrEqual(t, time.Since(begin), m.cfg.TTL)
				require.ErrorIs(t, context.Cause(term.ctx), ErrLeadershipLost)
				m.stop()
				require.NotContains(t, m.logs.String(), "etcd unavailable", "etcd counts as available if the keys can be read")
			})
		})
	}
}

func TestARevokedLeaseEndsTheTermByTheNextRenewal(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		m := newMember(server, "a")
		m.store.setPlan(func(op string) call { return call{deafReader: op == "wait-deleted"} })
		m.startObedient(t)
		term := next(t, m.led)
		server.revokeAll()
		begin := time.Now()
		next(t, term.ctx.Done())
		require.LessOrEqual(t, time.Since(begin), m.requestTimeout(m.cfg.TTL))
		m.stop()
	})
}

// An operator revokes the lease of a candidate that has won, while the reply by which it won is on its way. Terms begin
// in another order than that of their epochs only in this case.
func TestATermWhoseLeaseIsRevokedBeforeItBeginsEndsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a, b := newMember(server, "a"), newMember(server, "b")
		const late = 40 * time.Millisecond
		a.store.setPlan(func(op string) call {
			if op == "ahead" {
				return call{back: late}
			}
			return call{}
		})
		a.startObedient(t)
		synctest.Wait()
		begin := time.Now()
		server.revokeAll()
		second := next(t, b.startObedient(t).led)
		require.Zero(t, time.Since(begin))
		first := next(t, a.led)
		require.Equal(t, late, time.Since(begin))
		require.Less(t, first.Epoch, second.Epoch)

		next(t, first.ctx.Done())
		require.Equal(t, late, time.Since(begin), "the watch reports at once")
		require.ErrorIs(t, context.Cause(first.ctx), ErrLeadershipLost)
		require.Zero(t, first.Remaining(time.Now()))
		require.Positive(t, second.Remaining(time.Now()))
		a.stop()
		b.stop()
	})
}

func TestStandbysWinInTheOrderOfTheirKeys(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		var members []*member
		for _, name := range []string{"a", "b", "c"} {
			members = append(members, newMember(server, name).startObedient(t))
			synctest.Wait()
		}
		time.Sleep(time.Hour) // leases of standbys are kept alive
		last := int64(0)
		for i, m := range members {
			term := next(t, m.led)
			require.Greater(t, term.Epoch, last)
			last = term.Epoch
			for _, standby := range members[i+1:] {
				require.Equal(t, RoleStandby, standby.State().Role)
				require.False(t, standby.leads())
			}
			m.stop()
		}
	})
}

func TestAStandbyNeverWinsWithADeletedKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a := newMember(server, "a").startObedient(t)
		first := next(t, a.led)
		b := newMember(server, "b").startObedient(t)
		synctest.Wait()
		server.deleteKeyOf("b")
		c := newMember(server, "c").startObedient(t)
		synctest.Wait()
		require.False(t, c.leads(), "the leader's key is older")
		a.stop()
		third := next(t, c.led)
		require.Greater(t, third.Epoch, first.Epoch)
		time.Sleep(time.Minute)
		require.False(t, b.leads(), "b queues again with a new key")
		c.stop()
		fourth := next(t, b.led)
		require.Greater(t, fourth.Epoch, third.Epoch)
		b.stop()
	})
}

func TestAStandbyWithAnEndedLeaseQueuesAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a := newMember(server, "a").startObedient(t)
		next(t, a.led)
		b := newMember(server, "b").startObedient(t)
		synctest.Wait()
		server.revokeAll()
		time.Sleep(time.Minute)
		for _, m := range []*member{a, b} {
			_, _, enrolled := server.keyOf(m.store.name)
			require.True(t, enrolled)
		}
		require.ElementsMatch(t, []Role{RoleLeader, RoleStandby}, []Role{a.State().Role, b.State().Role})
		a.stop()
		b.stop()
	})
}

func TestAStandbyWinsWithoutTheWatch(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]call{
		"silent watch":    {deafReader: true},
		"compacted watch": {refused: errors.New("required revision has been compacted")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := newFakeServer()
				a := newMember(server, "a").startObedient(t)
				next(t, a.led)
				b := newMember(server, "b")
				b.store.setPlan(func(op string) call {
					if op == "wait-deleted" {
						return broken
					}
					return call{}
				})
				b.startObedient(t)
				time.Sleep(time.Minute)
				require.Less(t, b.store.count("wait-deleted"), 200, "a failing watch is retried with pauses")
				a.stop()
				begin := time.Now()
				next(t, b.led)
				require.LessOrEqual(t, time.Since(begin), b.cfg.TTL)
				b.stop()
			})
		})
	}
}

func TestAnErrorOfLeadIsLoggedOnceAndAnotherMayLead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		a := newMember(server, "a").startObedient(t)
		first := next(t, a.led)
		b := newMember(server, "b").startObedient(t)
		synctest.Wait()
		first.done <- errors.New("store is full")
		next(t, b.led)
		time.Sleep(time.Minute)
		require.Equal(t, RoleStandby, a.State().Role)
		b.stop()
		second := next(t, a.led)
		require.NoError(t, second.ctx.Err())
		a.stop()
		require.Equal(t, 1, strings.Count(a.logs.String(), "lead failed"))
		require.Contains(t, a.logs.String(), "store is full")
		require.NotContains(t, b.logs.String(), "lead failed", "context.Canceled is no failure")
	})
}

func TestALeadThatReturnsAtOnceIsNotRetriedInALoop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMember(newFakeServer(), "a")
		m.startLead(t, func(context.Context, Term) error { return nil })
		time.Sleep(time.Minute - time.Millisecond)
		m.stop()
		require.EqualValues(t, time.Minute/m.cfg.RetryInterval, m.State().Terms)
	})
}

func TestAnOutageIsLoggedOncePerTransitionAndRetriedWithPauses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]call{"refused": {refused: errRefused}, "black hole": {lostThere: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				server := newFakeServer()
				m := newMember(server, "a").startObedient(t)
				term := next(t, m.led)
				m.store.setPlan(func(string) call { return c })
				next(t, term.ctx.Done())
				time.Sleep(10 * time.Minute)
				require.Less(t, m.store.count("grant"), 10*60/4)
				require.Error(t, m.State().Err)
				m.store.setPlan(nil)
				begin := time.Now()
				next(t, m.led)
				require.LessOrEqual(t, time.Since(begin), 16*m.cfg.RetryInterval+m.requestTimeout(m.cfg.TTL))
				require.NoError(t, m.State().Err)
				m.stop()
				require.Equal(t, 1, strings.Count(m.logs.String(), "etcd unavailable"))
				require.Equal(t, 1, strings.Count(m.logs.String(), "etcd available again"))
			})
		})
	}
}

func TestALeaseLeftBehindIsRevokedWhenEtcdIsBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		server.grantTTL = time.Hour // it would block every younger key for that long
		m := newMember(server, "a")
		m.store.setPlan(func(op string) call {
			return call{lostThere: op == "remove" || op == "revoke"}
		})
		m.startObedient(t)
		first := next(t, m.led)
		first.done <- nil
		time.Sleep(m.cfg.ResignTimeout)
		m.store.setPlan(nil)
		begin := time.Now()
		next(t, m.led)
		require.Less(t, time.Since(begin), time.Minute)
		m.stop()
		require.Zero(t, server.countLeases())
	})
}

func TestAKeyWithALostReplyBlocksNoCandidate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		server := newFakeServer()
		m := newMember(server, "a")
		enrolments := 0
		m.store.setPlan(func(op string) call {
			if op != "enrol" {
				return call{}
			}
			enrolments++
			return call{lostBack: enrolments == 1}
		})
		begin := time.Now()
		m.startObedient(t)
		term := next(t, m.led)
		require.Less(t, time.Since(begin), m.cfg.TTL, "the member leads before the first key's lease ends")
		require.Greater(t, term.Epoch, int64(1))
		m.stop()
	})
}

func TestRunRefusesMisuse(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMember(newFakeServer(), "a").startObedient(t)
		next(t, m.led)
		lead := func(context.Context, Term) error { return nil }
		require.ErrorIs(t, m.Run(t.Context(), lead), ErrRunning)
		m.stop()
		require.Error(t, m.Run(t.Context(), nil))
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, m.Run(ended, lead), "an ended context is no failure")
	})
}
