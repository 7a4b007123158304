package election

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/config/credential"
	"github.com/tokenrefill/refiller/internal/config/etcdconn"
	"github.com/tokenrefill/refiller/internal/testing/faultproxy"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
)

// patience is how long a test waits for an event that must happen. No test depends on how soon the event happens.
const patience = 30 * time.Second

func etcdConfig(client *clientv3.Client, identity string) Config {
	cfg := DefaultConfig()
	cfg.Client, cfg.Identity = client, identity
	cfg.TTL, cfg.SafetyMargin = 3*time.Second, 500*time.Millisecond
	cfg.RetryInterval, cfg.ResignTimeout = 50*time.Millisecond, time.Second
	cfg.Logger = hclog.NewNullLogger()
	return cfg
}

// contender is an elector on a real etcd.
type contender struct {
	*Elector
	led    chan ledTerm
	cancel context.CancelFunc
	done   chan error
}

func contest(t *testing.T, client *clientv3.Client, identity string, changes ...func(*Config)) *contender {
	t.Helper()
	cfg := etcdConfig(client, identity)
	for _, change := range changes {
		change(&cfg)
	}
	e, err := New(cfg)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	c := &contender{Elector: e, led: make(chan ledTerm, 1000), cancel: cancel, done: make(chan error, 1)}
	go func() {
		c.done <- e.Run(ctx, func(ctx context.Context, term Term) error {
			c.led <- ledTerm{Term: term, ctx: ctx}
			<-ctx.Done()
			return nil
		})
	}()
	t.Cleanup(c.stop)
	return c
}

func (c *contender) stop() {
	c.cancel()
	c.done <- <-c.done // stop may be called again
}

func await[T any](t *testing.T, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		require.Fail(t, "timed out", what)
		panic("unreachable")
	}
}

func awaitRole(t *testing.T, c *contender, role Role) {
	t.Helper()
	require.Eventually(t, func() bool { return c.State().Role == role }, patience, 5*time.Millisecond, "%s", role)
}

// leakedGoroutines returns the stacks of goroutines that run this package's code, besides tests.
func leakedGoroutines() string {
	var left []string
	for range 100 { // goroutines that are about to end get a second for it
		left = nil
		buf := make([]byte, 1<<20)
		buf = buf[:runtime.Stack(buf, true)]
		for _, stack := range strings.Split(string(buf), "\n\n") {
			if strings.Contains(stack, "refiller/election.") && !strings.Contains(stack, "testing.(*M).Run") &&
				!strings.Contains(stack, "election.TestMain") {
				left = append(left, stack)
			}
		}
		if len(left) == 0 {
			return ""
		}
		time.Sleep(10 * time.Millisecond)
	}
	return strings.Join(left, "\n\n")
}

func TestAnotherCandidateWinsWhenTheLeaderStops(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	var queue []*contender
	long := func(c *Config) { c.TTL = 45 * time.Second } // no lease expires during the test
	for i := range 3 {
		c := contest(t, etcd.Client(), string(rune('a'+i)), long)
		if i == 0 {
			awaitRole(t, c, RoleLeader)
		} else {
			awaitRole(t, c, RoleStandby)
		}
		queue = append(queue, c)
	}
	last := int64(0)
	for i, c := range queue {
		term := await(t, c.led, "term")
		require.Greater(t, term.Epoch, last)
		last = term.Epoch
		leader, err := queue[2].Leader(t.Context())
		require.NoError(t, err)
		require.Equal(t, Leader{Identity: c.cfg.Identity, Epoch: term.Epoch}, leader)
		got, err := etcd.Client().Get(t.Context(), term.Key)
		require.NoError(t, err)
		require.Equal(t, term.Epoch, got.Kvs[0].CreateRevision)
		c.stop()
		if i+1 < len(queue) {
			awaitRole(t, queue[i+1], RoleLeader)
		}
	}
	_, err := queue[0].Leader(t.Context())
	require.ErrorIs(t, err, ErrNoLeader)
	leases, err := etcd.Client().Leases(t.Context())
	require.NoError(t, err)
	require.Empty(t, leases.Leases)
}

func TestALeaderOutlivesItsFirstLease(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	// The TTL is so long that even a busy machine renews the lease in time.
	c := contest(t, etcd.Client(), "a", func(c *Config) { c.TTL = 6 * time.Second })
	term := await(t, c.led, "term")
	select {
	case <-term.ctx.Done():
		require.Fail(t, "term ended")
	case <-time.After(c.cfg.TTL):
	}
	require.Positive(t, term.Remaining(time.Now()))
}

func TestAnOperatorEndsATermByDeletingTheKeyOrTheLease(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	client := etcd.Client()
	c := contest(t, client, "a")
	first := await(t, c.led, "first term")
	_, err := client.Delete(t.Context(), first.Key)
	require.NoError(t, err)
	await(t, first.ctx.Done(), "end of the term")
	require.Equal(t, ErrLeadershipLost, context.Cause(first.ctx))

	second := await(t, c.led, "second term")
	require.Greater(t, second.Epoch, first.Epoch)
	leases, err := client.Leases(t.Context())
	require.NoError(t, err)
	for _, lease := range leases.Leases {
		_, err := client.Revoke(t.Context(), lease.ID)
		require.NoError(t, err)
	}
	await(t, second.ctx.Done(), "end of the second term")
	require.Equal(t, ErrLeadershipLost, context.Cause(second.ctx))
	third := await(t, c.led, "third term")
	require.Greater(t, third.Epoch, second.Epoch)
}

// A backup of etcd is made while a leads and b and c wait. Then a resigns, and b or c leads. Then etcd is emptied, or
// restored from the backup. The restore brings old keys back. In both cases revisions begin again below those that the
// candidates know.
func TestARestoredEtcdHasOneLeaderAgain(t *testing.T) {
	t.Parallel()
	for name, restore := range map[string]func(backup, data string) error{
		"emptied":  func(string, string) error { return nil },
		"restored": func(backup, data string) error { return os.CopyFS(data, os.DirFS(backup)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			etcd := testenv.Etcd(t, 1)
			member, backup := etcd.Members()[0], filepath.Join(t.TempDir(), "backup")
			data := filepath.Join(member.Dir(), "data")
			a := contest(t, etcd.Client(), "a")
			await(t, a.led, "the first term")
			b, c := contest(t, etcd.Client(), "b"), contest(t, etcd.Client(), "c")
			awaitRole(t, b, RoleStandby)
			awaitRole(t, c, RoleStandby)
			member.Stop()
			require.NoError(t, os.CopyFS(backup, os.DirFS(data)))
			member.Restart()
			a.stop()
			require.Eventually(t, func() bool { return trusted(b, c) == 1 }, patience, time.Millisecond, "another process leads")

			member.Stop()
			require.NoError(t, os.RemoveAll(data))
			require.NoError(t, restore(backup, data))
			member.Restart()
			back := time.Now()
			require.Eventually(t, func() bool {
				require.LessOrEqual(t, trusted(b, c), 1)
				return trusted(b, c) == 1 && time.Since(back) > 2*b.cfg.TTL // restored keys have expired
			}, patience, time.Millisecond, "one process leads")
			leader, err := c.Leader(t.Context())
			require.NoError(t, err)
			require.Contains(t, []string{"b", "c"}, leader.Identity, "the key of a has ended")
		})
	}
}

// trusted counts the contenders that may act as the leader now.
func trusted(all ...*contender) (n int) {
	var terms []Term
	for _, c := range all {
		terms = append(terms, c.State().Term)
	}
	now := time.Now()
	for _, term := range terms {
		if term.Remaining(now) > 0 {
			n++
		}
	}
	return n
}

func TestElectionsGoOnWhenEtcdLosesItsLeader(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 3)
	a := contest(t, dial(t, etcdconn.Options{Endpoints: etcd.Endpoints()}), "a")
	term := await(t, a.led, "term")
	b := contest(t, dial(t, etcdconn.Options{Endpoints: etcd.Endpoints()}), "b")
	awaitRole(t, b, RoleStandby)
	raft, ok := etcd.Leader(t.Context())
	require.True(t, ok)
	raft.Kill()
	a.stop() // resigning may or may not get through while etcd has no leader
	next := await(t, b.led, "term after the loss")
	require.Greater(t, next.Epoch, term.Epoch)
	raft.Restart()
}

func TestATermEndsWithoutAMajorityAndReturnsWithIt(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 3)
	c := contest(t, dial(t, etcdconn.Options{Endpoints: etcd.Endpoints()}), "a")
	term := await(t, c.led, "term")
	members := etcd.Members()
	members[0].Kill()
	members[1].Kill()
	await(t, term.ctx.Done(), "end of the term")
	require.Equal(t, ErrLeadershipLost, context.Cause(term.ctx))
	require.Eventually(t, func() bool { return c.State().Err != nil }, patience, 5*time.Millisecond)
	members[0].Restart()
	next := await(t, c.led, "term with a majority")
	require.Greater(t, next.Epoch, term.Epoch)
	require.Eventually(t, func() bool { return c.State().Err == nil }, patience, 5*time.Millisecond)
}

// cutOff puts a proxy between one candidate and etcd.
func cutOff(t *testing.T, etcd *testenv.EtcdCluster) (*faultproxy.Proxy, *clientv3.Client) {
	t.Helper()
	proxy := testenv.Proxy(t, etcd.Members()[0].Addr(), 0)
	return proxy, dial(t, etcdconn.Options{Endpoints: []string{proxy.Addr()}})
}

func TestACutOffLeaderStopsBeforeAnotherWins(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	for name, fault := range map[string]func(*faultproxy.Proxy) error{
		"both directions": func(p *faultproxy.Proxy) error {
			p.HalfOpen()
			return nil
		},
		"answers only":  func(p *faultproxy.Proxy) error { return p.BlackHole(faultproxy.ToClient) },
		"requests only": func(p *faultproxy.Proxy) error { return p.BlackHole(faultproxy.ToServer) },
		"refused": func(p *faultproxy.Proxy) error {
			p.Cut()
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, client := cutOff(t, etcd)
			separate := func(c *Config) { c.Prefix = "/" + name } // a fault must not affect the other tests
			a := contest(t, client, "a", separate)
			first := await(t, a.led, "first term")
			b := contest(t, etcd.Client(), "b", separate)
			awaitRole(t, b, RoleStandby)
			require.NoError(t, fault(proxy))
			second := await(t, b.led, "second term")
			require.Zero(t, first.Remaining(time.Now()))
			require.Error(t, first.ctx.Err())
			require.Equal(t, ErrLeadershipLost, context.Cause(first.ctx))
			require.Greater(t, second.Epoch, first.Epoch)

			began := time.Now()
			a.cancel()
			require.NoError(t, await(t, a.done, "end of Run"))
			a.done <- nil
			require.Less(t, time.Since(began), patience/2, "Run ends after ResignTimeout")
			b.stop()
			require.NoError(t, proxy.Heal())
		})
	}
}

func TestAResignationThatCantBeSentDoesNotHoldUpRun(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	proxy, client := cutOff(t, etcd)
	a := contest(t, client, "a")
	await(t, a.led, "term")
	proxy.HalfOpen()
	began := time.Now()
	a.stop()
	require.Less(t, time.Since(began), patience/2)
	b := contest(t, etcd.Client(), "b")
	await(t, b.led, "term after the lease expired")
}

var actsLine = regexp.MustCompile(`acts epoch=(\d+) at=(\d+)`)

func TestAStoppedProcessDoesNotActWhenItContinues(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	program, err := os.Executable()
	require.NoError(t, err)
	process := testenv.StartCommand(t, testenv.Command{
		Name: "candidate", Path: program, Env: []string{candidateEndpoints + "=" + strings.Join(etcd.Endpoints(), ",")},
	})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	first, err := process.WaitLog(ctx, actsLine)
	require.NoError(t, err)
	b := contest(t, etcd.Client(), "b", func(c *Config) { c.TTL = 45 * time.Second }) // outlasts the test
	awaitRole(t, b, RoleStandby)

	process.Pause()
	term := await(t, b.led, "term of the successor")
	resumed := time.Now().UnixMilli()
	process.Resume()
	_, err = process.WaitLog(
		ctx, regexp.MustCompile(`lost epoch=`+first[1]+` cause=`+regexp.QuoteMeta(ErrLeadershipLost.Error())))
	require.NoError(t, err)
	process.Kill()
	require.NoError(t, term.ctx.Err())
	for _, line := range actsLine.FindAllStringSubmatch(process.Log(), -1) {
		at, err := strconv.ParseInt(line[2], 10, 64)
		require.NoError(t, err)
		require.Equal(t, first[1], line[1])
		require.Less(t, at, resumed, "acted under epoch %s after %d had begun", line[1], term.Epoch)
	}
}

func TestCandidatesLogIn(t *testing.T) {
	t.Parallel()
	const password = "open sesame"
	etcd := testenv.Etcd(t, 1, testenv.WithPassword(password))
	root := etcd.Client()
	_, err := root.RoleAdd(t.Context(), "candidate")
	require.NoError(t, err)
	prefix := "/refiller/lead/"
	_, err = root.RoleGrantPermission(t.Context(), "candidate", prefix, clientv3.GetPrefixRangeEnd(prefix),
		clientv3.PermissionType(clientv3.PermReadWrite))
	require.NoError(t, err)
	_, err = root.UserAdd(t.Context(), "alice", "secret")
	require.NoError(t, err)
	_, err = root.UserGrantRole(t.Context(), "alice", "candidate")
	require.NoError(t, err)

	alice := etcdconn.Options{Endpoints: etcd.Endpoints(), Username: "alice", Password: credential.Plain("secret")}
	a := contest(t, dial(t, alice), "a")
	await(t, a.led, "first term")
	b := contest(t, dial(t, alice), "b")
	awaitRole(t, b, RoleStandby)
	a.stop()
	term := await(t, b.led, "second term")
	require.NoError(t, term.ctx.Err())

	for name, cfg := range map[string]etcdconn.Options{
		"wrong password": {Endpoints: etcd.Endpoints(), Username: "alice", Password: credential.Plain("wrong")},
		"no login":       {Endpoints: etcd.Endpoints()},
	} {
		c := contest(t, dial(t, cfg), name)
		require.Eventually(t, func() bool { return c.State().Err != nil }, patience, 5*time.Millisecond, name)
		require.Zero(t, c.State().Terms)
		_, err := c.Leader(t.Context())
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrNoLeader)
		c.stop()
	}
}

func TestCandidatesUseTLS(t *testing.T) {
	t.Parallel()
	certs := testenv.NewCerts(t)
	etcd := testenv.Etcd(t, 1, testenv.WithTLS(certs))
	a := contest(t, dial(t, etcdconn.Options{
		Endpoints: etcd.Endpoints(),
		TLS:       credential.TLS{CA: certs.CAFile, Cert: certs.ClientCert, Key: certs.ClientKey},
	}), "a")
	await(t, a.led, "term")
	b := contest(t, dial(t, etcdconn.Options{
		Endpoints: []string{etcd.Members()[0].Addr()}, // without a scheme
		TLS:       credential.TLS{CA: certs.CAFile, Cert: certs.ClientCert, Key: certs.ClientKey},
	}), "b")
	awaitRole(t, b, RoleStandby)
	stranger := contest(t, dial(t, etcdconn.Options{Endpoints: etcd.Endpoints(), TLS: credential.TLS{CA: certs.CAFile}}),
		"c")
	require.Eventually(t, func() bool { return stranger.State().Err != nil }, patience, 5*time.Millisecond)
}

func TestDialDoesNotWaitForEtcd(t *testing.T) {
	t.Parallel()
	const password = "open sesame"
	etcd := testenv.Etcd(t, 1, testenv.WithPassword(password))
	member := etcd.Members()[0]
	member.Kill()
	c := contest(t, dial(t, etcdconn.Options{
		Endpoints: etcd.Endpoints(), Username: testenv.EtcdUser, Password: credential.Plain(password),
	}), "a")
	require.Eventually(t, func() bool { return c.State().Err != nil }, patience, 5*time.Millisecond)
	member.Restart()
	await(t, c.led, "term")
}

func TestResigningTouchesNothingButTheOwnTerm(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	client := etcd.Client()
	s := newEtcdStore(client, "/x")
	id, ttl, err := s.grant(t.Context(), 10*time.Second)
	require.NoError(t, err)
	require.Equal(t, 10*time.Second, ttl)
	key, epoch, err := s.enrol(t.Context(), id, "a")
	require.NoError(t, err)
	_, err = client.Delete(t.Context(), key)
	require.NoError(t, err)
	put, err := client.Put(t.Context(), key, "another process under the same name")
	require.NoError(t, err)
	_, _, err = s.ahead(t.Context(), key, epoch)
	require.ErrorIs(t, err, errKeyGone)

	require.NoError(t, s.remove(t.Context(), key, epoch))
	require.NoError(t, s.revoke(t.Context(), id))
	leader, err := s.leader(t.Context())
	require.NoError(t, err)
	require.Equal(t, put.Header.Revision, leader.Epoch)

	require.NoError(t, s.revoke(t.Context(), id), "revoking a lease that has ended succeeds")
	_, err = s.renew(t.Context(), id)
	require.ErrorIs(t, err, errLeaseGone)
	_, _, err = s.enrol(t.Context(), id, "a")
	require.Error(t, err)
}

func TestWatchingACompactedRevisionIsAnError(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	client := etcd.Client()
	s := newEtcdStore(client, "/x")
	var last int64
	for i := range 5 {
		put, err := client.Put(t.Context(), "/y", strconv.Itoa(i))
		require.NoError(t, err)
		last = put.Header.Revision
	}
	_, err := client.Compact(t.Context(), last)
	require.NoError(t, err)
	require.ErrorContains(t, s.waitDeleted(t.Context(), "/y", last-2), "compacted")

	_, err = client.Delete(t.Context(), "/y")
	require.NoError(t, err)
	require.NoError(t, s.waitDeleted(t.Context(), "/y", last+1), "an earlier deletion counts")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.waitDeleted(ended, "/y", last+1), context.Canceled)
}

func TestRenewalsSurviveABrokenStream(t *testing.T) {
	t.Parallel()
	etcd := testenv.Etcd(t, 1)
	proxy, client := cutOff(t, etcd)
	s := newEtcdStore(client, "/x")
	id, _, err := s.grant(t.Context(), time.Minute)
	require.NoError(t, err)
	_, err = s.renew(t.Context(), id)
	require.NoError(t, err)
	require.NotNil(t, s.stream, "the stream is kept for the next renewal")
	proxy.Reset()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		_, err := s.renew(t.Context(), id)
		require.NoError(c, err)
	}, patience, 10*time.Millisecond)

	require.NoError(t, proxy.Stall(faultproxy.ToClient))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = s.renew(ctx, id)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Nil(t, s.stream, "the stream whose reply is late is dropped")
	require.NoError(t, proxy.Heal())
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		ttl, err := s.renew(t.Context(), id)
		require.NoError(c, err)
		require.Equal(c, time.Minute, ttl)
	}, patience, 10*time.Millisecond)
	require.NoError(t, s.revoke(t.Context(), id))
}

func dial(t *testing.T, cfg etcdconn.Options) *clientv3.Client {
	t.Helper()
	client, err := etcdconn.Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := client.Close(); err != nil && !errors.Is(err, context.Canceled) {
			require.NoError(t, err)
		}
	})
	return client
}
