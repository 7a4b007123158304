package operate

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/tokenrefill/refiller/fetch"
	"github.com/tokenrefill/refiller/internal/testing/testenv"
	"github.com/tokenrefill/refiller/lua"
)

var lookPath = exec.LookPath

// thousand starts three replicas in election mode etcd with a thousand buckets, and
// consumers of one bucket and of one template.
func thousand(t *testing.T) ([]*node, *redis.Client) {
	t.Helper()
	server, etcd := testenv.Redis(t), testenv.Etcd(t, 1)
	var config strings.Builder
	fmt.Fprintf(&config, "redis: {url: %q}\nversion: 7\nregion: eu-west-1\nelection: {mode: etcd, endpoints: [%q], ttl: 2s}\nbuckets:\n", server.URL(), etcd.Endpoints()[0])
	config.WriteString("  - {key: checkout, capacity: 1000, rate: 500/s}\n  - {key: partner-api, capacity: 600, rate: 100/s, initial: 150}\n" +
		"  - {key: mail, capacity: 5000, rate: 20/s, initial: 1000}\n  - {key: daily-report, capacity: 1000, every: 24h, tokens: 1000}\n")
	for i := range 996 {
		fmt.Fprintf(&config, "  - {key: \"tenant:%04d\", capacity: %d, rate: %d/s, initial: %d}\n", i, 500+i, 10+i%50, i%400)
	}
	config.WriteString("templates:\n  - {prefix: \"user:\", capacity: 1000, rate: 100/s}\n" +
		"pools:\n  - {name: payments, rate: 1000/s, capacity: 2000, regions: {eu-west-1: {floor: 100/s}}}\n")
	var nodes []*node
	for _, name := range []string{"refiller-0", "refiller-1", "refiller-2"} {
		nodes = append(nodes, startNode(t, name, config.String()))
	}
	rdb := server.Client()
	eventually(t, func() bool {
		_, err := lua.Peek(t.Context(), rdb, "tenant:0995", 1)
		return err == nil
	}, patience,
		20*time.Millisecond)
	consume(t, rdb, "checkout")
	takeTemplate(t, rdb, "user:busy")
	return nodes, rdb
}

// takeTemplate takes from a template's bucket until the test ends.
func takeTemplate(t *testing.T, rdb *redis.Client, key string) {
	t.Helper()
	client, err := fetch.New(rdb)
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		for t.Context().Err() == nil { // the context of a test ends before its cleanups
			_, _ = client.Wait(t.Context(), key, 10) // fails at the end of the test, or during an outage
		}
	})
	t.Cleanup(func() {
		wg.Wait()
		_ = client.Close(context.Background())
	})
}

func TestTheStatusPageInARealBrowser(t *testing.T) {
	nodes, rdb := thousand(t)
	old := leader(t, nodes)
	old.Kill()
	n := leader(t, nodes)
	_, err := rdb.TxPipelined(t.Context(), func(p redis.Pipeliner) error { // no replica may refill between the two
		p.Del(t.Context(), "partner-api")
		p.RPush(t.Context(), "partner-api", "a list where tokens should be")
		return nil
	})
	require.NoError(t, err)
	b := openBrowser(t)
	url := "http://" + n.addr + "/"

	b.open(url, 1280, 900, "light")
	var paint float64
	b.until(`performance.getEntriesByName("first-contentful-paint").length`)
	b.eval(`performance.getEntriesByName("first-contentful-paint")[0].startTime`, &paint)
	t.Logf("first paint with 1000 buckets after %.0f ms", paint)
	require.Less(t, paint, 15_000.0, "the first paint comes within half a second on an idle machine")
	for _, want := range []string{n.status().Identity + " leads", "version 7", "1 to 50 of 1\u202f000", "checkout",
		"eu-west-1"} {
		b.until("document.body.innerText.includes(" + strconv.Quote(want) + ")")
	}
	b.until(`document.getElementById("takes").innerText.includes("ago")`) // the take-over is shown with its gap

	// Alerts are shown first. Templates show their busiest buckets, and pools a drawing of their shares.
	b.until(`document.querySelector("#alerts .alert")?.innerText.includes("1 bucket can't be refilled") && document.getElementById("alerts").innerText.includes("partner-api")`)
	b.until(`/user:busy [\d.]+\/s/.test(document.getElementById("prefixes").innerText)`)
	b.until(`document.querySelector("#shares .bands .lent")?.width.baseVal.value > 50`)
	b.until(`["floor", "lent", "demand"].every(c => document.querySelector("#shares .shares ." + c)?.getAttribute("d"))`)

	b.until(`document.getElementById("alive").innerText.includes("(this one)") && document.querySelectorAll("#alive tbody tr").length >= 2`)

	// The trend of a bucket that is taken from has an area and a line.
	b.until(`document.querySelector("tr[data-key=checkout] .trend .area")?.getAttribute("d") && document.querySelector("tr[data-key=checkout] .trend .line").getAttribute("d").includes("L")`)

	// The numbers change without a reload of the page. The alert about the bucket isn't replaced meanwhile, although on a
	// busy machine another alert may appear and disappear before it.
	b.eval(`window.mine = () => [...document.querySelectorAll("#alerts .alert")]
		.find(a => a.innerText.includes("can't be refilled"))`, nil)
	b.eval(`window.stays = 1`, nil)
	eventually(t, func() bool { // repeated, because a replica without processor time loses Redis, which changes the alert
		b.eval(`(alert => { if (alert) alert.mine = "1" })(mine())`, nil)
		b.eval(`window.was = document.querySelector("tr[data-key=checkout]").innerText`, nil)
		b.until(`document.querySelector("tr[data-key=checkout]").innerText != window.was && window.stays == 1`)
		var kept string
		b.eval(`mine()?.mine ?? ""`, &kept)
		return kept == "1"
	}, patience, 50*time.Millisecond, "the page keeps the element of an unchanged alert")
	b.until(`/[1-9]/.test(document.querySelector("tr[data-key=checkout] [data-label=Taken]").innerText)`)
	b.until(`document.querySelector('tr[data-key="checkout"] [data-label="Found empty"]').innerText != "–"`)
	b.shot("light")

	// The page works by keyboard: "/" moves to the search, typed text filters the buckets, and Tab moves on.
	b.press("/", "/")
	b.do("Input.insertText", map[string]any{"text": "TENANT:09"}, nil)
	b.until(`document.querySelectorAll("#rows tr").length == 50 && document.querySelector("#rows tr").dataset.key == "tenant:0900"`)
	b.until(`document.getElementById("pager").innerText.includes("of 96")`)
	b.until(`document.activeElement.id == "q" && location.search.includes("q=TENANT")`)
	b.until(`[...document.querySelectorAll("#sorts a, #heads a")].every(a => a.search.includes("q=TENANT"))`)
	b.press("Tab", "")
	b.until(`document.activeElement.tagName == "BUTTON"`)
	b.eval(`document.querySelector("[rel=next]").click()`, nil)
	b.until(`document.querySelector("#rows tr")?.dataset.key == "tenant:0950"`)

	b.open(url+"?sort=fill", 1280, 900, "dark")
	// The emptiest bucket is first. The malformed bucket has no bar.
	b.until(`(() => { const p = [...document.querySelectorAll("#rows progress")].map(p => p.value / p.max); return p.length >= 49 && p.every((v, i) => !i || v >= p[i-1]); })()`)
	b.shot("dark-by-fill")
	b.open(url, 1280, 900, "dark")
	var dark string
	b.eval(`getComputedStyle(document.body).backgroundColor`, &dark)
	require.Equal(t, "rgb(20, 23, 28)", dark)
	b.shot("dark")

	for _, scheme := range []string{"dark", "light"} {
		for _, width := range []int{2560, 1280, 1024, 768, 360} {
			b.open(url, width, 900, scheme)
			b.until(`document.querySelector("#rows .fault")?.innerText.includes("malformed")`)
			var out []string
			b.eval(fmt.Sprintf(`[...document.querySelectorAll("body *")].filter(e => !e.closest("svg") &&
				!e.classList.contains("skip") && e.getBoundingClientRect().right > %d).map(e => e.outerHTML.slice(0, 80))`,
				width), &out)
			require.Empty(t, out, "no element is wider than the page at %d px", width)
			b.eval(`["Refilled", "Grant"].filter(label =>
				[...document.querySelectorAll("[data-label=" + label + "]")].some(e =>
				e.parentElement.getBoundingClientRect().width > e.getBoundingClientRect().width + 1))`, &out)
			if width < 1024 {
				require.Empty(t, out, "cells in separate rows have the width of the row at %d px", width)
			}
			b.shot(fmt.Sprintf("%dpx-%s", width, scheme))
			b.eval(`document.getElementById("templates").scrollIntoView()`, nil)
			b.shot(fmt.Sprintf("%dpx-%s-templates", width, scheme))
		}
	}
	b.eval(`document.getElementById("buckets").scrollIntoView()`, nil)
	b.shot("phone-buckets")

	// The contrast between text and background, by the formula of WCAG 2, is at least 4.5.
	for _, scheme := range []string{"light", "dark"} {
		b.open(url, 1280, 900, scheme)
		var worst float64
		b.eval(`(() => {
			const lum = c => { const [r, g, b] = c.match(/[\d.]+/g).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * r + .7152 * g + .0722 * b; };
			const back = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!c.endsWith(", 0)")) return c; } return "rgb(255, 255, 255)"; };
			return Math.min(...[...document.querySelectorAll("h1, h2, p, td, th, a, strong, button, footer, caption")].filter(e => e.innerText && e.getClientRects().length).map(e => {
				const [x, y] = [lum(getComputedStyle(e).color), lum(back(e))]; return (Math.max(x, y) + .05) / (Math.min(x, y) + .05); }));
		})()`, &worst)
		require.GreaterOrEqual(t, worst, 4.5, scheme)
	}
	require.Empty(t, b.wrong, "the console has no errors, and the page calls no other host")

	n.Kill()
	b.until(`!document.getElementById("lost").hidden`)
}

func TestThePageOnlyReadsAndSaysWhatIsWrong(t *testing.T) {
	t.Parallel()
	server := testenv.Redis(t)
	n := startNode(t, "a", "region: x\n"+limit(server.URL(), 1, "100/s"))
	n.ready()
	n.configure(limit(server.URL(), 1, "never <b>"))
	eventually(t, func() bool { return n.status().Reload.Refused == 1 }, patience, 20*time.Millisecond)
	page, err := n.get("/")
	require.NoError(t, err)
	require.Contains(t, page, "The configuration file was refused")
	require.Contains(t, page, "never &lt;b&gt;", "text of others is escaped")
	require.NotContains(t, page, "http://", "the page loads nothing from other hosts")
	page, err = n.get("/?q=%3Cscript%3E")
	require.NoError(t, err)
	require.NotContains(t, page, "<script>")
	require.Contains(t, page, "No bucket")
	for _, bad := range []string{"/?offset=-1", "/?sort=x", "/status?limit=100000", "/nothing"} {
		_, err := n.get(bad)
		require.Error(t, err, bad)
	}
	for _, path := range []string{"/", "/status", "/metrics", "/livez"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+n.addr+path, nil)
		require.NoError(t, err)
		res, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, res.Body.Close())
		require.Equal(t, http.StatusMethodNotAllowed, res.StatusCode)
	}
}
