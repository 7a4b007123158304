package doctor_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/operate/doctor"
	"github.com/tokenrefill/refiller/internal/operate/membership"
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

// user makes a user with the rights and returns its client.
func user(t *testing.T, server *testenv.RedisServer, rights string) *redis.Client {
	t.Helper()
	args := []any{"acl", "setuser", "refiller", "reset", ">secret"}
	for word := range strings.FieldsSeq(strings.TrimPrefix(rights, "user refiller")) {
		args = append(args, word)
	}
	require.NoError(t, server.Client().Do(t.Context(), args...).Err())
	o := server.ClientOptions()
	o.Username, o.Password = "refiller", "secret"
	c := redis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// denied are the commands that Redis has refused to anybody.
func denied(t *testing.T, admin *redis.Client) []string {
	t.Helper()
	entries, err := admin.ACLLog(t.Context(), 100).Result()
	require.NoError(t, err)
	var list []string
	for _, e := range entries {
		// The client library introduces itself, and does without if it may not.
		if object := strings.ToLower(e.Object); object != "client|setinfo" && object != "client" {
			list = append(list, object)
		}
	}
	return list
}

// patience is how long a test waits for what must happen; the machine may be busy.
const patience = 20 * time.Second

// everything does what refillers, operators and consumers do. What it waits for may not happen if a right is missing:
// then it waits until Redis has refused something.
func everything(t *testing.T, rdb, admin *redis.Client) error {
	t.Helper()
	var late error
	await := func(happened func() bool) {
		for began := time.Now(); !happened(); time.Sleep(time.Millisecond) {
			if len(denied(t, admin)) > 0 || time.Since(began) > patience {
				late = errors.New("what was waited for did not happen")
				return
			}
		}
	}
	key := "checkout"
	p := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: 20 * time.Millisecond}
	r, err := refill.New(refill.Config{Redis: rdb, Buckets: []refill.Bucket{{Key: key, Policy: p}},
		Logger: hclog.NewNullLogger()})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-done)
	}()
	await(func() bool { return r.Stats().Calls[policy.StatusApplied] >= 3 })
	_, e1 := lua.Reset(ctx, rdb, key, 10)
	_, e2 := lua.Grant(ctx, rdb, key, 5)
	perUser := policy.Template{Prefix: "user:", Enforce: policy.EnforceLazy,
		Policy: policy.Policy{Capacity: 10, Rate: policy.PerSecond(1)}}
	c, err := fetch.New(rdb, fetch.WithTimeout(time.Minute), fetch.WithTemplates(perUser))
	require.NoError(t, err)
	defer func() { _ = c.Close(ctx) }()
	_, e3 := c.Take(ctx, key, 1)
	_, e4 := c.TakeUpTo(ctx, key, 5)
	_, e5 := c.Take(ctx, key, 1000)
	_, e6 := c.Peek(ctx, key)
	e7 := c.Return(ctx, key, 1)
	if _, err := c.Take(ctx, "nobody", 1); !errors.Is(err, fetch.ErrUnknownBucket) {
		return err
	}
	// A client that knows the two keys alone, and one that comes too late.
	_, e8 := lua.Add(ctx, rdb, "foreign", 1, 10, 0)
	_, e9 := lua.Add(ctx, rdb, "foreign", 1, 10, 0)
	_, e10 := c.Take(ctx, key, 1, fetch.WithRequestID("request"))
	_, e11 := c.TakeAll(ctx, []fetch.Request{{Key: key, N: 1}})
	_, e12 := lua.Live(ctx, rdb, key, "consumer", time.Minute)
	_, e13 := c.Take(ctx, "user:1", 1)
	_, e14 := c.Take(ctx, "user:1", 1)
	e15 := holding(ctx, c, rdb, await)
	e16 := ofATemplate(ctx, rdb)
	e17 := rdb.Ping(ctx).Err()
	e18 := pooled(ctx, rdb, await)
	e19 := listed(ctx, rdb, await)
	e20 := limited(ctx, rdb)
	return errors.Join(e1, e2, e3, e4, e5, e6, e7, e8, e9, e10, e11, e12, e13, e14, e15, e16, e17, e18, e19, e20, late)
}

// limited asks each limiter that needs no refiller twice, which denies the second, and drops what they keep.
func limited(ctx context.Context, rdb *redis.Client) error {
	l, e1 := lazy.New(rdb, lazy.Config{Capacity: 1, Rate: policy.PerSecond(1)})
	w, e2 := window.New(rdb, window.Config{Limit: 1, Window: time.Hour})
	p, e3 := pacing.New(rdb, pacing.Config{Rate: policy.PerSecond(1)})
	s, e4 := schedule.New(rdb, schedule.Config{Windows: []schedule.Window{{Name: "hour", Limit: 1, Length: time.Hour}}})
	if err := errors.Join(e1, e2, e3, e4); err != nil {
		return err
	}
	var all []error
	for range 2 {
		_, e1 := l.Take(ctx, "limited", 1)
		_, e2 := w.Take(ctx, "limited", 1)
		_, e3 := p.Take(ctx, "limited", 1)
		_, e4 := s.Take(ctx, "limited", 1)
		_, e5 := s.List(ctx, "limited", time.Now(), time.Now().Add(time.Hour), 10)
		all = append(all, e1, e2, e3, e4, e5)
	}
	r, err := s.Reserve(ctx, "limited", "again", time.Now().Add(2*time.Hour))
	_, e6 := s.Cancel(ctx, "limited", "again")
	if err == nil && !r.OK {
		err = errors.New("in two hours there is room")
	}
	_, e7 := limit.Reset(ctx, rdb, "limited")
	return errors.Join(append(all, err, e6, e7)...)
}

// ofATemplate publishes a template, takes from a bucket of it, and gives one of its keys a limit of its own.
func ofATemplate(ctx context.Context, rdb *redis.Client) error {
	set, e1 := policy.NewTemplates(1, []policy.Template{{Prefix: "tenant:", Policy: policy.Policy{
		Capacity: 10, Rate: policy.PerSecond(1), Interval: time.Second,
	}}}, nil)
	_, e2 := lua.PublishTemplates(ctx, rdb, set)
	c, e3 := fetch.New(rdb, fetch.WithTimeout(time.Minute))
	if err := errors.Join(e1, e3); err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	_, e4 := c.Take(ctx, "tenant:1", 1)
	shard := lua.Shard{Prefix: "tenant:", Number: lua.ActiveShard("tenant:1")}
	_, e7 := lua.Occupied(ctx, rdb, []lua.Shard{shard})
	e8 := lua.Counts(ctx, rdb, []lua.Shard{shard})[0].Err
	overrides := override.New(rdb)
	_, e5 := overrides.Set(ctx, "tenant:1", policy.Override{Capacity: 20})
	for _, err := range overrides.All(ctx) {
		e5 = errors.Join(e5, err)
	}
	_, e6 := overrides.Unset(ctx, "tenant:1")
	configured := policy.Policy{Capacity: 10, Rate: policy.PerSecond(1),
		Interval: time.Second}.Terms(policy.Fence{Epoch: 2})
	_, e9 := lua.Refill(ctx, rdb, "tenant:1", policy.Call{Terms: &configured})
	return errors.Join(e2, e4, e5, e6, e7, e8, e9)
}

// holding reserves and leases tokens of a bucket that there is, and lets a
// reservation's time pass.
func holding(ctx context.Context, c *fetch.Client, rdb *redis.Client, await func(func() bool)) error {
	p := policy.Policy{Capacity: 100, Rate: policy.PerSecond(1), Strict: true}
	terms := p.Terms(policy.Fence{})
	_, e1 := lua.Refill(ctx, rdb, "held", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	_, e2 := c.Reserve(ctx, "held", 1, time.Millisecond)
	var s lua.SweepResult
	await(func() bool {
		s = lua.Sweep(ctx, rdb, []string{"held"}, 1)[0]
		return s.Returned > 0
	})
	_, e3 := lua.Lease(ctx, rdb, "held", lua.LeaseCall{ID: "block", Seq: 1, Want: 10, TTL: time.Minute})
	_, e4 := lua.Lease(ctx, rdb, "held", lua.LeaseCall{ID: "block", Seq: 2, Back: 10, TTL: time.Minute})
	return errors.Join(e1, e2, s.Err, e3, e4)
}

// pooled refills a bucket of a pool.
func pooled(ctx context.Context, rdb *redis.Client, await func(func() bool)) error {
	terms := policy.Policy{Capacity: 1000, Rate: policy.PerSecond(500), Interval: time.Millisecond,
		Initial: new(int64)}.Terms(policy.Fence{Epoch: 1})
	terms.Pool = true
	terms.GrantTokens, terms.GrantEnd = terms.Tokens, time.Now().Add(time.Hour).UnixMicro()
	o, err := lua.Refill(ctx, rdb, "pooled", policy.Call{Create: policy.CreateInitial, Terms: &terms})
	await(func() bool {
		if err == nil {
			o, err = lua.Refill(ctx, rdb, "pooled", policy.Call{Version: o.Version, Terms: &terms})
		}
		return err != nil || o.Added > 0
	})
	return err
}

// listed has a replica write itself into the list, and leave it.
func listed(ctx context.Context, rdb *redis.Client, await func(func() bool)) error {
	ctx, cancel := context.WithCancel(ctx)
	r := membership.New(rdb, "refiller:replicas:/refiller",
		func() membership.Entry { return membership.Entry{Identity: "a"} })
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	var err error
	await(func() bool {
		_, err = r.Replicas()
		return err == nil
	})
	cancel()
	<-done
	return err
}

func TestEverythingWorksWithExactlyThePrintedRights(t *testing.T) {
	server := testenv.Redis(t)
	rdb, admin := user(t, server, doctor.ACL("refiller", false)), server.Client()
	require.NoError(t, everything(t, rdb, admin))
	require.Empty(t, denied(t, admin))

	findings := doctor.Redis(t.Context(), rdb)
	for _, f := range findings {
		require.NotEqual(t, doctor.Failure, f.Level, "%+v", f)
	}
	require.Equal(t, doctor.Unknown, find(t, findings, "eviction").Level, "INFO is not among them")
}

func TestNoneOfThePrintedRightsIsTooMany(t *testing.T) {
	server := testenv.Redis(t)
	admin := server.Client()
	for _, command := range doctor.Commands() {
		require.NoError(t, admin.FlushAll(t.Context()).Err())
		require.NoError(t, admin.ScriptFlush(t.Context()).Err())
		rdb := user(t, server, doctor.ACL("refiller", false)+" -"+command)
		require.NoError(t, admin.ACLLogReset(t.Context()).Err())
		_ = everything(t, rdb, admin) // fails in some way or other; the log tells which command
		require.NotEmpty(t, denied(t, admin), "nothing needs %s", command)
	}
}

func find(t *testing.T, findings []doctor.Finding, check string) doctor.Finding {
	t.Helper()
	i := slices.IndexFunc(findings, func(f doctor.Finding) bool { return f.Check == check })
	require.GreaterOrEqual(t, i, 0, "%s in %+v", check, findings)
	return findings[i]
}

func TestTheDoctorFindsWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		args         []string
		check        string
		level        doctor.Level
		detail, tell string
	}{
		"healthy": {[]string{"--appendonly", "yes"}, "what a failure forgets", doctor.OK, "append-only file on", ""},
		"forgets": {nil, "what a failure forgets", doctor.Warning, "append-only file off", "appendonly yes"},
		"evicts": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"}, "eviction", doctor.Failure,
			"allkeys-lru", "noeviction"},
		"expires": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-ttl"}, "eviction", doctor.Warning,
			"volatile-ttl", "buckets of templates"},
		"keeps": {[]string{"--maxmemory", "100mb", "--maxmemory-policy", "noeviction"}, "eviction", doctor.OK,
			"noeviction", ""},
		"version": {nil, "version", doctor.OK, "INCREX", ""},
		"clock":   {nil, "clock", doctor.OK, "from this machine's", ""},
		"scripts": {nil, "scripts and rights", doctor.OK, "", ""},
		"read-only": {[]string{"--replicaof", "127.0.0.1 1"}, "what a failure forgets", doctor.Failure, "is a replica",
			"primary"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t, testenv.WithArgs(c.args...)).Client()
			f := find(t, doctor.Redis(t.Context(), rdb), c.check)
			require.Equal(t, c.level, f.Level, "%+v", f)
			require.Contains(t, f.Detail, c.detail)
			require.Contains(t, f.Advice, c.tell)
			require.Zero(t, rdb.DBSize(t.Context()).Val(), "nothing remains")
		})
	}
}

func TestTheDoctorTellsWhichRightsAreMissing(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	rdb := user(t, server, "user refiller on ~* -@all +ping +time")
	f := find(t, doctor.Redis(t.Context(), rdb), "scripts and rights")
	require.Equal(t, doctor.Failure, f.Level)
	require.Contains(t, f.Advice, "+evalsha")
}

// Whichever of the rights is missing, the doctor finds it.
func TestTheDoctorFindsEachMissingRight(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	admin := server.Client()
	var missed []string
	for _, command := range doctor.Commands() {
		require.NoError(t, admin.FlushAll(t.Context()).Err())
		require.NoError(t, admin.ScriptFlush(t.Context()).Err())
		if doctor.Rehearse(t.Context(), user(t, server, doctor.ACL("refiller", false)+" -"+command)) == nil {
			missed = append(missed, command)
		}
	}
	require.Empty(t, missed)
}

func TestTheDoctorExaminesAClusterAndLeavesNothing(t *testing.T) {
	t.Parallel()
	rdb := testenv.Cluster(t).Client()
	for _, f := range doctor.Redis(t.Context(), rdb) {
		require.NotEqual(t, doctor.Failure, f.Level, "%+v", f)
	}
	require.Zero(t, rdb.DBSize(t.Context()).Val())
}

func TestTheDoctorWantsReplicasToHaveWritten(t *testing.T) {
	t.Parallel()
	primary := testenv.Redis(t)
	host, port, err := net.SplitHostPort(primary.Addr())
	require.NoError(t, err)
	testenv.Redis(t, testenv.WithArgs("--replicaof", host+" "+port))
	rdb := primary.Client()
	found := func() doctor.Finding { return find(t, doctor.Redis(t.Context(), rdb), "what a failure forgets") }
	require.Eventually(t, func() bool { return strings.HasPrefix(found().Detail, "1 replicas") }, 20*time.Second,
		50*time.Millisecond)
	require.Equal(t, doctor.Warning, found().Level)
	require.Contains(t, found().Advice, "min-replicas-to-write 1")
	require.NoError(t, rdb.ConfigSet(t.Context(), "min-replicas-to-write", "1").Err())
	require.Equal(t, doctor.OK, found().Level)
}

// A server that can't save refuses even PING. Its address and password are right.
func TestTheDoctorTellsAServerThatRefusesFromOneThatIsAway(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rdb := testenv.Redis(t, testenv.WithArgs("--dir", dir, "--save", "3600 1")).Client()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "dump.rdb"), 0o700)) // in the place of the file
	require.NoError(t, rdb.Set(t.Context(), "a", 1, 0).Err())
	require.NoError(t, rdb.BgSave(t.Context()).Err())
	require.Eventually(t, func() bool {
		return strings.Contains(rdb.Info(t.Context(), "persistence").Val(), "rdb_last_bgsave_status:err")
	}, patience, 10*time.Millisecond)
	f := find(t, doctor.Redis(t.Context(), rdb), "redis answers")
	require.Equal(t, doctor.Failure, f.Level)
	require.Contains(t, f.Detail, "MISCONF")
	require.Contains(t, f.Advice, "its log")
}

func TestTheDoctorSaysThatNothingAnswers(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1, DialerRetries: 1})
	defer rdb.Close()
	findings := doctor.Redis(t.Context(), rdb)
	require.Len(t, findings, 1)
	require.Equal(t, doctor.Failure, findings[0].Level)
	require.Contains(t, findings[0].Advice, "redis.url")
}
