package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/config"
	"github.com/tokenrefill/refiller/internal/operate/admin"
	"github.com/tokenrefill/refiller/internal/operate/doctor"
	"github.com/tokenrefill/refiller/internal/operate/drift"
	"github.com/tokenrefill/refiller/internal/replica"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/limit"
	"github.com/tokenrefill/refiller/limit/lazy"
	"github.com/tokenrefill/refiller/limit/pacing"
	"github.com/tokenrefill/refiller/limit/schedule"
	"github.com/tokenrefill/refiller/limit/window"
	"github.com/tokenrefill/refiller/lua"
	"github.com/tokenrefill/refiller/override"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/refill"
)

// shop is a deployment that shares a Redis with other programs. So its names begin with a prefix.
type shop struct {
	t      *testing.T
	server *testenv.RedisServer
	admin  *redis.Client
	cfg    config.Config
	names  doctor.Names
}

func openShop(t *testing.T) *shop {
	t.Helper()
	server := testenv.Redis(t)
	text := fmt.Sprintf(`
redis: {url: %q, username: app, password_file: testdata/password}
listen: 127.0.0.1:0
version: 2
election: {prefix: /shop}
refill_interval: 20ms
buckets:
  - {key: "shop:checkout", capacity: 1000, rate: 500/s}
  - {key: "shop:late fees", capacity: 1000, rate: 500/s}
  - {key: "shop:held", capacity: 100, rate: 1/s, strict: true}
templates:
  - {prefix: "shop:user:", capacity: 10, rate: 1/s, enforce: lazy}
  - {prefix: "shop:tenant:", capacity: 10, rate: 5/s, max_keys: 10}
`, server.URL())
	cfg, err := config.Load(config.Source{Data: []byte(text)})
	require.NoError(t, err)
	s := &shop{t: t, server: server, admin: server.Client(), cfg: cfg, names: doctor.NamesOf(cfg, false)}
	s.names.Buckets = append(s.names.Buckets, "shop:pool")
	return s
}

// empty resets the server to its state after a start.
func (s *shop) empty() {
	s.t.Helper()
	require.NoError(s.t, s.admin.FlushAll(s.t.Context()).Err())
	require.NoError(s.t, s.admin.ScriptFlush(s.t.Context()).Err())
	require.NoError(s.t, s.admin.ACLLogReset(s.t.Context()).Err())
}

// user makes a user with the rights and returns its client.
func user(t *testing.T, server *testenv.RedisServer, rights doctor.Rights) *redis.Client {
	t.Helper()
	args := []any{"acl", "setuser", "app", "reset", ">secret"}
	for word := range strings.FieldsSeq(strings.TrimPrefix(rights.ACL("app"), "user app")) {
		args = append(args, word)
	}
	require.NoError(t, server.Client().Do(t.Context(), args...).Err())
	o := server.ClientOptions()
	o.Username, o.Password = "app", "secret"
	c := redis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// denied returns the commands and keys that Redis has refused.
func denied(t *testing.T, admin *redis.Client) []string {
	t.Helper()
	entries, err := admin.ACLLog(t.Context(), 100).Result()
	require.NoError(t, err)
	var list []string
	for _, e := range entries {
		// The client library sends its name and version. If Redis refuses this, the library works nevertheless.
		if object := strings.ToLower(e.Object); !slices.Contains([]string{"client|setinfo", "client"}, object) {
			list = append(list, object)
		}
	}
	return list
}

// await waits until happened returns true, which may never be the case if a right is missing. It returns an error when
// Redis has refused something or patience has passed.
func (s *shop) await(what string, happened func() bool) error {
	for began := time.Now(); !happened(); time.Sleep(time.Millisecond) {
		if len(denied(s.t, s.admin)) > 0 || time.Since(began) > patience {
			return errors.New(what + " did not happen")
		}
	}
	return nil
}

// refillers makes the calls of replicas and operators.
func (s *shop) refillers(rdb *redis.Client) error {
	ctx := s.t.Context()
	for _, step := range []func(context.Context, *redis.Client) error{
		s.replica, s.elected, s.operators, s.pool, s.moved, s.rehearsed(doctor.Refiller),
	} {
		err := step(ctx, rdb)
		if err != nil || len(denied(s.t, s.admin)) > 0 {
			return err
		}
	}
	return nil
}

// rehearsed returns a function that runs the doctor's rehearsal of a role.
func (s *shop) rehearsed(role doctor.Role) func(context.Context, *redis.Client) error {
	return func(ctx context.Context, rdb *redis.Client) error { return doctor.Rehearse(ctx, rdb, role) }
}

// replica runs a replica until it has refilled, published, swept and listed itself.
func (s *shop) replica(ctx context.Context, _ *redis.Client) error {
	r, err := replica.New(s.cfg, replica.Options{Identity: "a", Logger: hclog.NewNullLogger()})
	require.NoError(s.t, err)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	err = s.watch(ctx, r)
	cancel()
	return errors.Join(err, <-done)
}

// watch waits until a replica has done everything.
func (s *shop) watch(ctx context.Context, r *replica.Replica) error {
	taken := func() error {
		c, err := fetch.New(s.admin, fetch.WithTimeout(time.Minute))
		require.NoError(s.t, err)
		defer func() { _ = c.Close(ctx) }()
		_, e1 := c.Take(ctx, "shop:tenant:1", 5)
		_, e2 := lua.Reserve(ctx, s.admin, "shop:checkout", lua.ReserveCall{ID: "r", N: 1, TTL: policy.MinHold})
		return errors.Join(e1, e2)
	}
	status := func() admin.Status { return r.Status(ctx, admin.Query{Limit: 10}) }
	e1 := s.await("a refill and the list", func() bool {
		st := status()
		published, _, err := lua.ReadTemplates(ctx, s.admin, "")
		_, missing := lua.Peek(ctx, s.admin, "shop:checkout", 1)
		return errors.Join(err, missing) == nil && published != nil && st.Calls["applied"] >= 3 && len(st.Replicas) == 1
	})
	if e1 != nil {
		return e1
	}
	e2 := taken()
	e3 := s.await("the end of a reservation and a template's refill", func() bool {
		st := status()
		p, err := lua.Peek(ctx, s.admin, "shop:checkout", 1)
		return err == nil && p.Outstanding == 0 && len(st.Templates) == 1 && st.Templates[0].Refills > 0
	})
	return errors.Join(e2, e3)
}

// elected runs a replica with an election: as a standby, as the leader, and as a standby again.
func (s *shop) elected(ctx context.Context, rdb *redis.Client) error {
	r, err := refill.New(refill.Config{Redis: rdb, Elected: true, Pulse: "refiller:pulse:/shop", Version: s.cfg.Version,
		Interval: 10 * time.Millisecond, Logger: hclog.NewNullLogger(),
		Buckets: []refill.Bucket{{Key: s.cfg.Buckets[0].Key, Policy: s.cfg.Buckets[0].Policy}}})
	require.NoError(s.t, err)
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	term, resign := context.WithCancel(ctx)
	led := make(chan error, 1)
	go func() { led <- r.Lead(term, 1) }()
	err = s.await("a pulse", func() bool { return len(s.admin.Keys(ctx, "{refiller:pulse:/shop*}:ctl").Val()) > 0 })
	resign()
	if end := <-led; !errors.Is(end, context.Canceled) {
		err = errors.Join(err, end)
	}
	cancel()
	return errors.Join(err, <-done)
}

// operators makes the calls of the operators' commands.
func (s *shop) operators(ctx context.Context, rdb *redis.Client) error {
	_, e1 := lua.Reset(ctx, rdb, "shop:checkout", 10)
	_, e2 := lua.Grant(ctx, rdb, "shop:checkout", 5)
	_, e3 := lua.Peek(ctx, rdb, "shop:checkout", 1)
	overrides := override.New(rdb)
	var all []error
	for _, key := range []string{"shop:tenant:1", "shop:user:1"} {
		_, e4 := overrides.Set(ctx, key, policy.Override{Capacity: 20})
		_, e5 := overrides.Get(ctx, key)
		for _, err := range overrides.All(ctx) {
			e5 = errors.Join(e5, err)
		}
		_, e6 := overrides.Unset(ctx, key)
		all = append(all, e4, e5, e6)
	}
	e7 := lua.Tickets(ctx, rdb, []string{"shop:checkout"})[0].Err
	return errors.Join(append(all, e1, e2, e3, e7)...)
}

// pool refills a bucket of a pool.
func (s *shop) pool(ctx context.Context, rdb *redis.Client) error {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: time.Millisecond,
		Initial: new(int64)}.Terms(policy.Fence{Epoch: 1})
	terms.Pool = true
	terms.GrantTokens, terms.GrantEnd = terms.Tokens, time.Now().Add(time.Hour).UnixMicro()
	o, err := lua.Refill(ctx, rdb, "shop:pool", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	late := s.await("a pool's refill", func() bool {
		if err == nil {
			o, err = lua.Refill(ctx, rdb, "shop:pool", policy.Call{Version: o.Version, Terms: &terms})
		}
		return err != nil || o.Added > 0
	})
	return errors.Join(err, late)
}

// moved moves names between templates, and makes a template's bucket a configured one.
func (s *shop) moved(ctx context.Context, rdb *redis.Client) error {
	shard := lua.Shard{Prefix: "shop:tenant:", Number: lua.ActiveShard("shop:tenant:2")}
	e1 := shard.Add(ctx, rdb, []string{"shop:tenant:2"})
	e2 := shard.Move(ctx, rdb, "shop:tenant:2", []string{"shop:tenant:2"})
	e3 := shard.Remove(ctx, rdb, []string{"shop:tenant:2"})
	_, e4 := lua.Occupied(ctx, rdb, []lua.Shard{shard})
	e5 := lua.Counts(ctx, rdb, []lua.Shard{shard})[0].Err
	ten := policy.Policy{Capacity: 10, Rate: policy.PerSecond(1), Interval: time.Second}
	configured := ten.Terms(policy.Fence{Epoch: 3})
	_, e6 := lua.Refill(ctx, rdb, "shop:tenant:1", policy.Call{Terms: &configured})
	return errors.Join(e1, e2, e3, e4, e5, e6)
}

// stock creates the data that consumers need: buckets, including one that is overdue, and published templates.
func (s *shop) stock() {
	s.t.Helper()
	ctx := s.t.Context()
	pooled := config.Bucket{Key: "shop:pool", Policy: s.cfg.Buckets[0].Policy}
	for _, b := range append(slices.Clone(s.cfg.Buckets), pooled) {
		p := b.Policy
		p.Interval = time.Millisecond
		terms := p.Terms(policy.Fence{Epoch: 2})
		_, err := lua.Refill(ctx, s.admin, b.Key, policy.Call{Create: policy.CreateInitial, Terms: &terms})
		require.NoError(s.t, err)
	}
	for key, tokens := range map[string]int64{"shop:checkout": 500, "shop:held": 100} {
		_, err := lua.Reset(ctx, s.admin, key, tokens)
		require.NoError(s.t, err)
	}
	_, err := lua.PublishTemplates(ctx, s.admin, s.cfg.Templates)
	require.NoError(s.t, err)
}

// consumers makes the calls of consumers.
func (s *shop) consumers(rdb *redis.Client) error {
	s.stock()
	ctx := s.t.Context()
	c, err := fetch.New(rdb, fetch.WithTimeout(time.Minute), fetch.WithLease(10, time.Minute))
	require.NoError(s.t, err)
	const key = "shop:checkout"
	e1 := c.Ready(ctx)
	taken, e2 := c.Take(ctx, key, 1)
	_, e3 := c.TakeUpTo(ctx, key, 5)
	_, e4 := c.Take(ctx, key, 1000)
	_, e5 := c.Peek(ctx, key)
	e6 := errors.Join(c.Return(ctx, key, 1), c.Undo(ctx, key, taken))
	_, e7 := c.Take(ctx, key, 1, fetch.WithRequestID("request"))
	both := []fetch.Request{{Key: key, N: 1}, {Key: "shop:held", N: 1}}
	all, e8 := c.TakeAll(ctx, both)
	e9 := c.UndoAll(ctx, all)
	_, e10 := c.TakeAll(ctx, both, fetch.WithRequestID("all"))
	_, e11 := c.Wait(ctx, "shop:pool", 1, fetch.WithLeave(1))
	_, e12 := lua.Heartbeat(ctx, rdb, key, "consumer", time.Minute)
	e13 := s.templates(ctx, c)
	e14 := s.holding(ctx, c, rdb)
	e15 := s.rescued(ctx, c)
	e16 := c.Close(ctx)
	e17 := doctor.Rehearse(ctx, rdb, doctor.Consumer)
	return errors.Join(e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17)
}

// templates takes more tokens from buckets of templates than there are, and returns tokens. It also makes calls that a
// lazy bucket doesn't support. These must fail for that reason, and not because a right is missing.
func (s *shop) templates(ctx context.Context, c *fetch.Client) error {
	_, e1 := c.Take(ctx, "shop:user:2", 1, fetch.WithRequestID("lazy"))
	_, e2 := c.TakeAll(ctx, []fetch.Request{{Key: "shop:user:2", N: 1}, {Key: "shop:tenant:2", N: 1}})
	_, e3 := c.Reserve(ctx, "shop:user:2", 1, time.Minute)
	var all []error
	for _, err := range []error{e1, e2, e3} {
		if redis.HasErrorPrefix(err, "NOPERM") {
			all = append(all, err)
		}
	}
	for _, key := range []string{"shop:user:1", "shop:tenant:1"} {
		for range 2 {
			_, err := c.Take(ctx, key, 6)
			all = append(all, err)
		}
		_, err := c.Peek(ctx, key)
		all = append(all, err, c.Return(ctx, key, 10))
	}
	return errors.Join(all...)
}

// holding reserves and leases tokens, settles, cancels, and lets a reservation's time pass.
func (s *shop) holding(ctx context.Context, c *fetch.Client, rdb *redis.Client) error {
	first, e1 := c.Reserve(ctx, "shop:held", 5, time.Minute)
	second, e2 := c.Reserve(ctx, "shop:held", 5, time.Minute)
	if err := errors.Join(e1, e2); err != nil {
		return err
	}
	_, e3 := first.Settle(ctx, 2)
	e4 := second.Cancel(ctx)
	_, e5 := lua.Reserve(ctx, rdb, "shop:held", lua.ReserveCall{ID: "r", N: 1, TTL: policy.MinHold})
	began := s.admin.Time(ctx).Val()
	late := s.await("a millisecond", func() bool { return s.admin.Time(ctx).Val().Sub(began) > 2*time.Millisecond })
	_, e8 := c.Reserve(ctx, "shop:held", 1, time.Minute) // this ends the reservation whose time is over
	_, e6 := lua.Lease(ctx, rdb, "shop:held", lua.LeaseCall{ID: "block", Seq: 1, Want: 10, TTL: time.Minute})
	_, e7 := lua.Lease(ctx, rdb, "shop:held", lua.LeaseCall{ID: "block", Seq: 2, Back: 10, TTL: time.Minute})
	return errors.Join(e3, e4, e5, e6, e7, e8, late)
}

// rescued takes from a bucket that no refiller refills.
func (s *shop) rescued(ctx context.Context, c *fetch.Client) error {
	var err error
	late := s.await("a rescue", func() bool {
		var r fetch.Result
		r, err = c.Take(ctx, "shop:late fees", 1)
		return err != nil || r.OK && r.Source.Kind == fetch.SourceRescued
	})
	return errors.Join(err, late)
}

// limited takes twice from each limiter that needs no refiller, so that the second take is denied. Then it removes the
// limiters' keys.
func limited(ctx context.Context, rdb *redis.Client) error {
	const key = "shop:checkout"
	l, e1 := lazy.New(rdb, lazy.Config{Capacity: 1, Rate: policy.PerSecond(1)})
	w, e2 := window.New(rdb, window.Config{Limit: 1, Window: time.Hour})
	p, e3 := pacing.New(rdb, pacing.Config{Rate: policy.PerSecond(1)})
	s, e4 := schedule.New(rdb, schedule.Config{Windows: []schedule.Window{{Name: "hour", Limit: 1, Length: time.Hour}}})
	if err := errors.Join(e1, e2, e3, e4); err != nil {
		return err
	}
	var all []error
	for range 2 {
		_, e1 := l.Take(ctx, key, 1)
		_, e2 := w.Take(ctx, key, 1)
		_, e3 := p.Take(ctx, key, 1)
		_, e4 := s.Take(ctx, key, 1)
		_, e5 := s.List(ctx, key, time.Now(), time.Now().Add(time.Hour), 10)
		all = append(all, e1, e2, e3, e4, e5)
	}
	r, err := s.Reserve(ctx, key, "again", time.Now().Add(2*time.Hour))
	_, e6 := s.Cancel(ctx, key, "again")
	if err == nil && !r.OK {
		err = errors.New("the schedule denied an instant in two hours")
	}
	_, e7 := limit.Reset(ctx, rdb, key)
	return errors.Join(append(all, err, e6, e7)...)
}

// does makes all the calls of a role, up to the first call that is refused.
func (s *shop) does(role doctor.Role, rdb *redis.Client) error {
	if role == doctor.Refiller {
		return s.refillers(rdb)
	}
	return s.consumers(rdb)
}

var roles = []doctor.Role{doctor.Refiller, doctor.Consumer}

func TestEverythingWorksWithExactlyThePrintedRights(t *testing.T) {
	for _, role := range roles {
		t.Run(string(role), func(t *testing.T) {
			s := openShop(t)
			rdb := user(t, s.server, doctor.RightsOf(role, s.names))
			require.NoError(t, s.does(role, rdb), "refused: %v", denied(t, s.admin))
			require.Empty(t, denied(t, s.admin))

			findings := doctor.Redis(t.Context(), rdb, role, s.names)
			findings = append(findings, doctor.Buckets(t.Context(), rdb, s.names.Buckets))
			for _, f := range findings {
				require.NotEqual(t, doctor.Failure, f.Level, "%+v", f)
			}
			require.Equal(t, doctor.Unknown, find(t, findings, "eviction").Level, "the rights do not include INFO")
		})
	}
}

// A diff also searches buckets that are not in the file. The right for this shows every name in the database, so
// refillers don't have it. Without the right, the diff has a remark instead.
func TestADiffWorksWithTheRightsOfRefillers(t *testing.T) {
	s := openShop(t)
	report, err := drift.Read(t.Context(), s.cfg, user(t, s.server, doctor.RightsOf(doctor.Refiller, s.names)), nil)
	require.NoError(t, err)
	require.Len(t, report.Changes, 5, "%+v", report)
	require.Len(t, report.Notes, 1)
	require.Contains(t, report.Notes[0], "may not SCAN")
}

func TestNoneOfThePrintedRightsIsTooMany(t *testing.T) {
	for _, role := range roles {
		t.Run(string(role), func(t *testing.T) {
			s := openShop(t)
			rights := doctor.RightsOf(role, s.names)
			for i, command := range rights.Commands {
				s.empty()
				fewer := doctor.Rights{Keys: rights.Keys, Commands: slices.Delete(slices.Clone(rights.Commands), i, i+1)}
				_ = s.does(role, user(t, s.server, fewer)) // the error doesn't matter, because the log has the command
				require.NotEmpty(t, denied(t, s.admin), "no call needs %s", command)
			}
			for i, key := range rights.Keys {
				s.empty()
				fewer := doctor.Rights{Keys: slices.Delete(slices.Clone(rights.Keys), i, i+1), Commands: rights.Commands}
				_ = s.does(role, user(t, s.server, fewer))
				require.NotEmpty(t, denied(t, s.admin), "no call needs %s", key)
			}
		})
	}
}

// The doctor finds each right that is missing.
func TestTheDoctorFindsEachMissingRight(t *testing.T) {
	for _, role := range roles {
		s := openShop(t)
		rights := doctor.RightsOf(role, s.names)
		var missed []string
		for i, command := range rights.Commands {
			s.empty()
			fewer := doctor.Rights{Keys: rights.Keys, Commands: slices.Delete(slices.Clone(rights.Commands), i, i+1)}
			if doctor.Rehearse(t.Context(), user(t, s.server, fewer), role) == nil {
				missed = append(missed, command)
			}
		}
		require.Empty(t, missed, role)
	}
}

func TestLimitersNeedTheFurtherRightsAndNoOthers(t *testing.T) {
	s := openShop(t)
	rights := doctor.RightsOf(doctor.Consumer, s.names)
	further := doctor.LimiterCommands()
	rights.Commands = append(rights.Commands, further...)
	require.NoError(t, limited(t.Context(), user(t, s.server, rights)))
	require.Empty(t, denied(t, s.admin))
	for _, command := range further {
		s.empty()
		fewer := doctor.Rights{Keys: rights.Keys, Commands: slices.DeleteFunc(slices.Clone(rights.Commands),
			func(c string) bool { return c == command })}
		_ = limited(t.Context(), user(t, s.server, fewer))
		require.NotEmpty(t, denied(t, s.admin), "no call needs %s", command)
	}
}

// A pattern matches only its name, even if the name has special characters.
func TestPatternsOfNamesMatchNothingElse(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rights := doctor.RightsOf(doctor.Consumer, doctor.Names{Buckets: []string{`a*b`, `c?d`, `e[f]g`, `h\i`, `j k"l`}})
	rdb := user(t, server, rights)
	for _, allowed := range []string{`a*b`, `c?d`, `e[f]g`, `h\i`, `j k"l`, `{a*b}`, `{h\i}:ctl`, `{j k"l}:req:1`} {
		require.NotContains(t, fmt.Sprint(rdb.Get(t.Context(), allowed).Err()), "NOPERM", allowed)
	}
	others := []string{`axb`, `cxd`, `efg`, `hi`, `{axb}`, `a*bc`, `{a*bc}`, `{refiller:templates}:overrides`}
	for _, other := range others {
		require.ErrorContains(t, rdb.Get(t.Context(), other).Err(), "NOPERM", other)
	}
}
