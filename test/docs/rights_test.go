package docs

import (
	"context"
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tokenrefill/refiller/election"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/policy"
	"github.com/tokenrefill/refiller/pool"
)

// uses has, for each right that docs/pools.md prints, the operations for which its user needs the right.
var uses = map[string][]use{
	"eu read --prefix=true /refiller/pools/":                {reportTickets, readStatus},
	"eu write /refiller/pools/cfg":                          {reportTickets},
	"eu write /refiller/pools/rep/eu":                       {reportTickets},
	"eu write /refiller/pools/epoch":                        {coordinate},
	"eu write --prefix=true /refiller/pools/share/":         {coordinate},
	"eu write --prefix=true /refiller/pools/lead/":          {coordinate},
	"eu readwrite --prefix=true /refiller/regions/eu/lead/": {leadRegion},

	"us read --prefix=true /refiller/pools/":                {reportTickets, readStatus},
	"us write /refiller/pools/cfg":                          {reportTickets},
	"us write /refiller/pools/rep/us":                       {reportTickets},
	"us readwrite --prefix=true /refiller/regions/us/lead/": {leadRegion},

	"operator read --prefix=true /refiller/pools/":        {readStatus, fenceAndLift},
	"operator write --prefix=true /refiller/pools/fence/": {fenceAndLift},
}

// use is an operation of a user of etcd. It returns an error if etcd refuses a call.
type use func(*user) error

// user is a user of etcd with the rights that the page prints. The user of a region has the name of the region.
type user struct {
	t       *testing.T
	name    string
	admin   *clientv3.Client
	client  *clientv3.Client
	redis   *testenv.RedisServer
	version *int64 // version of the latest settings; all users share it
}

// TestEachPrintedRightOfPoolsIsNeeded removes one printed right at a time, and then restores it. etcd must refuse each
// operation of the right without it, and none with it.
func TestEachPrintedRightOfPoolsIsNeeded(t *testing.T) {
	t.Parallel()
	etcd, redis := testenv.Etcd(t, 1, testenv.WithPassword(password)), testenv.Redis(t)
	admin, version := etcd.Client(), int64(0)
	var printed []string
	for _, b := range recipeBlocks(t)["Rights in etcd"] {
		for _, c := range b.commands() {
			words := strings.Fields(c.Text)
			administer(t, admin, words)
			if words[2] == "grant-permission" {
				printed = append(printed, strings.Join(words[3:], " "))
			}
		}
	}
	require.ElementsMatch(t, printed, slices.Collect(maps.Keys(uses)))
	for _, text := range printed {
		r := parseRight(t, strings.Fields(text))
		u := &user{
			t: t, name: r.role, admin: admin, client: clientOf(t, etcd, r.role), redis: redis, version: &version,
		}
		for _, less := range r.lesser() {
			less.grant(t, admin)
			for _, use := range uses[text] {
				err := use(u)
				require.ErrorContains(t, err, "permission denied", "without %s", text)
				t.Logf("without %s: %v", text, err)
			}
		}
		r.grant(t, admin)
		for _, use := range uses[text] {
			require.NoError(t, use(u), "with %s", text)
		}
	}
}

// right is a right of a role to a key or, if end is set, to the keys from key to end.
type right struct {
	role, may, key, end string
}

// parseRight reads the arguments of etcdctl role grant-permission.
func parseRight(t *testing.T, words []string) right {
	t.Helper()
	keys := words[2:]
	r := right{role: words[0], may: words[1], key: keys[len(keys)-1]}
	if keys[0] == "--prefix=true" {
		r.end = clientv3.GetPrefixRangeEnd(r.key)
	}
	return r
}

// lesser returns the rights that are one less: "read" and "write" for "readwrite", and none for each of these.
func (r right) lesser() (list []right) {
	left := []string{""}
	if r.may == "readwrite" {
		left = []string{"read", "write"}
	}
	for _, may := range left {
		list = append(list, right{r.role, may, r.key, r.end})
	}
	return list
}

// grant grants a role this right. It replaces the role's right to the same keys.
func (r right) grant(t *testing.T, admin *clientv3.Client) {
	t.Helper()
	if r.may == "" {
		_, err := admin.RoleRevokePermission(t.Context(), r.role, r.key, r.end)
		require.NoError(t, err, r)
		return
	}
	may, ok := map[string]clientv3.PermissionType{
		"read": clientv3.PermissionType(clientv3.PermRead), "write": clientv3.PermissionType(clientv3.PermWrite),
		"readwrite": clientv3.PermissionType(clientv3.PermReadWrite),
	}[r.may]
	require.True(t, ok, r)
	_, err := admin.RoleGrantPermission(t.Context(), r.role, r.key, r.end, may)
	require.NoError(t, err, r)
}

// clientOf returns a client that is authenticated as a user.
func clientOf(t *testing.T, etcd *testenv.EtcdCluster, user string) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints: etcd.Endpoints(), Username: user, Password: password, Logger: zap.NewNop(),
	})
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	return client
}

const poolsPrefix = "/refiller/pools"

// poolTiming is short: the test waits for a report, and for the share that answers it.
var poolTiming = pool.Timing{Report: 100 * time.Millisecond, Lease: time.Second}

// work runs until its context ends.
type work func(context.Context, hclog.Logger)

// do runs all works until done returns. If etcd refuses a call by then, do returns that error.
func (u *user) do(done func(context.Context), all ...work) error {
	ctx, stop := context.WithCancelCause(u.t.Context())
	defer stop(nil)
	ctx, cancel := context.WithTimeout(ctx, recipePatience)
	defer cancel()
	log := hclog.New(&hclog.LoggerOptions{Output: refusals(stop)})
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() { w(ctx, log) })
	}
	wg.Go(func() {
		done(ctx)
		stop(context.Canceled)
	})
	wg.Wait()
	err := context.Cause(ctx)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// refusals is a log output. It calls the function for each line that says that etcd refuses a call.
type refusals func(error)

var refused = regexp.MustCompile(`permission denied|` + refusedRights.String())

func (r refusals) Write(line []byte) (int, error) {
	if refused.Match(line) {
		r(errors.New("permission denied: " + string(line)))
	}
	return len(line), nil
}

// written returns a function that waits until each of the keys has been written after the call of written.
func (u *user) written(keys ...string) func(context.Context) {
	now, err := u.admin.Get(u.t.Context(), poolsPrefix)
	require.NoError(u.t, err)
	return func(ctx context.Context) {
		missing := map[string]bool{}
		for _, key := range keys {
			missing[poolsPrefix+"/"+key] = true
		}
		from := clientv3.WithRev(now.Header.Revision + 1)
		for resp := range u.admin.Watch(ctx, poolsPrefix, clientv3.WithPrefix(), from) {
			for _, event := range resp.Events {
				delete(missing, string(event.Kv.Key))
			}
			if len(missing) == 0 {
				return
			}
		}
	}
}

// agent returns the work of an agent whose settings are later than those in etcd.
func (u *user) agent() work {
	*u.version++
	p := pool.Pool{Name: "payments", Rate: policy.PerSecond(1000), Capacity: 2000, Regions: []pool.Region{
		{Name: "eu", Weight: 1}, {Name: "us", Weight: 1},
	}}
	settings := pool.Settings{Version: *u.version, Pools: []pool.Pool{p}}
	return func(ctx context.Context, log hclog.Logger) {
		agent, err := pool.NewAgent(pool.AgentConfig{
			Client: u.client, Prefix: poolsPrefix, Redis: u.redis.Client(), Region: u.name, Identity: u.name,
			Settings: settings, Timing: poolTiming, Logger: log,
		})
		if err == nil {
			err = agent.Run(ctx)
		}
		if err != nil {
			u.t.Error(err)
		}
	}
}

// elector returns the work of a candidate that calls lead once it is elected.
func (u *user) elector(prefix string, lead func(context.Context, election.Term) error) work {
	return func(ctx context.Context, log hclog.Logger) {
		cfg := election.DefaultConfig()
		cfg.Client = u.client
		cfg.Prefix = prefix
		cfg.Identity = u.name
		cfg.Logger = log
		candidate, err := election.New(cfg)
		if err == nil {
			err = candidate.Run(ctx, lead)
		}
		if err != nil {
			u.t.Error(err)
		}
	}
}

// reportTickets proposes settings and reports, as each replica does.
func reportTickets(u *user) error { return u.do(u.written("cfg", "rep/"+u.name), u.agent()) }

// coordinate coordinates the regions, as one of all replicas does.
func coordinate(u *user) error {
	return u.do(u.written("epoch", "share/"+u.name), u.agent(), func(ctx context.Context, log hclog.Logger) {
		c, err := pool.NewCoordinator(pool.CoordinatorConfig{
			Client: u.client, Prefix: poolsPrefix, Timing: poolTiming, Logger: log,
		})
		if err != nil {
			u.t.Error(err)
			return
		}
		c.AwaitRights(ctx)
		u.elector(poolsPrefix, c.Lead)(ctx, log)
	})
}

// leadRegion leads the replicas of a region, as one replica of the region does.
func leadRegion(u *user) error {
	elected := make(chan struct{})
	return u.do(
		func(ctx context.Context) {
			select {
			case <-elected:
			case <-ctx.Done():
			}
		},
		u.elector("/refiller/regions/"+u.name, func(ctx context.Context, _ election.Term) error {
			close(elected)
			<-ctx.Done()
			return nil
		}),
	)
}

// readStatus reads the status that "refiller pool status" and the status page show.
func readStatus(u *user) error {
	_, err := pool.ReadStatus(u.t.Context(), u.client, poolsPrefix)
	return err
}

// fenceAndLift drains a region, and then lifts the drain.
func fenceAndLift(u *user) error {
	err := pool.Fence(u.t.Context(), u.client, poolsPrefix, "us", pool.Fencing{Operator: u.name, Drain: true})
	if err != nil {
		return err
	}
	return pool.Lift(u.t.Context(), u.client, poolsPrefix, "us")
}
