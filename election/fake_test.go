package election

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/tokenrefill/refiller/internal/timing"
)

// fakeServer is an etcd in memory. It uses the clock of the test's synctest bubble.
type fakeServer struct {
	// fast is how much sooner than its TTL a lease ends, as if the server's clock ran fast.
	fast time.Duration
	// grantTTL, unless it is zero, is granted instead of the requested TTL.
	grantTTL time.Duration

	mu       sync.Mutex
	revision int64
	lastID   leaseID
	leases   map[leaseID]*fakeLease
	keys     map[string]fakeKey
	deleted  map[string]int64 // revision of the last deletion
	changed  chan struct{}    // closed upon the next deletion
}

type fakeLease struct {
	ttl     time.Duration
	expires time.Time
	timer   *time.Timer
}

type fakeKey struct {
	created  int64
	lease    leaseID
	identity string
}

func newFakeServer() *fakeServer {
	return &fakeServer{
		leases: map[leaseID]*fakeLease{}, keys: map[string]fakeKey{}, deleted: map[string]int64{},
		changed: make(chan struct{}),
	}
}

// live starts the lease's TTL anew. The caller holds s.mu.
func (s *fakeServer) live(id leaseID, l *fakeLease) {
	if l.timer != nil {
		l.timer.Stop()
	}
	l.expires = time.Now().Add(l.ttl)
	expires := l.expires
	l.timer = time.AfterFunc(l.ttl-s.fast, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.leases[id] == l && l.expires.Equal(expires) {
			s.dropLease(id)
		}
	})
}

// dropLease ends a lease and deletes its keys. The caller holds s.mu.
func (s *fakeServer) dropLease(id leaseID) {
	if l := s.leases[id]; l != nil {
		l.timer.Stop()
	}
	delete(s.leases, id)
	for name, key := range s.keys {
		if key.lease == id {
			s.dropKey(name)
		}
	}
}

// dropKey deletes a key. The caller holds s.mu.
func (s *fakeServer) dropKey(name string) {
	s.revision++
	delete(s.keys, name)
	s.deleted[name] = s.revision
	close(s.changed)
	s.changed = make(chan struct{})
}

// deleteKeyOf deletes the key of the identity, as an operator does.
func (s *fakeServer) deleteKeyOf(identity string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, key := range s.keys {
		if key.identity == identity {
			s.dropKey(name)
		}
	}
}

// revokeAll ends every lease. It returns the revision before that, so every key that it deletes has an epoch up to this
// revision.
func (s *fakeServer) revokeAll() (revision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	revision = s.revision
	for id := range s.leases {
		s.dropLease(id)
	}
	return revision
}

// keyOf returns the key of the identity and the end of its lease.
func (s *fakeServer) keyOf(identity string) (fakeKey, time.Time, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.keys {
		if key.identity == identity {
			return key, s.leases[key.lease].expires, true
		}
	}
	return fakeKey{}, time.Time{}, false
}

func (s *fakeServer) countLeases() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.leases)
}

// call describes how one request travels to the server, and its answer back.
type call struct {
	refused    error         // answer at once with this error
	there      time.Duration // travel time of the request
	back       time.Duration // travel time of the answer
	lostThere  bool          // the request never arrives
	lostBack   bool          // the answer never arrives
	deafReader bool          // waitDeleted never receives a deletion
}

// fakeStore is one candidate's connection to a fakeServer.
type fakeStore struct {
	*fakeServer
	name string

	mu    sync.Mutex
	plan  func(op string) call // decides about each request; nil: all succeed at once
	calls map[string]int
}

var _ store = (*fakeStore)(nil)

func (s *fakeServer) connect(name string) *fakeStore {
	return &fakeStore{fakeServer: s, name: name, calls: map[string]int{}}
}

func (f *fakeStore) setPlan(plan func(op string) call) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.plan = plan
}

func (f *fakeStore) count(op string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[op]
}

func (f *fakeStore) next(op string) call {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[op]++
	if f.plan == nil {
		return call{}
	}
	return f.plan(op)
}

var blackHole = func(string) call { return call{lostThere: true} }

// do carries one request to the server, and its answer back.
func (f *fakeStore) do(ctx context.Context, op string, serve func() error) error {
	c := f.next(op)
	if c.refused != nil {
		return c.refused
	}
	if c.lostThere {
		<-ctx.Done()
		return ctx.Err()
	}
	if c.there > 0 { // the request arrives even if its sender has given up
		arrived := make(chan error, 1)
		time.AfterFunc(c.there, func() { arrived <- f.serve(serve) })
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-arrived:
			return f.answer(ctx, c, err)
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return f.answer(ctx, c, f.serve(serve))
}

func (f *fakeStore) serve(serve func() error) error {
	f.fakeServer.mu.Lock()
	defer f.fakeServer.mu.Unlock()
	return serve()
}

func (f *fakeStore) answer(ctx context.Context, c call, err error) error {
	if c.lostBack {
		<-ctx.Done()
		return ctx.Err()
	}
	if c.back > 0 && !timing.Sleep(ctx.Done(), c.back) {
		return ctx.Err()
	}
	return err
}

func (f *fakeStore) grant(ctx context.Context, ttl time.Duration) (leaseID, time.Duration, error) {
	var id leaseID
	err := f.do(ctx, "grant", func() error {
		if f.grantTTL != 0 {
			ttl = f.grantTTL
		}
		f.lastID++
		id = f.lastID
		l := &fakeLease{ttl: ttl}
		f.leases[id] = l
		f.live(id, l)
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	return id, ttl, nil
}

func (f *fakeStore) renew(ctx context.Context, id leaseID) (time.Duration, error) {
	var ttl time.Duration
	err := f.do(ctx, "renew", func() error {
		l, ok := f.leases[id]
		if !ok {
			return errLeaseGone
		}
		f.live(id, l)
		ttl = l.ttl
		return nil
	})
	if err != nil {
		return 0, err
	}
	return ttl, nil
}

func (f *fakeStore) revoke(ctx context.Context, id leaseID) error {
	return f.do(ctx, "revoke", func() error {
		f.dropLease(id)
		return nil
	})
}

func (f *fakeStore) enrol(ctx context.Context, id leaseID, identity string) (string, int64, error) {
	name := fmt.Sprintf("key-%d", id)
	var epoch int64
	err := f.do(ctx, "enrol", func() error {
		if f.leases[id] == nil {
			return errLeaseGone
		}
		f.revision++
		epoch = f.revision
		f.keys[name] = fakeKey{created: f.revision, lease: id, identity: identity}
		return nil
	})
	if err != nil {
		return name, 0, err
	}
	return name, epoch, nil
}

func (f *fakeStore) ahead(ctx context.Context, key string, epoch int64) (string, int64, error) {
	var prev string // once the caller has given up, only the server may use prev and revision
	var revision int64
	err := f.do(ctx, "ahead", func() error {
		if f.keys[key].created != epoch {
			return errKeyGone
		}
		youngest := int64(0)
		for name, k := range f.keys {
			if k.created < epoch && k.created > youngest {
				prev, youngest = name, k.created
			}
		}
		revision = f.revision
		return nil
	})
	if err != nil {
		return "", 0, err
	}
	return prev, revision, nil
}

func (f *fakeStore) waitDeleted(ctx context.Context, key string, from int64) error {
	c := f.next("wait-deleted")
	if c.refused != nil {
		return c.refused
	}
	if c.lostThere || c.deafReader {
		<-ctx.Done()
		return ctx.Err()
	}
	for {
		f.fakeServer.mu.Lock()
		at, changed := f.deleted[key], f.changed
		f.fakeServer.mu.Unlock()
		if at >= from {
			if !timing.Sleep(ctx.Done(), c.back) {
				return ctx.Err()
			}
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

func (f *fakeStore) remove(ctx context.Context, key string, epoch int64) error {
	return f.do(ctx, "remove", func() error {
		if f.keys[key].created == epoch {
			f.dropKey(key)
		}
		return nil
	})
}

func (f *fakeStore) leader(ctx context.Context) (Leader, error) {
	var l Leader
	err := f.do(ctx, "leader", func() error {
		for _, k := range f.keys {
			if l.Epoch == 0 || k.created < l.Epoch {
				l = Leader{Identity: k.identity, Epoch: k.created}
			}
		}
		if l.Epoch == 0 {
			return ErrNoLeader
		}
		return nil
	})
	if err != nil {
		return Leader{}, err
	}
	return l, nil
}

var errRefused = errors.New("connection refused")
