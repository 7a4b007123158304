package docs

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/pool"
)

// poolRecipes has a function for each heading of docs/pools.md with blocks that are marked "recipe". The function runs
// these blocks, and does between them what the text describes. The recipes of an inner list run one after the other
// with the same regions.
var poolRecipes = [][]poolRecipe{
	{
		{"Operate", takeOutOfService}, {"Move a region's Redis", moveRedis}, {"Rename a region", renameRegion},
	},
	{{"Lose the home region", loseHome}},
	{{"Rights in etcd", grantRights}},
}

type poolRecipe struct {
	heading string
	play    func(*recipe)
}

// TestRecipesOfPoolsRunAsPrinted runs every block of docs/pools.md that is marked "recipe", with real regions.
func TestRecipesOfPoolsRunAsPrinted(t *testing.T) {
	t.Parallel()
	sections := recipeBlocks(t)
	played := 0
	for _, chain := range poolRecipes {
		for _, one := range chain {
			require.NotEmpty(t, sections[one.heading], one.heading)
			played++
		}
		t.Run(chain[0].heading, func(t *testing.T) {
			t.Parallel()
			w := &recipe{t: t, regions: map[string]*recipeRegion{}, clients: map[*testenv.EtcdCluster]*clientv3.Client{}}
			for _, one := range chain {
				w.blocks = sections[one.heading]
				one.play(w)
				require.Empty(t, w.blocks, "the recipe %q has further blocks", one.heading)
			}
		})
	}
	require.Len(t, sections, played, "this test plays every recipe")
}

// recipeBlocks returns the blocks of docs/pools.md that are marked "recipe", by heading.
func recipeBlocks(t *testing.T) map[string][]block {
	t.Helper()
	page, err := os.ReadFile("../../docs/pools.md")
	require.NoError(t, err)
	sections := map[string][]block{}
	for _, part := range strings.Split("\n"+string(page), "\n#")[1:] {
		heading, text, _ := strings.Cut(strings.TrimLeft(part, "# "), "\n")
		blocks, err := parseBlocks(text)
		require.NoError(t, err, heading)
		blocks = slices.DeleteFunc(blocks, func(b block) bool { return !b.has("recipe") })
		if len(blocks) > 0 {
			sections[heading] = blocks
		}
	}
	return sections
}

// recipePatience is how long a recipe waits for an effect that the page promises. The machine may be busy.
const recipePatience = 3 * time.Minute

// recipe has the regions of a recipe, which share a pool, and the shell of an operator.
type recipe struct {
	t       *testing.T
	shell   *session
	etcd    *testenv.EtcdCluster // the etcd that the regions use
	clients map[*testenv.EtcdCluster]*clientv3.Client
	regions map[string]*recipeRegion
	blocks  []block // blocks of the recipe that were not run yet
	fenced  bool    // a region has been fenced: if it still runs, it may use tokens beyond the pool's rate
}

// recipeRegion is a region with a Redis and a replica.
type recipeRegion struct {
	redis    *testenv.RedisServer
	replica  *testenv.Process
	election string // fields of the election, without the ttl
	file     string // configuration file, in the shell's directory
}

// start starts a shell, and the Redis servers of the regions eu and us. election returns the fields of a region's
// election. The replicas are started later, with run.
func (w *recipe) start(election func(region string) string) {
	w.shell = newSession(w.t, "\nredis-server ") // starts no Redis: the regions have their own
	w.shell.run(block{Language: "sh", Text: "unset REFILLER_REDIS_URL REFILLER_LISTEN\n"})
	for _, name := range []string{"eu", "us"} {
		w.regions[name] = &recipeRegion{redis: testenv.Redis(w.t), election: election(name), file: name + ".yaml"}
	}
}

// configure writes the configuration of a region. name may be a new name of the region. pool has the names of all
// regions of the pool.
func (w *recipe) configure(name string, r *recipeRegion, version int, pool ...string) {
	w.shell.write(r.file, fmt.Sprintf(`region: %s
redis: {url: %q}
version: 1
pools_version: %d
election: {ttl: 2s, %s}
pools:
  - {name: payments, rate: 1000/s, capacity: 2000, regions: {%s: {floor: 100/s}}}
listen: 127.0.0.1:0
`, name, r.redis.URL(), version, r.election, strings.Join(pool, ": {floor: 100/s}, ")))
}

// run starts the replica of a region. If the replica runs already, run restarts it, so that it reads its file again.
func (w *recipe) run(r *recipeRegion) {
	if r.replica != nil {
		r.replica.Restart()
		return
	}
	r.replica = testenv.StartCommand(w.t, testenv.Command{
		Name: strings.TrimSuffix(r.file, ".yaml"), Path: testenv.Build(w.t, "./cmd/refiller"), Dir: w.shell.dir,
		Args: []string{"run", "--config", r.file},
	})
}

// newEtcd starts the etcd that the regions use from now on.
func (w *recipe) newEtcd(options ...testenv.Option) {
	w.etcd = testenv.Etcd(w.t, 1, options...)
	w.clients[w.etcd] = w.etcd.Client()
}

// shared starts an etcd and the regions, and waits until the regions share the rate.
func (w *recipe) shared() {
	w.newEtcd()
	w.start(func(string) string { return w.endpoint() })
	for name, r := range w.regions {
		w.configure(name, r, 1, "eu", "us")
		w.run(r)
	}
	w.await(w.etcd, "both regions have a share", lends("eu", "us"))
}

// endpoint returns the field of an election with the address of the present etcd.
func (w *recipe) endpoint() string { return fmt.Sprintf("endpoints: [%q]", w.etcd.Members()[0].Addr()) }

// step runs the next block as it is printed.
func (w *recipe) step() {
	w.t.Helper()
	w.shell.run(w.next())
}

func (w *recipe) next() block {
	w.t.Helper()
	require.NotEmpty(w.t, w.blocks, "the page has fewer blocks than the test plays")
	b := w.blocks[0]
	w.blocks = w.blocks[1:]
	return b
}

// status returns the pool's status from the records in etcd. It requires that the regions together never claim more
// than the rate, unless a region was fenced.
func (w *recipe) status(etcd *testenv.EtcdCluster) (p pool.PoolStatus) {
	w.t.Helper()
	s, err := pool.ReadLiveStatus(w.t.Context(), w.clients[etcd], "/refiller/pools")
	require.NoError(w.t, err)
	if len(s.Pools) == 0 {
		return p
	}
	claimed := 0.0
	for _, r := range s.Pools[0].Regions {
		claimed += r.Claimed
	}
	if !w.fenced {
		require.LessOrEqual(w.t, claimed, 1000.0001, "%+v", s.Pools)
	}
	return s.Pools[0]
}

// await waits until the pool's status is as wanted.
func (w *recipe) await(etcd *testenv.EtcdCluster, what string, wanted func(pool.PoolStatus) bool) {
	w.t.Helper()
	for began := time.Now(); ; time.Sleep(pause) {
		p := w.status(etcd)
		if wanted(p) {
			w.t.Logf("%s after %s", what, time.Since(began).Round(time.Second/10))
			return
		}
		require.Less(w.t, time.Since(began), recipePatience, "%s\n%+v", what, p)
	}
}

// part returns the status of a region in a pool. It is zero if the region isn't in the pool.
func part(p pool.PoolStatus, region string) pool.RegionStatus {
	i := slices.IndexFunc(p.Regions, func(r pool.RegionStatus) bool { return r.Region == region })
	if i < 0 {
		return pool.RegionStatus{}
	}
	return p.Regions[i]
}

// lends returns a condition: the regions are alive, and have acknowledged their grants.
func lends(regions ...string) func(pool.PoolStatus) bool {
	return func(p pool.PoolStatus) bool {
		return !slices.ContainsFunc(regions, func(region string) bool {
			r := part(p, region)
			return !r.Alive || !r.Applied || r.Remaining == 0 || r.Granted < r.Floor+1
		})
	}
}

// hasAll returns a condition: a region has the whole rate.
func hasAll(region string) func(pool.PoolStatus) bool {
	return func(p pool.PoolStatus) bool { return part(p, region).Granted > 999 && lends(region)(p) }
}

// denied waits until consumers of a region are denied. Even a bucket with the smallest capacity may have a token at
// first.
func (w *recipe) denied(r *recipeRegion) {
	w.t.Helper()
	take := "consumer take payments --redis " + r.redis.URL()
	w.shell.run(block{Language: "sh", Text: "until ! " + take + "; do sleep 0.1; done\n" + take + " # here exit code 3\n"})
}

// served waits until consumers of a region get tokens.
func (w *recipe) served(r *recipeRegion) {
	w.t.Helper()
	w.shell.run(block{Language: "sh", Text: "consumer wait payments -n 5 --redis " + r.redis.URL() + "\n"})
}

func takeOutOfService(w *recipe) {
	w.shared()
	us := w.regions["us"]
	w.step()
	w.denied(us)
	require.True(w.t, part(w.status(w.etcd), "us").Idle())
	us.replica.Stop()
	w.await(w.etcd, "eu has the whole rate", hasAll("eu"))
	w.run(us)
	w.step()
	w.await(w.etcd, "us has a share again", lends("eu", "us"))
	w.served(us)
}

func moveRedis(w *recipe) {
	us := w.regions["us"]
	w.step()
	w.denied(us)
	old := us.redis
	us.redis = testenv.Redis(w.t)
	w.configure("us", us, 1, "eu", "us")
	w.run(us)
	old.Stop()
	w.step()
	w.await(w.etcd, "us has a share with the new Redis", lends("eu", "us"))
	w.served(us)
}

func renameRegion(w *recipe) {
	eu, us := w.regions["eu"], w.regions["us"]
	w.step()
	us.replica.Stop()
	w.configure("eu", eu, 2, "eu", "na")
	w.configure("na", us, 2, "eu", "na")
	w.run(us)
	w.await(w.etcd, "the new name has a share", lends("eu", "na"))
	w.step()
	w.await(w.etcd, "the old name is not listed", func(p pool.PoolStatus) bool { return part(p, "us").Region == "" })
	w.served(us)
}

func loseHome(w *recipe) {
	w.shared()
	home := w.etcd
	eu, us := w.regions["eu"], w.regions["us"]
	home.Members()[0].Kill()
	eu.replica.Kill()
	eu.redis.Kill()

	w.newEtcd()
	us.election = w.endpoint()
	w.configure("us", us, 1, "eu", "us")
	w.run(us)
	w.await(w.etcd, "us reports to the new etcd", func(p pool.PoolStatus) bool {
		return part(p, "us").Alive && slices.Equal(p.Waits, []string{"eu"})
	})
	w.fenced = true
	w.step()
	w.await(w.etcd, "us has the whole rate", hasAll("us"))

	// The replicas of eu start again with the old etcd.
	home.Members()[0].Restart()
	eu.redis.Restart()
	w.run(eu)
	w.await(home, "eu reports to the old etcd", func(p pool.PoolStatus) bool { return part(p, "eu").Alive })
	output, code := w.shell.command("refiller pool status -c eu.yaml")
	require.Zero(w.t, code, output)
	require.Regexp(w.t, "no living region has a grant|closed: regions have only their floors", output)
	w.await(home, "the pool is closed in the old etcd", func(p pool.PoolStatus) bool {
		return part(p, "eu").Alive && part(p, "eu").Remaining == 0 && slices.Contains(p.Waits, "us")
	})

	eu.replica.Stop()
	home.Members()[0].Kill()
	eu.election = us.election
	w.configure("eu", eu, 1, "eu", "us")
	w.run(eu)
	w.step()
	w.await(w.etcd, "eu has a share again", lends("eu", "us"))
	w.served(eu)
}

// refusedRights matches the log of a replica that doesn't have the rights to coordinate.
var refusedRights = regexp.MustCompile(`etcd refuses this replica the right to write epoch and share/`)

// password is the password of every user of etcd.
const password = "secret"

func grantRights(w *recipe) {
	w.newEtcd(testenv.WithPassword(password))
	admin := w.clients[w.etcd]
	for len(w.blocks) > 0 {
		for _, c := range w.next().commands() {
			administer(w.t, admin, strings.Fields(c.Text))
		}
	}
	w.start(func(region string) string {
		return fmt.Sprintf("mode: etcd, username: %s, password_file: password, %s", region, w.endpoint())
	})
	w.shell.write("password", password)
	eu, us := w.regions["eu"], w.regions["us"]
	for name, r := range w.regions {
		w.configure(name, r, 1, "eu", "us")
	}
	w.run(us)
	_, err := us.replica.WaitLog(w.t.Context(), refusedRights)
	require.NoError(w.t, err)
	w.run(eu)
	w.await(w.etcd, "both regions have a share", lends("eu", "us"))
	w.served(us)
	w.operate(us)
	w.refuses("us", "pools/lead/1", "pools/epoch", "pools/share/us", "pools/rep/eu", "regions/eu/lead/1")
	w.refuses("eu", "pools/fence/us", "pools/rep/us", "regions/us/lead/1", "regions/eu/config")
	leaders, err := admin.Get(w.t.Context(), "/refiller/pools/lead/", clientv3.WithPrefix())
	require.NoError(w.t, err)
	require.Len(w.t, leaders.Kvs, 1)
	require.Contains(w.t, string(leaders.Kvs[0].Value), "eu/")
	require.NotContains(w.t, eu.replica.Log()+us.replica.Log(), "permission denied")
}

// operate drains a region and lifts the drain, as the user for operators. As the user of the region, etcd must refuse
// the drain.
func (w *recipe) operate(r *recipeRegion) {
	w.configure("us", &recipeRegion{
		redis: r.redis, file: "operator.yaml",
		election: strings.Replace(r.election, "username: us", "username: operator", 1),
	}, 1, "eu", "us")
	output, _ := w.shell.command("refiller pool fence us --drain --yes -c us.yaml")
	require.Contains(w.t, output, "permission denied")
	for _, command := range []string{"status", "fence us --drain --yes", "lift us"} {
		w.shell.run(block{Language: "sh", Text: "refiller pool " + command + " -c operator.yaml\n"})
	}
}

// refuses checks that etcd doesn't let a user write any of these keys.
func (w *recipe) refuses(user string, keys ...string) {
	client := clientOf(w.t, w.etcd, user)
	for _, key := range keys {
		_, err := client.Put(w.t.Context(), "/refiller/"+key, "1")
		require.ErrorContains(w.t, err, "permission denied", key)
	}
}

// administer carries out an etcdctl command, with the client of an administrator. New users get the same password.
func administer(t *testing.T, admin *clientv3.Client, words []string) {
	t.Helper()
	require.GreaterOrEqual(t, len(words), 4, words)
	args := words[3:]
	var err error
	switch strings.Join(words[:3], " ") {
	case "etcdctl role add":
		_, err = admin.RoleAdd(t.Context(), args[0])
	case "etcdctl user add":
		_, err = admin.UserAdd(t.Context(), args[0], password)
	case "etcdctl user grant-role":
		_, err = admin.UserGrantRole(t.Context(), args[0], args[1])
	case "etcdctl role grant-permission":
		parseRight(t, args).grant(t, admin)
	default:
		t.Fatalf("no command of etcdctl that this test knows: %v", words)
	}
	require.NoError(t, err, words)
}
