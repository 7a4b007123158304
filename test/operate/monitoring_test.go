package operate

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/internal/operate/metrics"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/internal/timing"
)

// panel has the fields of a dashboard's panel that the tests read.
type panel struct {
	Title   string
	Type    string
	Targets []struct{ Expr, LegendFormat string }
}

func dashboardPanels(t *testing.T) []panel {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(monitoring, "dashboard.json"))
	require.NoError(t, err)
	var d struct{ Panels []panel }
	require.NoError(t, json.Unmarshal(data, &d))
	require.NotEmpty(t, d.Panels)
	return d.Panels
}

var (
	metricName = regexp.MustCompile(`\b(?:refiller|process|go)_[a-z_]+\b`)
	selector   = regexp.MustCompile(`(\w+)=~?"`)
	grouping   = regexp.MustCompile(`(?:by|on) \(([\w, ]+)\)`)
)

// exported returns the names of the series that the nodes export, and the names of their labels.
func exported(t *testing.T, nodes ...*node) (names, labels map[string]bool) {
	names, labels = map[string]bool{}, map[string]bool{"instance": true, "job": true, "namespace": true}
	for _, n := range nodes {
		body, err := n.get("/metrics")
		require.NoError(t, err)
		for line := range strings.Lines(body) {
			if strings.HasPrefix(line, "#") {
				continue
			}
			name, rest, _ := strings.Cut(line, " ")
			name, _, _ = strings.Cut(name, "{")
			names[name] = true
			for _, l := range regexp.MustCompile(`(\w+)="`).FindAllStringSubmatch(line, -1) {
				labels[l[1]] = true
			}
			require.NotEmpty(t, rest)
		}
	}
	return names, labels
}

// demo starts three replicas in election mode etcd with a pool of one region, and
// a consumer of one bucket.
func demo(t *testing.T) []*node {
	t.Helper()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	config := fmt.Sprintf("region: eu\npools: [{name: payments, rate: 100/s, capacity: 300, regions: {eu: {}}}]\nredis: {url: %q}\nversion: 1\nelection: {mode: etcd, endpoints: [%q], ttl: 2s}\nbuckets:\n"+
		"  - {key: checkout, capacity: 1000, rate: 500/s}\n  - {key: mail, capacity: 100, rate: 10/s}\n"+
		"templates: [{prefix: \"user:\", capacity: 60, rate: 1/s}]\n", server.URL(),
		etcd.Endpoints()[0])
	var nodes []*node
	for _, name := range []string{"a", "b", "c"} {
		nodes = append(nodes, startNode(t, name, config))
	}
	for _, n := range nodes {
		n.ready()
	}
	consume(t, server.Client(), "checkout")
	return nodes
}

// sidecar starts a sidecar with a window limit of five a second, and calls it until the test ends.
func sidecar(t *testing.T, server *testenv.RedisServer) *node {
	t.Helper()
	file := filepath.Join(t.TempDir(), "limits.yaml")
	require.NoError(t, os.WriteFile(file, []byte("limits: [{name: api, window: {limit: 5, length: 1s}}]"), 0o600))
	n := &node{t: t, Process: testenv.Start(t, testenv.Build(t, "./cmd/consumer"), "serve", "--redis",
		server.URL(), "--http", "127.0.0.1:0", "--grpc", "none", "--limits", file)}
	found, err := n.WaitLog(t.Context(), regexp.MustCompile(`listening: protocol=http .*address=(\S+)`))
	require.NoError(t, err)
	n.addr = found[1]
	ask := func(ctx context.Context) {
		for _, path := range []string{"/v1/check?limit=api&key=k", "/v1/peek?key=checkout"} {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+n.addr+path, nil)
			if err != nil {
				continue
			}
			res, err := http.DefaultClient.Do(req)
			if err == nil {
				_ = res.Body.Close()
			}
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	ask(ctx)
	var asking sync.WaitGroup
	asking.Go(func() {
		for timing.Sleep(ctx.Done(), 20*time.Millisecond) {
			ask(ctx)
		}
	})
	t.Cleanup(asking.Wait)
	t.Cleanup(stop)
	return n
}

// sidecars starts two sidecars. The Redis of the second one is down.
func sidecars(t *testing.T) []*node {
	t.Helper()
	down := testenv.Redis(t)
	down.Kill()
	return []*node{sidecar(t, testenv.Redis(t)), sidecar(t, down)}
}

// leader waits until a replica leads and has read all buckets, and returns it.
func leader(t *testing.T, nodes []*node) (l *node) {
	t.Helper()
	eventually(t, func() bool {
		for _, n := range nodes {
			if n.Running() && n.status().Leading {
				l = n
				return true
			}
		}
		return false
	}, patience, 20*time.Millisecond, "a replica leads")
	eventually(t, func() bool {
		_, known := l.metric("refiller_bucket_tokens")
		return known == min(l.status().Total, metrics.MaxBuckets)
	}, patience, 20*time.Millisecond, "the leader knows the buckets")
	return l
}

// coordinator waits until a replica coordinates the pool and has the report of its region.
func coordinator(t *testing.T, nodes []*node) {
	t.Helper()
	eventually(t, func() bool {
		for _, n := range nodes {
			if n.Running() {
				if _, known := n.metric("refiller_pool_claimed_tokens_per_second"); known == 1 &&
					len(n.status().Pools.Shares) == 1 {
					return true
				}
			}
		}
		return false
	}, patience, 20*time.Millisecond, "a replica coordinates the pool")
}

func TestEveryQueryFindsWhatTheProgramExports(t *testing.T) {
	t.Parallel()
	nodes := demo(t)
	leader(t, nodes)
	coordinator(t, nodes)
	names, labels := exported(t, append(nodes, sidecars(t)...)...)
	check := func(where, expr string) {
		for _, name := range metricName.FindAllString(expr, -1) {
			require.True(t, names[name], "%s asks for %s, which is not exported", where, name)
		}
		var asked []string
		for _, l := range selector.FindAllStringSubmatch(expr, -1) {
			asked = append(asked, l[1])
		}
		for _, l := range grouping.FindAllStringSubmatch(expr, -1) {
			asked = append(asked, strings.Split(l[1], ", ")...)
		}
		for _, l := range asked {
			require.True(t, labels[l] || l == "le", "%s asks for label %s, which is not exported", where, l)
		}
	}
	for _, r := range alertRules(t) {
		require.NotEmpty(t, metricName.FindString(r.Expr))
		check("alert "+r.Alert, r.Expr)
	}
	for _, p := range dashboardPanels(t) {
		for _, target := range p.Targets {
			require.NotEmpty(t, metricName.FindString(target.Expr))
			check("panel "+p.Title, target.Expr)
		}
	}
}

// prometheus is a real Prometheus that scrapes the replicas.
type prometheus struct {
	t   *testing.T
	url string
}

func startPrometheus(t *testing.T, nodes []*node) *prometheus {
	t.Helper()
	var targets []string
	for _, n := range nodes {
		targets = append(targets, strconv.Quote(n.addr))
	}
	rules, err := filepath.Abs(filepath.Join(monitoring, "alerts.yaml"))
	require.NoError(t, err)
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil,
		"global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\n"+
			"scrape_configs:\n  - job_name: refiller\n    static_configs: [{targets: [%s]}]\n", rules,
		strings.Join(targets, ", ")), 0o600))
	p := testenv.Start(t, tool(t, "prometheus"), "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address=127.0.0.1:0")
	found, err := p.WaitLog(t.Context(), regexp.MustCompile(`Listening on" address=(\S+)`))
	require.NoError(t, err)
	_, err = p.WaitLog(t.Context(), regexp.MustCompile("Server is ready to receive web requests"))
	require.NoError(t, err)
	return &prometheus{t, "http://" + found[1]}
}

// query returns the values of an instant query.
func (p *prometheus) query(expr string) []float64 {
	p.t.Helper()
	res, err := http.Get(p.url + "/api/v1/query?query=" + url.QueryEscape(expr)) //nolint:noctx // ends with the server
	require.NoError(p.t, err)
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	require.NoError(p.t, err)
	require.Equal(p.t, http.StatusOK, res.StatusCode, "%s: %s", expr, body)
	var answer struct {
		Data struct {
			Result []struct{ Value [2]any }
		}
	}
	require.NoError(p.t, json.Unmarshal(body, &answer))
	var values []float64
	for _, r := range answer.Data.Result {
		v, err := strconv.ParseFloat(r.Value[1].(string), 64)
		require.NoError(p.t, err)
		values = append(values, v)
	}
	return values
}

// scraped is how long Prometheus scrapes before the panels are checked.
var scraped = flag.Duration("scraped", 10*time.Second, "how long Prometheus scrapes before the panels are checked")

func TestNoPanelIsWithoutDataInARealPrometheus(t *testing.T) {
	t.Parallel()
	nodes := demo(t)
	first := leader(t, nodes)
	p := startPrometheus(t, append(slices.Clone(nodes), sidecars(t)...))
	eventually(t, func() bool { return len(p.query("refiller_leading")) == 3 }, patience, 100*time.Millisecond)
	first.Kill() // some panels show take-overs, so there must be one
	leader(t, nodes)
	coordinator(t, nodes)
	rest(t, *scraped)
	expand := strings.NewReplacer("$__rate_interval", scraped.String(), "$instance", ".*", "$bucket", ".*",
		"$namespace", ".*", "$job", ".*", "$region", ".*")
	for _, panel := range dashboardPanels(t) {
		if panel.Type == "row" {
			require.Empty(t, panel.Targets)
			continue
		}
		require.NotEmpty(t, panel.Targets, panel.Title)
		for _, target := range panel.Targets {
			values := p.query(expand.Replace(target.Expr))
			require.NotEmpty(t, values, "panel %s has no data: %s", panel.Title, target.Expr)
			for _, v := range values {
				require.False(t, math.IsNaN(v), "panel %s has no number: %s", panel.Title, target.Expr)
			}
		}
	}
	require.Empty(t, p.query(`ALERTS{alertstate="firing",severity="critical"}`), "no critical alert fires")
	beyond := p.query("sum(increase(refiller_credit_added_tokens_total[" + scraped.String() +
		"])) - sum(increase(refiller_credit_due_tokens_total[" + scraped.String() + "]))")
	require.InDelta(t, 0, beyond[0], 5, "refills credit only tokens that are due")
}
